"""Reads what a report shows from a run folder, which may be of any age, incomplete, or of a run that is still training. A run
writes `record.json` there at its start: what only the run itself knows."""

import json
import logging
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

import yaml

from toolkit.distributed.comm import rank, world_size
from toolkit.errors import UserError
from toolkit.evaluation.generate import BASELINE, FLAWS
from toolkit.evaluation.rows import even_places, hashes_of_sets, of_all_rows, split_metric
from toolkit.files.durable import save_json
from toolkit.files.json_lines import load_json_lines
from toolkit.launch.accelerate_yaml import find_accelerate_yaml
from toolkit.launch.rank_consistency import installed_versions
from toolkit.parallel.units import ShardUnit, describe_units
from toolkit.tools.checkpoints import Entry, read_entries
from toolkit.tracking.metrics_log import MEMORY_FILE

logger = logging.getLogger("toolkit")

RECORD_FILE = "record.json"
MOST_PREDICTIONS, LONGEST_TEXT = 1000, 4000
"""Rows whose texts a page shows, at even distances; and the characters of a text there."""
PLAN_FILE = "memory_plan.json"
"""What `report --text` has planned for the run."""
PLANNED_FOR = ("num_processes", "micro_batch_size_rows", "row_tokens")
"""Values of memory.json that a plan holds for; it has them too."""
NOT_AS_WRITTEN = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)
"""What reading values of a file raises that is no longer, or not yet, what a run writes."""
_NOT_METRICS = ("step", "num_rows", "rows_per_s", "num_texts", *FLAWS)
_OF_LOSS = ("loss", "perplexity", "bits_per_byte", "token_accuracy", "accuracy", "rewards", "logps")
"""Metrics that do not depend on how texts are generated; nor does the loss of a source, `loss/NAME` in older runs."""
_LAST_STEP = 2**53
"""Up to here, floats and the page's script know every whole number."""


@dataclass
class RunFacts:
    """What there is to know about a run. What could not be read is empty, with a sentence by field in `missing`."""

    folder: Path
    name: str
    """The folder's name; its path, where several runs have one name."""
    lines: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    """By dotted name."""
    checkpoints: list[Entry] = field(default_factory=list)
    memory: dict[str, Any] = field(default_factory=dict)
    planned_bytes: int | None = None
    """Planned for one rank, if a plan was made for its processes and largest micro-batch."""
    record: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    place: int = 0
    """Among the runs of a page; it decides the colour."""
    prefix: str = ""
    """`NAME: ` on a page of several runs."""

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Lines of evaluations, in order."""
        return [line for line in self.lines if line["kind"] == "eval"]

    @property
    def comparable(self) -> list[dict[str, Any]]:
        """Evaluations that were measured as the last one was, on all rows."""
        evaluations = self.evaluations
        return [line for line in evaluations if of_all_rows(line) == of_all_rows(evaluations[-1])]

    @property
    def sets(self) -> dict[str, str]:
        """Of the last evaluation, as `hashes_of_sets`."""
        return hashes_of_sets(self.evaluations[-1]) if self.evaluations else {}

    @property
    def ends(self) -> list[dict[str, Any]]:
        """The first and the last of these; or the only one."""
        return self.comparable[:1] + self.comparable[1:][-1:]

    @property
    def baselines(self) -> dict[str, dict[str, float]]:
        """Figures of texts that need no model, by name, measured as the last evaluation was."""
        if not self.evaluations:
            return {}
        measured_on = self.evaluations[-1].get("measured_on")
        lines = [line for line in self.lines if line["kind"] == BASELINE and line.get("measured_on") == measured_on]
        return {str(line.get("name")): _numbers(line) for line in lines}

    @property
    def metric_names(self) -> list[str]:
        """Metrics of the evaluations, in their order."""
        return list(dict.fromkeys(name for line in self.evaluations for name in _numbers(line)))

    @property
    def last_step(self) -> int:
        """The last step that a line is of."""
        return max((line["step"] for line in self.lines), default=0)

    def series(self, kind: str, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one figure, without lines where it is missing or not finite; in the order of steps."""
        lines = self.comparable if kind == "eval" else [line for line in self.lines if line["kind"] == kind]
        of_set = split_metric(name, self.sets)[0]
        lines = [line for line in lines if not of_set or hashes_of_sets(line).get(of_set) == self.sets[of_set]]
        points = sorted((line["step"], line[name]) for line in lines if is_number(line.get(name)))
        return [step for step, _ in points], [value for _, value in points]

    def best_evaluation(self) -> tuple[str, float, int] | None:
        """`eval.best_metric`, its best value so far, and the step that had it first; None before the first one that counts.

        Which value is better is not derived again: each checkpoint has the run's best value so far.
        """
        metric = str(self.config.get("eval.best_metric"))
        best = next((c.best_value for c in reversed(self.checkpoints) if c.best_value is not None), None)
        steps = [line["step"] for line in self.evaluations if line["step"] > 0 and line.get(metric) == best]
        return (metric, best, steps[0]) if best is not None and steps else None


