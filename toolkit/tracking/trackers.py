"""Starts accelerate's trackers by name, sends figures to them, and drops one that fails: a tracker stops no run.

Trackers live on rank 0. Each has one run for a run of ours; `trackers.json` in the run folder says which, so that a resumed run
goes on in it. accelerate would give all of them one project name and one folder, and let the first error end the run.
"""

import json
import logging
import posixpath
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.checkpoint.manifest import Checkpoint
from toolkit.config.load import RecipeConfig, dotted_keys
from toolkit.config.schema import TrackingConfig
from toolkit.distributed.comm import gather_objects, on_rank_0
from toolkit.distributed.watchdog import enter_phase
from toolkit.errors import UserError, refusal_named
from toolkit.files.durable import save_json
from toolkit.files.json_lines import load_json_lines

logger = logging.getLogger("toolkit")

TRACKERS_FILE = "trackers.json"
EXTRAS = ("tensorboard", "wandb", "trackio", "mlflow")
"""Trackers that an extra of this package installs, and whose stores are read back by tests."""
_FIX = {
    "wandb": "run `wandb login`, or set WANDB_MODE=offline",
    "mlflow": "see that the store of MLFLOW_TRACKING_URI answers",
}
_REFUSED_BY_MLFLOW = re.compile(r"[^/\w.\- :]")


@dataclass
class Trackers:
    """A run's trackers; other ranks than 0 have none."""

    running: list[Any] = field(default_factory=list)
    sent: dict[tuple[str, str], int] = field(default_factory=dict)
    """By tracker and kind of figures, the last step that its run had before this start."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Names of figures, as mlflow gets them."""


def check_trackers(config: TrackingConfig) -> None:
    """Refuse a tracker that accelerate does not know or that is not installed, by a `UserError` that names those that would
    work; accelerate would silently skip it."""
    if not config.log_with:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    from accelerate.utils import LoggerType

    built_in = {str(name) for name in LoggerType}
    usable = {str(name) for name in get_available_trackers()} | (set(LOGGER_TYPE_TO_CLASS) - built_in)
    for name in config.log_with:
        if name in usable:
            continue
        is_known = name in LOGGER_TYPE_TO_CLASS
        trouble = "is not installed" if is_known else "is not a tracker that accelerate knows"
        install = f": pip install 'shardtune[{name}]'" if name in EXTRAS else f": pip install {name}" if is_known else ""
        choice = f"installed are {', '.join(sorted(usable))}" if usable else "none is installed"
        raise UserError(f"tracking.log_with: {name!r} {trouble}{install}; {choice} (metrics.jsonl is written in any case)")


def start_trackers(trackers: Trackers, config: RecipeConfig, run_folder: Path, resume_from: Checkpoint | None) -> None:
    """Start the trackers of `tracking.log_with` on rank 0, or continue their runs; one that cannot start is a `UserError` on
    every rank. Collective."""
    if config.tracking.log_with:
        enter_phase("starting the trackers", counts_cpu=True)
        on_rank_0(lambda: _start(trackers, config, run_folder, resume_from))


def log_to_trackers(trackers: Trackers, kind: str, figures: dict[str, Any], step: int) -> None:
    """Send the numbers among `figures` to every tracker, as `kind/name`; one that fails is reported and dropped."""
    numbers = {f"{kind}/{key}": value for key, value in figures.items() if type(value) in (int, float)}
    for tracker in list(trackers.running):
        if not numbers or step <= trackers.sent.get((tracker.name, kind), -1):
            continue
        is_mlflow = tracker.name == "mlflow"
        named = {_name_for_mlflow(name, trackers.renamed) if is_mlflow else name: value for name, value in numbers.items()}
        try:
            tracker.log(named, step=step)
        except Exception as error:
            trackers.running.remove(tracker)
            what = f"{tracker.name} failed at step {step} ({_in_one_line(error)})"
            logger.warning(f"{what}: it gets no more figures of this run; metrics.jsonl has all of them")


def close_trackers(trackers: Trackers) -> None:
    """Finish every tracker; no rank leaves before. Collective.

    A tracker may upload for minutes, on rank 0 alone, and the launcher kills rank 0 soon after another rank has left.
    """
    enter_phase("closing the trackers", counts_cpu=True)
    while trackers.running:
        tracker = trackers.running.pop(0)
        try:
            tracker.finish()
        except Exception as error:
            logger.warning(f"{tracker.name} could not be closed ({_in_one_line(error)}): it may lack the last figures")
    gather_objects(None)  # waits for all


