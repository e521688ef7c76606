"""The sections of a report that are sentences, tables and bars, as `parts`; `report.html` and `report --text` show them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from toolkit.distributed.device import GIB
from toolkit.distributed.progress import readable_duration
from toolkit.evaluation.generate import describe_flaws
from toolkit.evaluation.rows import list_by_set, split_metric
from toolkit.tools.report.charts import speed_unit
from toolkit.tools.report.facts import NOT_AS_WRITTEN, RunFacts, describe_unlike, group_alike, is_number, name_step
from toolkit.tools.report.parts import Histogram, Lines, Table, describe_data

MOST_RANKS_SHOWN = 64
_NOT_IN_TABLE = ("perplexity", "rouge2", "rougeLsum")


class Command(NamedTuple):
    """A command to copy."""

    what: str
    command: str


Section = Callable[[Sequence[RunFacts]], Iterable[Any]]
"""The parts of a section about these runs."""


def show(section: Section, runs: Sequence[RunFacts], draw: Callable[[list[Any]], str]) -> str:
    """A section as `draw` shows it; of a run with a file that cannot be read or lacks something, as of another version or
    changed by hand, a sentence."""
    try:
        return draw(list(section(runs)))
    except (*NOT_AS_WRITTEN, OSError) as error:
        if len(runs) > 1:
            return "".join(show(section, [run], draw) for run in runs)
        why = f"one of its files is not what a run writes ({type(error).__name__}: {error})"
        return draw([Lines([f"This cannot be shown of {runs[0].name}, as {why}."])])


def missing(runs: Sequence[RunFacts], section: str) -> Iterator[Lines]:
    """A sentence for each run that lacks what a section needs."""
    yield from (Lines([run.prefix + run.missing[section]], "quiet") for run in runs if section in run.missing)


def describe_summary(runs: Sequence[RunFacts]) -> Iterator[Any]:
    """Where each run stands, and its first and last evaluation beside the baselines."""
    yield Lines([sentence for run in runs for sentence in (run.prefix + _standing(run), _effort(run))] + [describe_unlike(runs)])
    figures = dict.fromkeys(split_metric(name, run.sets)[1] for run in runs for name in run.metric_names)
    names = [name for name in figures if name not in _NOT_IN_TABLE]
    head = ["", *(name.replace("percent_", "% ").replace("_", " ") for name in names)]
    for group in group_alike(runs, "loss"):
        rows = ([label, *(number(line.get(name)) for name in names)] for label, line in _figures(group).items())
        yield Table([head, *rows])
    described = [
        (run.prefix + name_step(last["step"]).capitalize(), describe_flaws(last)) for run in runs for last in run.evaluations[-1:]
    ]
    yield Lines([f"{when}, {flaws}." for when, flaws in described if flaws])
    if not any(run.evaluations or run.baselines for run in runs):
        yield Lines(["There is no evaluation."], "quiet")


def _standing(run: RunFacts) -> str:
    max_steps = run.config.get("train.max_steps")
    words = f"{run.last_step:,} steps" + (f" of {max_steps:,}" if isinstance(max_steps, int) and max_steps else "")
    if num_processes := run.record.get("num_processes"):
        words += f" on {num_processes} process{'es' * (num_processes > 1)}"
    if best := run.best_evaluation():
        metric, value, step = best
        is_kept = any(c.step == step and c.valid for c in run.checkpoints)
        words += f"; the best {metric} is {value:.5g}, after step {step:,}, whose checkpoint is {'' if is_kept else 'not '}kept"
    num_others = len(run.evaluations) - len(run.comparable)
    not_shown = "evaluation is not shown" if num_others == 1 else "evaluations are not shown"
    other = f"; {num_others} {not_shown}: measured on other rows or with other settings"
    return words + other * bool(num_others) + "."


def _effort(run: RunFacts) -> str:
    """Tokens trained on, duration and date, as far as they are known."""
    steps = [line for line in run.lines if line["kind"] == "train"]
    num, seconds = (sum(line[name] for line in steps if is_number(line.get(name))) for name in ("num_tokens", "step_time_s"))
    trained = f"{num:,} {speed_unit(steps).removesuffix('/s')} in {readable_duration(seconds)} of training steps" if num else ""
    started = f"started {run.record['started']}" if "started" in run.record else ""
    return run.prefix + ", ".join(filter(None, (trained, started))) + "." if started or trained else ""


def _figures(runs: Sequence[RunFacts]) -> dict[str, dict[str, Any]]:
    """By label, the figures of the baselines, and of each run's first and last evaluation."""
    rows: dict[str, dict[str, Any]] = {}
    for run in runs:
        prefix = f"{run.name}, " * bool(run.prefix)
        lines: dict[str, dict[str, Any]] = {}
        if run is runs[0] or run.baselines != runs[0].baselines:
            lines |= {f"{prefix}{name}": figures for name, figures in run.baselines.items()}
        lines |= {prefix + name_step(line["step"]): line for line in run.ends}
        rows |= list_by_set(lines, run.sets)
    return rows


def describe_rows(runs: Sequence[RunFacts]) -> Iterator[Any]:
    """What `preview` says of all rows. Of several runs with the same tokens, once."""
    yield from missing(runs, "record")
    shown: list[str] = []
    for run in runs:
        data = run.record.get("data") or {}
        if data and data["fingerprint"] not in shown:
            shown.append(data["fingerprint"])
            yield from describe_data(data, prefix=run.prefix)
    if not shown and not any("record" in run.missing for run in runs):
        yield Lines(["The run kept no summary of its rows."])


