"""The sections of a page that are tables and bars: data, checkpoints, memory, shard units, config, commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from toolkit.distributed.device import GIB
from toolkit.tools.report.elements import bar, card, element, escaped, format_number, missing, text_table
from toolkit.tools.report.facts import RunFacts
from toolkit.tools.report.memory_plan import above_start, how_measured
from toolkit.tools.report.rows import describe_data, render

MOST_RANKS_SHOWN = 64


def show_data(runs: Sequence[RunFacts]) -> str:
    """What `preview` says of all rows. Of several runs with the same tokens, once."""
    parts = [card(*absent)] if (absent := missing(runs, "record")) else []
    shown: list[dict[str, Any]] = []
    for run in runs:
        data = run.record.get("data") or {}
        if data and data["fingerprint"] not in [other["fingerprint"] for other in shown]:
            shown.append(data)
            parts += [element("h3", run.name, "isolated") if len(runs) > 1 else "", render(describe_data(data))]
    return "".join(parts) or card(element("p", "The run kept no summary of its rows."))


def show_checkpoints(runs: Sequence[RunFacts]) -> str:
    parts = missing(runs, "checkpoints")
    for run in runs:
        best = run.best_evaluation()
        metric = str(run.config.get("eval.best_metric", "loss"))
        rows = [["", "size, MiB", "processes", metric, "state"]]
        for checkpoint in run.checkpoints:
            state = "complete" if checkpoint.valid else f"not valid: {checkpoint.note}"
            if best is not None and checkpoint.step == best[2]:
                state += ", the best"
            processes = "–" if checkpoint.world_size is None else str(checkpoint.world_size)
            value = format_number(checkpoint.metrics.get(metric), 4)
            rows.append([checkpoint.name, f"{checkpoint.num_bytes / 2**20:,.1f}", processes, value, state])
        if len(rows) > 1:
            parts.append(text_table(rows, caption=run.name if len(runs) > 1 else "", left=(0, 4)))
    return card(*parts)


def show_memory(runs: Sequence[RunFacts]) -> str:
    """Bars: each rank's memory, and the plan's."""
    parts = missing(runs, "memory")
    for run in runs:
        if not run.memory:
            continue
        gib = above_start(run.memory)
        shown = list(enumerate(gib))[:MOST_RANKS_SHOWN]
        planned = run.planned_bytes / GIB if run.planned_bytes is not None else None
        most = max([*gib, planned or 0.0]) or 1.0
        parts.append(element("p", f"{run.prefix}GiB of training steps by rank, {how_measured(run.memory)}."))
        bars = [bar(f"rank {rank}", value / most, f"{value:.2f}") for rank, value in shown]
        if planned is not None:
            bars.append(bar("planned", planned / most, f"{planned:.2f}", "plan"))
        parts.append(f"<div class=rank>{''.join(bars)}</div>")
        if len(gib) > len(shown):
            parts.append(
                element("p", f"{len(gib) - len(shown)} more ranks took {max(gib[len(shown) :]):.2f} GiB at most.", "quiet")
            )
        if planned is None:
            command = shlex.join(["python", "-m", "toolkit", "report", "--text", str(run.folder)])
            parts.append(element("p", f"No memory plan was made; this makes one, for the next report: {command}", "quiet"))
        else:
            difference = 100 * (planned / (max(gib) or 1.0) - 1)
            parts.append(element("p", f"The plan differs by {difference:+.0f} % from the rank with most.", "quiet"))
    return card(*parts)


def show_units(runs: Sequence[RunFacts]) -> str:
    parts = missing(runs, "record")
    for run in runs:
        rows = [["", "count", "parameters of each", "trainable", "dtype", "MiB on rank 0"]]
        for unit in run.record.get("units", []):
            share = unit["num_trainable"] / max(1, unit["num_parameters"])
            mib = f"{unit['bytes_on_rank_0'] / 2**20:,.1f}"
            rows.append(
                [unit["unit"], str(unit["count"]), f"{unit['num_parameters']:,}", f"{share:.1%}", "+".join(unit["dtypes"]), mib]
            )
        if len(rows) > 1:
            parts.append(text_table(rows, caption=run.name if len(runs) > 1 else "", left=(0, 4)))
    return card(*parts)


def show_config(runs: Sequence[RunFacts]) -> str:
    """The keys in which runs differ, or one run's whole config."""
    parts = missing(runs, "config")
    keys = list(dict.fromkeys(key for run in runs for key in run.config))
    if len(runs) > 1:
        values = {key: [_value(run.config, key) for run in runs] for key in keys}
        rows = [[key, *found] for key, found in values.items() if len(set(found)) > 1]
        parts.append(element("p", "Keys in which the runs differ:" if rows else "No key differs."))
        if rows:
            parts.append(text_table([["", *(run.name for run in runs)], *rows], left=range(1 + len(runs))))
    for run in runs:
        if run.config:
            table = text_table([["key", "value"], *([key, _value(run.config, key)] for key in run.config)], left=(0, 1))
            parts.append(f"<details><summary class=isolated>All of {escaped(run.name)}</summary>{table}</details>")
    return card(*parts)


def show_commands(runs: Sequence[RunFacts]) -> str:
    parts = missing(runs, "record")
    if any(run.record.get("versions") for run in runs):
        names = list(dict.fromkeys(name for run in runs for name in run.record.get("versions", {})))
        rows = [[name, *(str(run.record.get("versions", {}).get(name, "–")) for run in runs)] for name in names]
        parts.append(
            text_table([["", *(run.name if len(runs) > 1 else "version" for run in runs)], *rows], left=range(1 + len(runs)))
        )
    for run in runs:
        for what, command in _list_commands(run):
            parts.append(element("p", run.prefix + what, "quiet") + element("pre", command))
    return card(*parts)


def _list_commands(run: RunFacts) -> Iterable[tuple[str, str]]:
    command = run.record.get("command")
    if command:
        yield "Resume, or complete what is missing:", str(command)
    if (run.folder / "export").is_dir() and (run.folder / "export" / "generation_config.json").exists():
        program = ["python", "-m", "toolkit", "generate", str(run.folder), "--file", "FILE.csv", "--output", "OUT.jsonl"]
        yield "Generate texts with the exported model:", shlex.join(program)
    valid = [checkpoint.step for checkpoint in run.checkpoints if checkpoint.valid]
    if valid:
        best = run.best_evaluation()
        step = best[2] if best is not None and best[2] in valid else valid[-1]
        program = ["python", "-m", "toolkit", "export", str(run.folder), "--checkpoint", str(step)]
        yield "Export the best checkpoint that is kept, or another:", shlex.join(program)
    yield "This report again:", shlex.join(["python", "-m", "toolkit", "report", str(run.folder)])


def _value(config: dict[str, Any], key: str) -> str:
    if key not in config:
        return "–"
    value = config[key]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
