"""`report.html`: one self-contained page that shows a run, or several overlaid. It makes no request."""

from __future__ import annotations

import base64
import hashlib
import logging
import shlex
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from toolkit.distributed.comm import rank
from toolkit.errors import UserError
from toolkit.files.durable import written_beside
from toolkit.tools.report.charts import MARKS, NUM_BUCKETS, Chart, draw, list_charts, table_rows
from toolkit.tools.report.elements import begin_page, card, element, escaped, format_number, key, missing, text_table
from toolkit.tools.report.facts import NOT_AS_WRITTEN, RunFacts, describe_unlike, group_alike, is_number, name_step, read_runs
from toolkit.tools.report.predictions import as_json, collect_predictions
from toolkit.tools.report.sections import show_checkpoints, show_commands, show_config, show_data, show_memory, show_units

logger = logging.getLogger("toolkit")

REPORT_FILE = "report.html"
_NOT_IN_TABLE = ("perplexity", "rouge2", "rougeLsum")


def save_page(run_folders: Sequence[Path], path: Path) -> None:
    """Write the page of these runs.

    Raises:
        UserError: a folder is not a run's, or the page cannot be written.
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
        "Summary": _shown(_summary, runs),
        "Curves": _curves(runs, charts),
        "Predictions": _predictions(runs, predictions),
        "Data": _shown(show_data, runs),
        "Checkpoints": _shown(show_checkpoints, runs),
        "Memory": _shown(show_memory, runs),
        "Shard units": _shown(show_units, runs),
        "Config": _shown(show_config, runs),
        "Versions and commands": _shown(show_commands, runs),
    }
    scripts = ["\n".join(Resources(mode="inline", components=["bokeh"]).js_raw), _own_file("page.js")]
    # Nothing runs but these two scripts, and nothing is requested.
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:; script-src {hashes}"
    title = " · ".join(run.name for run in runs)
    links = "".join(f'<a href="#{_anchor(name)}">{name}</a>' for name in sections)
    parts = [
        begin_page(title, _own_file("page.css"), policy),
        f"<header>{element('h1', title, 'isolated')}<nav aria-label=Sections>{links}</nav></header>\n<main>\n",
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


def _shown(show: Callable[[Sequence[RunFacts]], str], runs: Sequence[RunFacts]) -> str:
    """A section; of a run with a file that lacks something, as of another version or changed by hand, a sentence."""
    try:
        return show(runs)
    except NOT_AS_WRITTEN as error:
        if len(runs) > 1:
            return "".join(_shown(show, [run]) for run in runs)
        why = f"one of its files is not what a run writes ({type(error).__name__}: {error})"
        return card(element("p", f"This cannot be shown of {runs[0].name}, as {why}."))


def _summary(runs: Sequence[RunFacts]) -> str:
    """Where each run stands, and its first and last evaluation beside the baselines."""
    parts = [element("p", run.prefix + _standing(run)) for run in runs]
    parts.append(element("p", describe_unlike(runs)))
    tables = [table for group in group_alike(runs, "loss") if (table := _rows(group))]
    names = dict.fromkeys(name for run in runs for name in run.metric_names if name not in _NOT_IN_TABLE)
    head = ["", *(name.replace("percent_", "% ").replace("_", " ") for name in names)]
    for table in tables:
        lines = [[label, *(format_number(figures.get(name)) for name in names)] for label, figures in table.items()]
        parts.append(text_table([head, *lines]))
    return card(*parts, element("p", "" if tables else "There is no evaluation.", "quiet"))


def _rows(runs: Sequence[RunFacts]) -> dict[str, dict[str, float]]:
    """By label, the figures of the baselines, and of each run's first and last evaluation."""
    rows: dict[str, dict[str, float]] = {}
    for run in runs:
        prefix = f"{run.name}, " * bool(run.prefix)
        if run is runs[0] or run.baselines != runs[0].baselines:
            rows |= {f"{prefix}{name}": figures for name, figures in run.baselines.items()}
        for line in run.comparable[:1] + run.comparable[1:][-1:]:
            rows[prefix + name_step(line["step"])] = line
    return rows


def _standing(run: RunFacts) -> str:
    max_steps = run.config.get("train.max_steps")
    words = f"{run.last_step:,} steps" + (f" of {max_steps:,}" if isinstance(max_steps, int) and max_steps else "")
    if num_processes := run.record.get("num_processes"):
        words += f" on {num_processes} process{'es' * (num_processes > 1)}"
    if best := run.best_evaluation():
        metric, value, step = best
        kept = any(c.step == step and c.valid for c in run.checkpoints)
        words += f"; the best {metric} is {value:.5g}, after step {step:,}" + (
            ", whose checkpoint is kept" if kept else ", whose checkpoint is not kept"
        )
    num_others = len(run.evaluations) - len(run.comparable)
    not_shown = "evaluation is not shown" if num_others == 1 else "evaluations are not shown"
    other = f"; {num_others} {not_shown}: measured on other rows or with other settings"
    return words + other * bool(num_others) + "."


def _curves(runs: Sequence[RunFacts], charts: list[Chart]) -> str:
    parts = missing(runs, "curves")
    if any(len(curve.steps) > 2 * NUM_BUCKETS for chart in charts for curve in chart.curves):
        drawn = f"Of longer curves, the lowest and the highest value of each of {NUM_BUCKETS} ranges of steps are drawn."
        parts.append(element("p", drawn, "quiet"))
    if len(runs) > 1:
        parts.append(element("p", "The reports of single runs mark checkpoints, skipped updates and resumes.", "quiet"))
    kinds = dict.fromkeys(kind for chart in charts for kind, _ in chart.marks)
    parts.append(f"<p>{''.join(key(*MARKS[kind], side='left') for kind in kinds)}</p><div class=charts>\n")
    for number, chart in enumerate(charts):
        legend = "".join(key(curve.label, curve.color, curve.dash) for curve in chart.curves)
        parts.append(
            f"<div class=card>{element('h3', chart.title)}{element('p', chart.unit, 'quiet')}<div>{legend}</div>"
            f'<div class=chart id="chart-{number}" role=img aria-label="{escaped(chart.description)}"></div>'
            f"<details><summary>{escaped(chart.title)} as a table</summary>{_chart_tables(chart)}</details></div>\n"
        )
    return "".join([*parts, "</div>\n"])


def _chart_tables(chart: Chart) -> str:
    tables = [text_table([["step", chart.unit], *map(list, table_rows(curve))], caption=curve.label) for curve in chart.curves]
    marks = [[MARKS[kind][0], ", ".join(f"{step:,}" for step in steps)] for kind, steps in chart.marks]
    return "".join(tables) + (text_table([["mark", "after steps"], *marks], left=(0, 1)) if marks else "")


def _predictions(runs: Sequence[RunFacts], predictions: dict[str, Any] | None) -> str:
    if predictions is None:
        return card(element("p", "There are no predictions: no evaluation has generated texts, or their files are gone."))
    nums = [line["num_rows"] for run in runs for line in run.comparable if is_number(line.get("num_rows"))]
    num_rows = max(nums, default=0)
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
        card(
            "<div class=controls><label>Search<input id=search type=search autocomplete=off></label>"
            '<label>Order<select id=order><option value="">as in the data</option></select></label></div>',
            element("p", " ".join(notes), "quiet"),
            "<p class=quiet id=count aria-live=polite></p><noscript>The rows need JavaScript.</noscript>",
        )
        + "<div id=rows></div><button id=more type=button hidden>Show more rows</button>\n"
    )


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _own_file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