def group_alike(runs: Sequence[RunFacts], metric: str) -> list[list[RunFacts]]:
    """The runs, grouped by what their last evaluation of `metric` was measured on: rows, and the settings of the loss, or how
    texts were generated; of the metric `rows`, rows alone.

    One without an evaluation goes with the first that has one.
    """
    groups: dict[str, list[RunFacts]] = {}
    first: list[dict[str, Any]] = next((run.evaluations for run in runs if run.evaluations), [{}])
    for run in runs:
        measured_on = (run.evaluations or first)[-1].get("measured_on")
        if isinstance(measured_on, dict):
            names = measured_on.keys() - {"sets", "loss"} if metric != "rows" else {"rows"}
            if metric.partition("/")[0] in _OF_LOSS:
                names = {"rows", "loss"}
            measured_on = {name: measured_on.get(name) for name in names}
        groups.setdefault(json.dumps(measured_on, sort_keys=True), []).append(run)
    return list(groups.values())


def describe_unlike(runs: Sequence[RunFacts]) -> str:
    """A sentence on runs whose figures do not compare; empty if all do."""
    for metric, what, why in (
        ("rows", "figures", "were measured on other rows"),
        ("loss", "losses and rewards", "have other settings of the loss"),
        ("rougeL", "figures", "are of texts generated with other settings"),
    ):
        if len(groups := group_alike(runs, metric)) > 1:
            names = " and of ".join(", ".join(run.name for run in group) for group in groups)
            return f"The {what} of {names} {why}: they do not compare, and share no axis."
    return ""


def read_runs(folders: Sequence[Path]) -> list[RunFacts]:
    """Read run folders, each once; one that is not a run's is a `UserError`."""
    unique = {folder.resolve(): folder for folder in folders}
    names = [folder.name for folder in unique]
    runs = [_read_run(folder, path.name if names.count(path.name) == 1 else str(folder)) for path, folder in unique.items()]
    for place, run in enumerate(runs):
        run.place, run.prefix = place, f"{run.name}: " * (len(runs) > 1)
    return runs


def _read_run(folder: Path, name: str) -> RunFacts:
    names = ("metrics.jsonl", "config.yaml", "checkpoints")
    if not any((folder / name).exists() for name in names):
        raise UserError(f"{folder} is not a run folder (it has none of {', '.join(names)}): give one, as in runs/NAME")
    facts = RunFacts(folder, name)

    def read(field: str, name: str, load: Callable[[Path], Any], consequence: str) -> None:
        path, reason = folder / name, "is not in the folder"
        if path.exists():
            try:
                return setattr(facts, field, load(path))
            except (*NOT_AS_WRITTEN, OSError, RecursionError, yaml.YAMLError) as error:
                first_line, *_ = str(error).split("\n")  # YAML's have more
                reason = f"cannot be read ({first_line})"
        facts.missing[field] = f"{name} {reason}: {consequence}"

    none = "there are no curves and no evaluations"
    read("lines", "metrics.jsonl", lambda path: lines_of_steps(load_json_lines(path, skip_torn_end=True)), none)
    read("config", "config.yaml", lambda path: dict(_flatten(_load_mapping(path, yaml.safe_load))), "the settings are not known")
    read("checkpoints", "checkpoints", lambda _: read_entries(folder), "there is none to resume from")
    read("memory", MEMORY_FILE, _load_mapping, "the memory of the ranks is not known, or not yet")
    read("record", RECORD_FILE, _load_mapping, "versions, command, sources and shard units are not known")
    command = shlex.join(["python", "-m", "toolkit", "report", "--text", str(folder)])
    none = f"there is no memory plan; this makes one, for the next report: {command}"
    read("planned_bytes", PLAN_FILE, lambda path: _load_plan(path, facts.memory), none)
    return facts


