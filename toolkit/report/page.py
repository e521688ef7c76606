"""`report.html`: one self-contained page that shows a run, or several overlaid. It makes no request."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import logging
import shlex
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from toolkit.distributed.comm import rank
from toolkit.errors import UserError, escape_controls
from toolkit.files.durable import written_beside
from toolkit.report.charts import MARKS, NUM_BUCKETS, Chart, draw, list_charts, table_rows
from toolkit.report.facts import RunFacts, read_runs
from toolkit.report.memory_plan import GIB, above_start, how_measured
from toolkit.report.predictions import as_json, collect_predictions

logger = logging.getLogger("toolkit")

REPORT_FILE = "report.html"
MOST_RANKS_SHOWN = 64
_NOT_IN_TABLE = ("perplexity", "rouge2", "rougeLsum")


def save_page(run_folders: Sequence[Path], path: Path) -> None:
    """Write the page of these runs.

    Raises:
        UserError: a folder is none of a run, or the page cannot be written.
    """
    page = render_page(read_runs(run_folders))
    try:
        with written_beside(path) as beside:
            beside.write_bytes(page)
    except OSError as error:
        raise UserError(f"{path} could not be written ({error.strerror}): make room there, or give another --output") from None


def save_run_page(run_folder: Path) -> None:
    """Write `report.html` into the folder of a run that ends, on rank 0. If that fails, the run is complete all the same."""
    if rank() != 0:
        return
    path = run_folder / REPORT_FILE
    try:
        save_page([run_folder], path)
    except Exception as error:  # a page is not worth the end of a run
        again = shlex.join(["python", "-m", "toolkit", "report", str(run_folder)])
        logger.warning(f"{path} was not written ({error}); everything else of the run is; to write it: {again}")
    else:
        logger.info(f"{path} shows the run: open it in a browser")


def render_page(runs: Sequence[RunFacts]) -> bytes:
    """The page in UTF-8. Rows, predictions and names stay text: `_text` escapes them, or the script adds them as text."""
    from bokeh.resources import Resources

    charts = list_charts(runs)
    predictions = collect_predictions(runs)
    sections = {
        "Summary": _summary(runs),
        "Curves": _curves(runs, charts),
        "Predictions": _predictions(runs, predictions),
        "Data": _data(runs),
        "Checkpoints": _checkpoints(runs),
        "Memory": _memory(runs),
        "Shard units": _units(runs),
        "Config": _config(runs),
        "Versions and commands": _commands(runs),
    }
    scripts = ["\n".join(Resources(mode="inline", components=["bokeh"]).js_raw), _own_file("page.js")]
    # Nothing runs but these two scripts, and nothing is requested.
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:; script-src {hashes}"
    title = " · ".join(run.name for run in runs)
    links = "".join(f'<a href="#{_anchor(name)}">{name}</a>' for name in sections)
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
        f"<title>{_text(title)}</title>\n<style>\n{_own_file('page.css')}</style>\n</head>\n<body>\n",
        f"<header>{_element('h1', title, 'isolated')}<nav aria-label=Sections>{links}</nav></header>\n<main>\n",
        *(f'<section id="{_anchor(name)}">\n<h2>{name}</h2>\n{content}</section>\n' for name, content in sections.items()),
        "</main>\n",
    ]
    drawn = {f"chart-{number}": draw(chart) for number, chart in enumerate(charts)}
    data = [("charts", drawn), ("predictions", predictions)]
    ends = [
        b'<script type="application/json" id="data-%s">%s</script>\n' % (name.encode(), as_json(value)) for name, value in data
    ]
    ends += [f"<script>{text}</script>\n".encode() for text in scripts]
    return b"".join(["".join(parts).encode("utf-8", errors="replace"), *ends, b"</body>\n</html>\n"])


def _summary(runs: Sequence[RunFacts]) -> str:
    """Where each run stands, and its first and last evaluation beside the baselines."""
    parts = []
    for run in runs:
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        parts.append(_element("p", prefix + _standing(run)))
    rows: dict[str, dict[str, float]] = {}
    for run in runs:
        prefix = f"{run.name}, " if len(runs) > 1 else ""
        if run is runs[0] or run.baselines != runs[0].baselines:
            rows |= {f"{prefix}{name}": figures for name, figures in run.baselines.items()}
        for line in run.comparable[:1] + run.comparable[1:][-1:]:
            rows[prefix + (f"after step {line['step']:,}" if line["step"] else "before training")] = line
    names = dict.fromkeys(name for run in runs for name in run.metric_names if name not in _NOT_IN_TABLE)
    if rows:
        table = [["", *(name.replace("percent_", "% ").replace("_", " ") for name in names)]]
        table += [[label, *(_number(figures.get(name)) for name in names)] for label, figures in rows.items()]
        parts.append(_table(table))
    else:
        parts.append(_element("p", "There is no evaluation.", "quiet"))
    return _card(*parts)


def _standing(run: RunFacts) -> str:
    max_steps = run.config.get("train.max_steps")
    words = f"{run.last_step:,} steps" + (f" of {max_steps:,}" if isinstance(max_steps, int) and max_steps else "")
    if num_processes := run.record.get("num_processes"):
        words += f" on {num_processes} processes"
    if best := run.best_evaluation():
        metric, value, step = best
        kept = any(c.step == step and c.problem is None for c in run.checkpoints)
        words += f"; the best {metric} is {value:.5g}, after step {step:,}" + (
            ", whose checkpoint is kept" if kept else ", whose checkpoint is not kept"
        )
    num_others = len(run.evaluations) - len(run.comparable)
    other = f"; {num_others} evaluations are not shown, which were measured on other rows or with other settings"
    return words + other * bool(num_others) + "."


def _curves(runs: Sequence[RunFacts], charts: list[Chart]) -> str:
    parts = _missing(runs, "curves")
    if any(len(curve.steps) > 2 * NUM_BUCKETS for chart in charts for curve in chart.curves):
        parts.append(
            _element(
                "p",
                f"Of longer curves, the lowest and the highest value of each of {NUM_BUCKETS} ranges of steps are drawn.",
                "quiet",
            )
        )
    if len(runs) > 1:
        parts.append(_element("p", "The reports of single runs mark checkpoints, skipped updates and resumes.", "quiet"))
    kinds = dict.fromkeys(kind for chart in charts for kind, _ in chart.marks)
    parts.append(f"<p>{''.join(_key(*MARKS[kind], side='left') for kind in kinds)}</p><div class=charts>\n")
    for number, chart in enumerate(charts):
        legend = "".join(_key(curve.label, curve.color, curve.dash) for curve in chart.curves)
        parts.append(
            f"<div class=card>{_element('h3', chart.title)}{_element('p', chart.unit, 'quiet')}<div>{legend}</div>"
            f'<div class=chart id="chart-{number}" role=img aria-label="{_text(chart.description)}"></div>'
            f"<details><summary>{_text(chart.title)} as a table</summary>{_chart_tables(chart)}</details></div>\n"
        )
    return "".join([*parts, "</div>\n"])


def _key(label: str, color: str, dash: str, side: str = "top") -> str:
    style = {"dashdot": "dashed"}.get(dash, dash)
    line = f'<i class={side} style="border-{side}:2px {style} {color}"></i>'
    return f"<span class=key>{line}<span class=isolated>{_text(label)}</span></span>"


def _chart_tables(chart: Chart) -> str:
    tables = [_table([["step", chart.unit], *map(list, table_rows(curve))], caption=curve.label) for curve in chart.curves]
    marks = [[MARKS[kind][0], ", ".join(f"{step:,}" for step in steps)] for kind, steps in chart.marks]
    return "".join(tables) + (_table([["mark", "after steps"], *marks], num_left=2) if marks else "")


def _predictions(runs: Sequence[RunFacts], predictions: dict[str, Any] | None) -> str:
    if predictions is None:
        return _card(_element("p", "There are no predictions: no evaluation has generated texts, or their files are gone."))
    num_rows = max((line.get("num_rows", 0) for run in runs for line in run.comparable), default=0)
    notes = []
    if num_rows > len(predictions["rows"]):
        notes.append(f"{len(predictions['rows']):,} rows of {num_rows:,} are here, at even distances.")
    if predictions["num_cut"]:
        notes.append(
            f"Texts longer than {predictions['limit']:,} characters are cut (in {predictions['num_cut']:,} of "
            f"{len(predictions['rows']):,} rows)."
        )
    if not any(run.record.get("sources") for run in runs):
        notes.append("The sources are not known.")
    return (
        _card(
            "<div class=controls><label>Search<input id=search type=search autocomplete=off></label>"
            '<label>Order<select id=order><option value="">as in the data</option></select></label></div>',
            _element("p", " ".join(notes), "quiet"),
            "<p class=quiet id=count aria-live=polite></p><noscript>The rows need JavaScript.</noscript>",
        )
        + "<div id=rows></div><button id=more type=button hidden>Show more rows</button>\n"
    )


def _data(runs: Sequence[RunFacts]) -> str:
    """What `preview` says of all rows. Of several runs with the same tokens, once."""
    parts = _missing(runs, "record")
    shown: list[dict[str, Any]] = []
    for run in runs:
        data = run.record.get("data") or {}
        if not data or data["fingerprint"] in [other["fingerprint"] for other in shown]:
            continue
        shown.append(data)
        if len(runs) > 1:
            parts.append(_element("h3", run.name, "isolated"))
        parts += [_element("p", line, "isolated") for line in [*data["readings"], *data["remarks"], *data["duplicates"]]]
        rows = [["", "rows", "tokens", "count in the loss"]]
        for part in [*data["splits"], *data["sources"]]:
            rows.append([part["name"], *(f"{part[name]:,}" for name in ("num_rows", "num_tokens", "num_label_tokens"))])
        parts.append(_table(rows))
        parts += [_lengths(lengths) for lengths in data["lengths"]]
        parts.append(
            _element("p", f"{data['tokenizer']}, {'with' if data['chat_template'] else 'without'} a chat template", "quiet")
        )
    if not shown and not parts:
        parts.append(_element("p", "The run kept no summary of its rows."))
    return _card(*parts)


def _lengths(lengths: dict[str, Any]) -> str:
    """The lengths of training rows in one respect, as bars."""
    names = {"0": "shortest", "50": "median", "100": "longest"}
    percentiles = ", ".join(f"{names.get(str(key), f'p{key}')} {value:,}" for key, value in lengths["percentiles"].items())
    most = max(count for _, _, count in lengths["bins"])
    bars = [
        _bar(f"{low:,}–{high:,}" if high > low else f"{low:,}", count / most, f"{count:,}")
        for low, high, count in lengths["bins"]
    ]
    what = {"counted": "that count in the loss"}.get(lengths["name"], f"of a {lengths['name']}")
    limit = f" ({lengths['setting']})" if lengths["setting"] else ""
    return f"{_element('p', f'Tokens {what}{limit}: {percentiles}')}<div class=rank>{''.join(bars)}</div>"


def _checkpoints(runs: Sequence[RunFacts]) -> str:
    parts = _missing(runs, "checkpoints")
    for run in runs:
        best = run.best_evaluation()
        metric = str(run.config.get("eval.best_metric", "loss"))
        rows = [["", "size, MiB", "processes", metric, "state"]]
        for checkpoint in run.checkpoints:
            state = "complete" if checkpoint.problem is None else f"not valid: {checkpoint.problem}"
            if best is not None and checkpoint.step == best[2]:
                state += ", the best"
            processes = "–" if checkpoint.world_size is None else str(checkpoint.world_size)
            value = _number(checkpoint.metrics.get(metric), 4)
            rows.append([checkpoint.name, f"{checkpoint.num_bytes / 2**20:,.1f}", processes, value, state])
        if len(rows) > 1:
            parts.append(_table(rows, caption=run.name if len(runs) > 1 else "", left=(0, 4)))
    return _card(*parts)


def _memory(runs: Sequence[RunFacts]) -> str:
    """Bars: each rank's memory, and the plan's."""
    parts = _missing(runs, "memory")
    for run in runs:
        if not run.memory:
            continue
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        gib = above_start(run.memory)
        shown = list(enumerate(gib))[:MOST_RANKS_SHOWN]
        planned = run.planned_bytes / GIB if run.planned_bytes is not None else None
        most = max([*gib, planned or 0.0]) or 1.0
        parts.append(_element("p", f"{prefix}GiB of training steps by rank, {how_measured(run.memory)}."))
        bars = [_bar(f"rank {rank}", value / most, f"{value:.2f}") for rank, value in shown]
        if planned is not None:
            bars.append(_bar("planned", planned / most, f"{planned:.2f}", "plan"))
        parts.append(f"<div class=rank>{''.join(bars)}</div>")
        if len(gib) > len(shown):
            parts.append(
                _element("p", f"{len(gib) - len(shown)} more ranks took {max(gib[len(shown) :]):.2f} GiB at most.", "quiet")
            )
        if planned is None:
            command = shlex.join(["python", "-m", "toolkit", "report", "--text", str(run.folder)])
            parts.append(_element("p", f"No memory plan was made; this makes one, for the next report: {command}", "quiet"))
        else:
            difference = 100 * (planned / (max(gib) or 1.0) - 1)
            parts.append(_element("p", f"The plan differs by {difference:+.0f} % from the rank with most.", "quiet"))
    return _card(*parts)


def _bar(label: str, share: float, value: str, kind: str = "") -> str:
    return (
        f'<span>{label}</span><b class="{kind}" style="width:{100 * max(0.0, share):.1f}%"></b><span class=number>{value}</span>'
    )


def _units(runs: Sequence[RunFacts]) -> str:
    parts = _missing(runs, "record")
    for run in runs:
        rows = [["", "count", "parameters of each", "trainable", "dtype", "MiB on rank 0"]]
        for unit in run.record.get("units", []):
            share = unit["num_trainable"] / max(1, unit["num_parameters"])
            mib = f"{unit['bytes_on_rank_0'] / 2**20:,.1f}"
            rows.append(
                [unit["unit"], str(unit["count"]), f"{unit['num_parameters']:,}", f"{share:.1%}", "+".join(unit["dtypes"]), mib]
            )
        if len(rows) > 1:
            parts.append(_table(rows, caption=run.name if len(runs) > 1 else "", left=(0, 4)))
    return _card(*parts)


def _config(runs: Sequence[RunFacts]) -> str:
    """The keys in which runs differ, or one run's whole config."""
    parts = _missing(runs, "config")
    keys = list(dict.fromkeys(key for run in runs for key in run.config))
    if len(runs) > 1:
        values = {key: [_value(run.config, key) for run in runs] for key in keys}
        rows = [[key, *found] for key, found in values.items() if len(set(found)) > 1]
        parts.append(_element("p", "Keys in which the runs differ:" if rows else "No key differs."))
        if rows:
            parts.append(_table([["", *(run.name for run in runs)], *rows], num_left=1 + len(runs)))
    for run in runs:
        if run.config:
            table = _table([["key", "value"], *([key, _value(run.config, key)] for key in run.config)], num_left=2)
            parts.append(f"<details><summary class=isolated>All of {_text(run.name)}</summary>{table}</details>")
    return _card(*parts)