def describe_checkpoints(runs: Sequence[RunFacts]) -> Iterator[Any]:
    yield from missing(runs, "checkpoints")
    for run in runs:
        best = run.best_evaluation()
        metric = str(run.config.get("eval.best_metric", "loss"))
        rows = [["", "size, MiB", "processes", metric, "state"]]
        for checkpoint in run.checkpoints:
            state = "complete" if checkpoint.valid else f"not valid: {checkpoint.note}"
            if best is not None and checkpoint.step == best[2]:
                state += ", the best"
            processes = "–" if checkpoint.world_size is None else str(checkpoint.world_size)
            value = number(checkpoint.metrics.get(metric), 4)
            rows.append([checkpoint.name, f"{checkpoint.num_bytes / 2**20:,.1f}", processes, value, state])
        yield Table(rows, left=(0, 4), caption=run.name * bool(run.prefix))


def describe_memory(runs: Sequence[RunFacts]) -> Iterator[Any]:
    """What each rank allocated on its GPU in training steps, and the plan, if there is one, for their largest micro-batch."""
    yield from missing(runs, "memory")
    for run in [run for run in runs if run.memory]:
        if run.memory["device"] == "cpu":
            yield Lines([f"{run.prefix}What a process on a CPU holds is mostly libraries, and is not shown."], "quiet")
            continue
        gib, planned = run.memory["peak_gib"], None if run.planned_bytes is None else run.planned_bytes / GIB
        bars = [(f"rank {rank}", value) for rank, value in enumerate(gib[:MOST_RANKS_SHOWN])]
        yield Lines([f"{run.prefix}GiB of training steps by rank, allocated on the GPU."])
        yield Histogram([*bars, *([] if planned is None else [("planned", planned)])], ".2f", outlined="planned")
        if more := gib[MOST_RANKS_SHOWN:]:
            yield Lines([f"{len(more)} more ranks took {max(more):.2f} GiB at most."], "quiet")
        if planned is not None:
            difference = 100 * (planned / (max(gib) or 1.0) - 1)
            yield Lines([f"The plan differs by {difference:+.0f} % from the rank with most."], "quiet")
        else:
            yield Lines([run.missing["plan"]], "quiet")


def describe_units(runs: Sequence[RunFacts]) -> Iterator[Any]:
    yield from missing(runs, "record")
    head = ["", "count", "parameters of each", "trainable", "dtype", "MiB on rank 0"]
    for run in runs:
        cells = [
            [
                unit["unit"],
                str(unit["count"]),
                f"{unit['num_parameters']:,}",
                f"{unit['num_trainable'] / max(1, unit['num_parameters']):.1%}",
                "+".join(unit["dtypes"]),
                f"{unit['bytes_on_rank_0'] / 2**20:,.1f}",
            ]
            for unit in run.record.get("units", [])
        ]
        yield Table([head, *cells], left=(0, 4), caption=run.name * bool(run.prefix))


def describe_config(runs: Sequence[RunFacts]) -> Iterator[Any]:
    """The keys in which runs differ, and each run's whole config."""
    yield from missing(runs, "config")
    keys = list(dict.fromkeys(key for run in runs for key in run.config))
    if len(runs) > 1:
        values = {key: [_value(run.config, key) for run in runs] for key in keys}
        rows = [[key, *found] for key, found in values.items() if len(set(found)) > 1]
        yield Lines(["Keys in which the runs differ:" if rows else "No key differs."])
        yield Table([["", *(run.name for run in runs)], *rows], left=range(1 + len(runs)))
    for run in runs:
        cells = [[key, _value(run.config, key)] for key in run.config]
        yield Table([["key", "value"], *cells], left=(0, 1), caption=f"All of {run.name}", is_folded=True)


def describe_commands(runs: Sequence[RunFacts]) -> Iterator[Any]:
    """Versions of the libraries, and what can be done with the run."""
    yield from missing(runs, "record")
    versions = [run.record.get("versions", {}) for run in runs]
    names = dict.fromkeys(name for of_run in versions for name in of_run)
    head = ["", *(run.name if len(runs) > 1 else "version" for run in runs)]
    yield Table([head, *([name, *(str(of.get(name, "–")) for of in versions)] for name in names)], left=range(1 + len(runs)))
    for run in runs:
        yield from _list_commands(run)


def _list_commands(run: RunFacts) -> Iterator[Command]:
    def command(what: str, *words: str) -> Command:
        return Command(run.prefix + what, shlex.join(["python", "-m", "toolkit", *words]))

    folder = str(run.folder)
    if resumes := run.record.get("command"):
        yield Command(f"{run.prefix}Resume, or complete what is missing:", str(resumes))
    if (run.folder / "export" / "generation_config.json").exists():
        texts = ("--file", "FILE.csv", "--output", "OUT.jsonl")
        yield command("Generate texts with the exported model:", "generate", folder, *texts)
    if valid := [checkpoint.step for checkpoint in run.checkpoints if checkpoint.valid]:
        best = run.best_evaluation()
        step = best[2] if best is not None and best[2] in valid else valid[-1]
        yield command("Export the best checkpoint that is kept, or another:", "export", folder, "--checkpoint", str(step))
    yield command("This report again:", "report", folder)


def number(value: Any, num_digits: int = 2) -> str:
    """A cell of a table; a dash for what is not a finite number."""
    return f"{value:.{num_digits}f}" if is_number(value) else "–"


def _value(config: dict[str, Any], key: str) -> str:
    if key not in config:
        return "–"
    value = config[key]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