def _start(trackers: Trackers, config: RecipeConfig, run_folder: Path, resume_from: Checkpoint | None) -> None:
    step = -1 if resume_from is None else resume_from.step
    path = run_folder / TRACKERS_FILE
    known = json.loads(path.read_text(encoding="utf-8")) if resume_from and path.exists() else {"runs": {}, "sent": {}}
    sent: dict[str, int] = {}
    if resume_from:  # by kind of figures, the last step that any earlier start of the run has sent, also after its checkpoint
        sent, metrics = known["sent"], run_folder / "metrics.jsonl"
        for line in load_json_lines(metrics, skip_torn_end=True) if metrics.exists() else []:
            if line["kind"] in ("train", "eval"):
                sent[line["kind"]] = max(line["step"], sent.get(line["kind"], -1))
    runs: dict[str, str] = {}
    for name in dict.fromkeys(config.tracking.log_with):
        run_id = known["runs"].get(name)
        try:
            tracker = _build(name, config, run_folder, run_id, step + 1)
            tracker.start()
            _store_config(tracker, dotted_keys(config), is_continued=run_id is not None)
        except Exception as error:
            fix = _FIX.get(name, "fix that")
            remedy = f"{fix}, or leave it out of tracking.log_with; metrics.jsonl is written in any case"
            raise UserError(f"tracking.log_with: {name} could not start ({_in_one_line(error)}): {remedy}") from None
        trackers.running.append(tracker)
        if run_id is not None:
            trackers.sent.update({(name, kind): last for kind, last in sent.items()})
        if name in ("wandb", "trackio", "mlflow"):
            runs[name] = tracker.tracker.info.run_id if name == "mlflow" else tracker.tracker.id
    last = max(sent.values(), default=-1)
    if last > step and (names := ", ".join(name for name in runs if name in known["runs"])):
        logger.info(f"steps {step + 1} to {last} are trained again: {names} keeps their first figures, metrics.jsonl does not")
    with refusal_named(f"{path} cannot be written", "fix that first"):
        save_json(path, {"runs": known["runs"] | runs, "sent": sent})


def _build(name: str, config: RecipeConfig, run_folder: Path, run_id: str | None, next_step: int) -> Any:
    """accelerate's tracker, or the user's own, not started; `run_id` is that of its run to continue."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    build: Any = LOGGER_TYPE_TO_CLASS[name]
    options: dict[str, Any] = {}
    if name == "tensorboard":  # a folder is a run; events from `purge_step` on, before a resume, are not shown
        return build(name, str(run_folder), purge_step=next_step)
    if name == "wandb":
        import wandb

        # Without a key it would ask for one in a terminal, where the other ranks wait.
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
            raise RuntimeError("no API key is configured")
        settings = wandb.Settings(silent=True, console="off")
        options = {"name": config.run.name, "id": run_id, "resume": "allow", "dir": str(run_folder), "settings": settings}
    elif name == "trackio":
        options = {"name": config.run.name, "resume": "allow" if run_id else "never"}
    elif name == "mlflow":
        options = {"run_name": config.run.name, "run_id": run_id}
    elif name in ("swanlab", "clearml"):
        options = {"experiment_name" if name == "swanlab" else "task_name": config.run.name}
    folder = [config.run.output_dir] if build.requires_logging_directory else []
    return build(config.tracking.project_name, *folder, **options)


def _store_config(tracker: Any, flat_config: dict[str, Any], *, is_continued: bool) -> None:
    """Give the tracker the run's dotted config: numbers, strings and booleans as they are, anything else as JSON."""
    plain = {key: value if isinstance(value, int | float | str) else json.dumps(value) for key, value in flat_config.items()}
    if tracker.name == "tensorboard":
        # accelerate's own way makes a second run, named by the time.
        from torch.utils.tensorboard.summary import hparams

        for summary in hparams(plain, {"train/loss": 0, "eval/loss": 0}):
            tracker.writer.file_writer.add_summary(summary)
        tracker.writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in plain.items()))
        tracker.writer.flush()
    elif tracker.name != "mlflow":
        tracker.store_init_configuration(plain)
    elif not is_continued:  # it refuses a change of what it has
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

        too_long = [key for key, value in plain.items() if len(str(value)) > MAX_PARAM_VAL_LENGTH]
        tracker.store_init_configuration(plain | {key: f"{plain[key]:.{MAX_PARAM_VAL_LENGTH - 2}} …" for key in too_long})
        if too_long:
            limit = f"{MAX_PARAM_VAL_LENGTH:,} characters, which is mlflow's limit"
            logger.info(f"mlflow gets {', '.join(too_long)} cut to {limit}; config.yaml in the run folder has all")


def _name_for_mlflow(name: str, renamed: dict[str, str]) -> str:
    """`name` as MLflow takes it: refused characters as their code points, at most 250; the first time, a line says so."""
    accepted = posixpath.normpath(_REFUSED_BY_MLFLOW.sub(lambda found: f"_{ord(found[0]):x}_", name))
    accepted = accepted if len(accepted) <= 250 else f"{accepted[:100]}_{accepted[-149:]}"
    if accepted != name and renamed.setdefault(name, "") != accepted:
        renamed[name] = accepted
        logger.info(f"mlflow gets {name!r} as {accepted!r}: it refuses other names")
    return accepted


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]} …"
