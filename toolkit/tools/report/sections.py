"""The sections of a report, and their parts: headings, sentences, tables and bars, in the order in which they are shown.
`page.html.j2` shows them on a page, `terminal` and `preview.preview` as text. A preview has these parts and `describe_data` too.
"""

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from toolkit.distributed.device import GIB
from toolkit.distributed.progress import readable_duration
from toolkit.errors import visible
from toolkit.evaluation.generate import describe_flaws
from toolkit.evaluation.rows import list_by_set, split_metric
from toolkit.tools.report.facts import NOT_AS_WRITTEN, RunFacts, describe_unlike, group_alike, is_number, name_step, speed_unit

SIDE_NAMES = {
    "row": "Tokens of a training row",
    "counted": "Tokens of a training row that count in the loss",
    "source": "Tokens of a source",
    "target": "Tokens of a target",
}
MOST_RANKS_SHOWN = 64
_NOT_IN_TABLE = ("perplexity", "rouge2", "rougeLsum")
_COUNTED = ("rows", "tokens", "count in the loss", "share")


class Heading(NamedTuple):
    """A heading; one of level 3 begins a card, one above it ends the card before."""

    text: str
    level: int = 3


class Lines(NamedTuple):
    """Sentences, one per line; of the kind `text` or `command`, a text with line breaks or a command to copy."""

    lines: Sequence[str]
    kind: str = ""


class Table(NamedTuple):
    """A table with a heading line, not shown without another line; columns that are not `left` hold numbers."""

    rows: Sequence[Sequence[str]]
    left: Sequence[int] = (0,)
    caption: str = ""
    is_folded: bool = False
    """Shown after a click on its caption."""


class Histogram(NamedTuple):
    """A bar for each (label, number), with the number beside it."""

    bins: list[tuple[str, float]]
    form: str = ","
    outlined: str = ""
    """Label of a bar that is drawn as an outline."""