def _commands(runs: Sequence[RunFacts]) -> str:
    parts = _missing(runs, "record")
    if any(run.record.get("versions") for run in runs):
        names = list(dict.fromkeys(name for run in runs for name in run.record.get("versions", {})))
        rows = [[name, *(str(run.record.get("versions", {}).get(name, "–")) for run in runs)] for name in names]
        parts.append(_table([["", *(run.name if len(runs) > 1 else "version" for run in runs)], *rows], num_left=1 + len(runs)))
    for run in runs:
        for what, command in _list_commands(run):
            label = f"{run.name}: {what}" if len(runs) > 1 else what
            parts.append(_element("p", label, "quiet") + _element("pre", command))
    return _card(*parts)


def _list_commands(run: RunFacts) -> Iterable[tuple[str, str]]:
    command = run.record.get("command")
    if command:
        yield "Resume, or complete what is missing:", str(command)
    if (run.folder / "export").is_dir() and (run.folder / "export" / "generation_config.json").exists():
        program = ["python", "-m", "toolkit", "generate", str(run.folder), "--file", "FILE.csv", "--output", "OUT.jsonl"]
        yield "Generate texts with the exported model:", shlex.join(program)
    valid = [checkpoint.step for checkpoint in run.checkpoints if checkpoint.problem is None]
    if valid:
        best = run.best_evaluation()
        step = best[2] if best is not None and best[2] in valid else valid[-1]
        program = ["python", "-m", "toolkit", "export", str(run.folder), "--checkpoint", str(step)]
        yield "Export the best checkpoint that is kept, or another:", shlex.join(program)
    yield "This report again:", shlex.join(["python", "-m", "toolkit", "report", str(run.folder)])