def read_predictions(facts: RunFacts, step: int) -> list[dict[str, Any]] | None:
    """The shown rows of `predictions-STEP.jsonl`; None without a file that can be read."""
    try:
        rows = load_json_lines(facts.folder / f"predictions-{step}.jsonl", skip_torn_end=True)
        are_ours = all(isinstance(row, dict) and isinstance(row["prediction"], str) for row in rows)
        return [rows[place] for place in even_places(len(rows), MOST_PREDICTIONS)] if are_ours else None
    except (UserError, OSError, KeyError):
        return None


def name_step(step: int) -> str:
    """When an evaluation was."""
    return f"after step {step:,}" if step else "before training"


def lines_of_steps(lines: list[Any]) -> list[dict[str, Any]]:
    """The lines that have a kind and a step, and sets by name if any; others were added or changed by hand."""
    named = [line for line in lines if isinstance(line, dict) and isinstance(line.get("kind"), str)]
    of_steps = [line for line in named if type(line.get("step")) is int and 0 <= line["step"] <= _LAST_STEP]
    measured_on = [line.get("measured_on") or {} for line in of_steps]
    are_ours = [isinstance(of, dict) and isinstance(of.get("sets") or {}, dict) for of in measured_on]
    return list(compress(of_steps, are_ours))


def _load_mapping(path: Path, parse: Callable[[str], Any] = json.loads) -> dict[str, Any]:
    value = parse(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError("it is not a mapping")
    return value


def _load_plan(path: Path, memory: dict[str, Any]) -> int | None:
    plan = _load_mapping(path)
    if any(plan[key] != memory[key] for key in PLANNED_FOR):
        raise ValueError("it is of other processes or micro-batches")
    return int(plan["device_bytes_total"])


def _flatten(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, part in value.items():
        if isinstance(part, dict):
            yield from _flatten(part, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", part


def _numbers(line: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in line.items() if name not in _NOT_METRICS and is_number(value)}


def is_number(value: Any) -> bool:
    """Whether it is a finite number, which a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def speed_unit(lines: list[dict[str, Any]]) -> str:
    """The unit of `tokens_per_s`: rows if every row is one token, as with images."""
    steps = [line for line in lines if line["kind"] == "train"]
    return "rows/s" if all("num_rows" in line and line["num_rows"] == line.get("num_tokens") for line in steps) else "tokens/s"


def save_record(run_folder: Path, units: Sequence[ShardUnit], about_rows: Callable[[], dict[str, Any]] = dict) -> None:
    """Write `record.json` on rank 0, with the part `about_rows`. What fails is a warning: a run is worth more than its report."""
    if rank() != 0:
        return
    command, preset = None, find_accelerate_yaml()
    if sys.argv[0].endswith(".py") and Path(sys.argv[0]).name != "ipykernel_launcher.py":  # no notebook, no other program
        launch = ["accelerate", "launch", "--config_file", str(preset)] if preset else ["python"]
        command = shlex.join([*launch, *sys.argv])
    try:
        record = {
            "versions": installed_versions(),
            "command": command,
            "num_processes": world_size(),
            "started": time.strftime("%Y-%m-%d %H:%M"),
            "units": describe_units(units),
            **about_rows(),
        }
        save_json(run_folder / RECORD_FILE, record)
    except Exception as error:
        logger.warning(f"{run_folder / RECORD_FILE} could not be written ({error}): the report lacks what it holds")