def load_template(**names: Any) -> Any:
    """The macros of `page.html.j2`, which may use `names`. They show every text escaped, with controls and invisible marks as
    escapes; what is HTML already is a `markupsafe.Markup`.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=lambda value: value if hasattr(value, "__html__") else visible(str(value)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["kind"] = lambda part: type(part).__name__
    environment.globals.update(names)
    return environment.get_template("page.html.j2").module


Section = Callable[[Sequence[RunFacts]], Iterable[Any]]


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


def missing(runs: Sequence[RunFacts], field: str) -> Iterator[Lines]:
    """A sentence for each run that lacks a field, which a section needs."""
    yield from (Lines([run.prefix + run.missing[field]], "quiet") for run in runs if field in run.missing)


def describe_summary(runs: Sequence[RunFacts]) -> Iterator[Any]:
    """Where each run stands, and its first and last evaluation beside the baselines."""
    yield Lines([sentence for run in runs for sentence in _standing(run)] + [describe_unlike(runs)])
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


def _standing(run: RunFacts) -> list[str]:
    """How far the run is, and its best evaluation; then tokens trained on, duration and date, as far as they are known."""
    max_steps = run.config.get("train.max_steps")
    words = f"{run.last_step:,} steps" + (f" of {max_steps:,}" if isinstance(max_steps, int) and max_steps else "")
    if num_processes := run.record.get("num_processes"):
        words += f" on {num_processes} process{'es' * (num_processes > 1)}"
    if best := run.best_evaluation():
        metric, value, step = best
        is_kept = any(c.step == step and c.valid for c in run.checkpoints)
        words += f"; the best {metric} is {value:.5g}, after step {step:,}, whose checkpoint is {'' if is_kept else 'not '}kept"
    if num_others := len(run.evaluations) - len(run.comparable):
        not_shown = "evaluation is not shown" if num_others == 1 else "evaluations are not shown"
        words += f"; {num_others} {not_shown}: measured on other rows or with other settings"
    steps, effort = [line for line in run.lines if line["kind"] == "train"], list[str]()
    num, seconds = (sum(line[name] for line in steps if is_number(line.get(name))) for name in ("num_tokens", "step_time_s"))
    if num:
        effort.append(f"{num:,} {speed_unit(steps).removesuffix('/s')} in {readable_duration(seconds)} of training steps")
    effort += [f"started {run.record['started']}"] if "started" in run.record else []
    return [f"{run.prefix}{part}." for part in (words, ", ".join(effort)) if part]


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
            yield Lines([run.missing["planned_bytes"]], "quiet")


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
    as_json = partial(json.dumps, ensure_ascii=False, default=str)
    shown = [{key: v if isinstance(v, str) else as_json(v) for key, v in run.config.items()} for run in runs]
    if len(runs) > 1:
        values = {key: [of.get(key, "–") for of in shown] for of_run in shown for key in of_run}
        rows = [[key, *found] for key, found in values.items() if len(set(found)) > 1]
        yield Lines(["Keys in which the runs differ:" if rows else "No key differs."])
        yield Table([["", *(run.name for run in runs)], *rows], left=range(1 + len(runs)))
    for run, of_run in zip(runs, shown, strict=True):
        yield Table([["key", "value"], *of_run.items()], left=(0, 1), caption=f"All of {run.name}", is_folded=True)


def describe_commands(runs: Sequence[RunFacts]) -> Iterator[Any]:
    """Versions of the libraries, and what can be done with the run."""
    yield from missing(runs, "record")
    versions = [run.record.get("versions", {}) for run in runs]
    names = dict.fromkeys(name for of_run in versions for name in of_run)
    head = ["", *(run.name if len(runs) > 1 else "version" for run in runs)]
    yield Table([head, *([name, *(str(of.get(name, "–")) for of in versions)] for name in names)], left=range(1 + len(runs)))
    for run in runs:
        folder, commands = str(run.folder), dict[str, list[str]]()
        if (run.folder / "export" / "generation_config.json").exists():
            texts = ["--file", "FILE.csv", "--output", "OUT.jsonl"]
            commands["Generate texts with the exported model:"] = ["generate", folder, *texts]
        if valid := [checkpoint.step for checkpoint in run.checkpoints if checkpoint.valid]:
            best = run.best_evaluation()
            step = best[2] if best is not None and best[2] in valid else valid[-1]
            commands["Export the best checkpoint that is kept, or another:"] = ["export", folder, "--checkpoint", str(step)]
        commands["This report again:"] = ["report", folder]
        lines = {what: shlex.join(["python", "-m", "toolkit", *words]) for what, words in commands.items()}
        if resumes := run.record.get("command"):
            lines = {"Resume, or complete what is missing:": str(resumes), **lines}
        for what, command in lines.items():
            yield Lines([run.prefix + what], "quiet")
            yield Lines([command], "command")


def number(value: Any, num_digits: int = 2) -> str:
    """A cell of a table; a dash for what is not a finite number."""
    return f"{value:.{num_digits}f}" if is_number(value) else "–"


def describe_data(data: Mapping[str, Any], *, prefix: str = "", has_remarks: bool = True) -> Iterator[Any]:
    """The parts of a summary, with a `prefix` before the first heading, as a run's name. If it `has_remarks`, with how files were
    read, and what was left out; a terminal has these lines already."""
    yield Heading(f"{prefix}Rows")
    if has_remarks:
        yield Lines(data["readings"], "isolated")
        yield from (Lines([remark], "warn" if remark.startswith("WARNING") else "") for remark in data["remarks"])
    yield Table([["split", *_COUNTED], *([split["name"], *_counts(split)] for split in data["splits"])])
    if data["sources"]:
        cells = [[source["name"], f"{100 * source['weight_share']:.1f} %", *_counts(source)] for source in data["sources"]]
        yield Table([["source", "share of an epoch", *_COUNTED], *cells])
    yield Lines([f"duplicates: {'; '.join(data['duplicates']) or 'none'}"])
    yield Heading("Lengths")
    for lengths in data["lengths"]:
        limited = f" ({lengths['setting']})" if lengths["setting"] else ""
        yield Heading(f"{SIDE_NAMES[lengths['name']]}{limited}", 4)
        names = {"0": "shortest", "50": "median", "100": "longest"}
        yield Lines(
            [", ".join(f"{names.get(key, f'p{key}')} {value:,}" for key, value in lengths["percentiles"].items())], "quiet"
        )
        bins = [(f"{low:,}–{high:,}" if high > low else f"{low:,}", count) for low, high, count in lengths["bins"]]
        yield Histogram(bins)
    yield Heading("Tokenizer")
    cells = [[t["text"], str(t["token_id"]), f"{t['num_in_training']:,}", t["roles"]] for t in data["special_tokens"]]
    yield Table([["special token", "id", "in training rows", "role"], *cells], left=(0, 3))
    stops = f"; a generated text ends at {' or '.join(data['stop_tokens'])}" if data["stop_tokens"] else ""
    yield Lines([f"{data['tokenizer']}, {'with' if data['chat_template'] else 'without'} a chat template{stops}"], "quiet")


def percent(part: int, whole: int) -> str:
    """A share; of nothing, a dash."""
    return f"{100 * part / whole:.1f} %" if whole else "–"


def _counts(of: Mapping[str, Any]) -> list[str]:
    numbers = [of[name] for name in ("num_rows", "num_tokens", "num_label_tokens")]
    return [*(f"{number:,}" for number in numbers), percent(numbers[2], numbers[1])]