def _missing(runs: Sequence[RunFacts], section: str) -> list[str]:
    return [
        _element("p", f"{run.name}: {run.missing[section]}" if len(runs) > 1 else run.missing[section], "quiet")
        for run in runs
        if section in run.missing
    ]


def _value(config: dict[str, Any], key: str) -> str:
    if key not in config:
        return "–"
    value = config[key]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _number(value: Any, num_digits: int = 2) -> str:
    return f"{value:.{num_digits}f}" if isinstance(value, int | float) else "–"


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _own_file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _card(*parts: str) -> str:
    return f"<div class=card>{''.join(parts)}</div>\n"


def _table(rows: list[list[str]], *, caption: str = "", num_left: int = 1, left: Sequence[int] = ()) -> str:
    """A table with a heading line; columns from `num_left` on hold numbers, but for those in `left`."""

    def line(cells: list[str], tag: str) -> str:
        return "".join(
            _element(tag, cell, "" if i < num_left or i in left else "number", keep=True) for i, cell in enumerate(cells)
        )

    lines = [line(row, "td" if number else "th") for number, row in enumerate(rows)]
    return f"<div class=table tabindex=0><table>{_element('caption', caption)}<tr>{'</tr><tr>'.join(lines)}</tr></table></div>\n"


def _element(tag: str, text: str, kind: str = "", *, keep: bool = False) -> str:
    return f"<{tag}{f' class={kind}' if kind else ''}>{_text(text)}</{tag}>\n" if text or keep else ""


def _text(text: str) -> str:
    return html.escape(escape_controls(text))
