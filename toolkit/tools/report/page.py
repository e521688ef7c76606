"""`report.html`: one self-contained page that shows a run, or several overlaid, and makes no request. And `curves.png`: its
charts as one small picture, where matplotlib is installed."""

import base64
import hashlib
import json
import logging
import shlex
from collections.abc import Callable, Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from markupsafe import Markup

from toolkit.distributed.comm import rank
from toolkit.errors import one_line, refusal_named
from toolkit.files.durable import written_beside
from toolkit.tools.report import sections
from toolkit.tools.report.charts import MARKS, NUM_BUCKETS, Chart, draw, list_charts, means
from toolkit.tools.report.facts import LONGEST_TEXT, RunFacts, is_number, lines_of_steps, name_step, read_predictions, read_runs
from toolkit.tools.report.sections import Lines, load_template

logger = logging.getLogger("toolkit")

REPORT_FILE = "report.html"
MOST_BYTES = 2_500_000
"""Of all texts of a page, as they are written there."""
_SHORTEST_TEXT = 60
NUM_COLUMNS = 3
NO_PREDICTIONS = [Lines(["There are no predictions: no evaluation has generated texts, or their files are gone."])]


def save_page(run_folders: Sequence[Path], path: Path) -> None:
    """Write the page of these runs; a folder that is not a run's, or a page that cannot be written, is a `UserError`."""
    page = render_page(read_runs(run_folders))
    remedy = "make room there, or give another --output"
    with refusal_named(f"{path} could not be written", remedy), written_beside(path) as beside:
        beside.write_bytes(page)


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
    """The page in UTF-8. Rows, predictions and names stay text: the template escapes them, or the script adds them as text."""
    from bokeh.resources import Resources

    template = load_template()
    charts, predictions, notes = list_charts(runs), collect_predictions(runs), list(sections.missing(runs, "lines"))
    if any(len(curve.steps) > 2 * NUM_BUCKETS for chart in charts for curve in chart.curves):
        drawn = f"Of longer curves, the lowest and the highest value of each of {NUM_BUCKETS} ranges of steps are drawn."
        notes.append(Lines([drawn], "quiet"))
    if len(runs) > 1:
        notes.append(Lines(["The reports of single runs mark checkpoints, skipped updates and resumes."], "quiet"))

    def shown(section: sections.Section) -> Markup:
        return Markup(sections.show(section, runs, template.flow))

    content = {
        "Summary": shown(sections.describe_summary),
        "Curves": template.curves(notes, charts, MARKS),
        "Predictions": template.predictions(_text_notes(runs, predictions)) if predictions else template.flow(NO_PREDICTIONS),
        "Data": shown(sections.describe_rows),
        "Checkpoints": shown(sections.describe_checkpoints),
        "Memory": shown(sections.describe_memory),
        "Shard units": shown(sections.describe_units),
        "Config": shown(sections.describe_config),
        "Versions and commands": shown(sections.describe_commands),
    }
    own = files(__package__).joinpath("page.js").read_text(encoding="utf-8")
    scripts = ["\n".join(Resources(mode="inline", components=["bokeh"]).js_raw), own]
    # Nothing runs but these two scripts, and nothing is requested.
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:; script-src {hashes}"
    title = " · ".join(run.name for run in runs)
    figures = {f"chart-{number}": draw(chart) for number, chart in enumerate(charts)}
    data = {"charts": Markup(as_json(figures)), "predictions": Markup(as_json(predictions))}
    body = template.report(title, content, data, [*map(Markup, scripts)])
    return str(template.page(title, policy, body)).encode("utf-8")


def _text_notes(runs: Sequence[RunFacts], predictions: dict[str, Any]) -> str:
    """What is not shown of the texts."""
    shown, notes = f"{len(predictions['rows']):,} rows", []
    nums = [line["num_rows"] for run in runs for line in run.comparable if is_number(line.get("num_rows"))]
    if max(nums, default=0) > len(predictions["rows"]):
        notes.append(f"{shown} of {max(nums):,} are here, at even distances.")
    if predictions["num_cut"]:
        cut = f"(in {predictions['num_cut']:,} of {shown})"
        notes.append(f"Texts longer than {predictions['limit']:,} characters are cut {cut}.")
    if not any(run.record.get("sources") for run in runs):
        notes.append("The sources are not known.")
    return " ".join(notes)


def collect_predictions(runs: Sequence[RunFacts]) -> dict[str, Any] | None:
    """Rows with their source, reference and one text per column; None if no run has generated texts.

    The columns are a run's first and last predictions, or the last ones of each of several runs, matched by row and reference.
    """
    columns = []
    for run in runs:
        steps = [line["step"] for line in run.comparable if (run.folder / f"predictions-{line['step']}.jsonl").is_file()]
        ends = dict.fromkeys([*steps[:1], *steps[-1:]])
        found = [(step, rows) for step in ends if (rows := read_predictions(run, step)) is not None]
        chosen = found[-1:] if len(runs) > 1 else found
        kept = run.record.get("sources")
        sources = {row_id: text for row_id, text in kept.items() if isinstance(text, str)} if isinstance(kept, dict) else {}
        columns += [(run.prefix + name_step(step), rows, sources) for step, rows in chosen]
    return _shortened(_rows(columns), [label for label, *_ in columns]) if columns else None


def _rows(columns: list[tuple[str, list[dict[str, Any]], dict[str, str]]]) -> list[dict[str, Any]]:
    """A row is known by its id and its reference: other runs may number other rows. Its source is of a run that has this row."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for place, (_, predictions, sources) in enumerate(columns):
        for number, prediction in enumerate(predictions):
            row_id, reference = str(prediction.get("row_id", number)), str(prediction.get("reference", ""))
            empty = {"texts": [None] * len(columns), "scores": [{} for _ in columns]}
            shown_id = f"{row_id}, {prediction['set']}" if "set" in prediction else row_id
            row = rows.setdefault((row_id, reference), {"id": shown_id, "reference": reference, "source": None, **empty})
            row["source"] = row["source"] or sources.get(row_id)
            row["texts"][place] = prediction["prediction"]
            row["scores"][place] = {name: round(v, 2) for name, v in prediction.items() if name != "row_id" and is_number(v)}
    return list(rows.values())


def _shortened(rows: list[dict[str, Any]], columns: list[str]) -> dict[str, Any]:
    """The rows with their texts cut at one length, the longest with which all fit into `MOST_BYTES`."""
    limit = LONGEST_TEXT
    while len(as_json(shown := [_cut(row, limit) for row in rows]).encode()) > MOST_BYTES:
        if limit > _SHORTEST_TEXT:
            limit = limit * 3 // 4
        else:
            rows = rows[::2]
    num_cut = sum(row["is_cut"] for row in shown)
    metrics = list(dict.fromkeys(name for row in shown for scores in row["scores"] for name in scores))
    return {"columns": columns, "metrics": metrics, "rows": shown, "limit": limit, "num_cut": num_cut}


def _cut(row: dict[str, Any], limit: int) -> dict[str, Any]:
    texts = [row["source"], row["reference"], *row["texts"]]
    shown = [text if text is None or len(text) <= limit else f"{text[: limit - 1]}…" for text in texts]
    return {**row, "source": shown[0], "reference": shown[1], "texts": shown[2:], "is_cut": shown != texts}


def as_json(value: Any) -> str:
    """JSON for a script element: no `<`, so that no text ends the element, and half surrogate pairs as escapes."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return text.encode("utf-8", errors="backslashreplace").decode()


def draw_curves(lines: list[dict[str, Any]], picture_path: Path) -> None:
    """Draw the charts of the lines of a `metrics.jsonl` as a PNG; without any chart, no picture is written. If it cannot be
    written, that is a `UserError`, and an older one stays as it was."""
    name = picture_path.resolve().parent.name
    charts = list_charts([RunFacts(picture_path.parent, name, lines_of_steps(lines))])
    if not charts or not can_draw(picture_path):
        return
    num_rows = -(-len(charts) // NUM_COLUMNS)
    num_columns = min(NUM_COLUMNS, len(charts))

    def draw(figure: Any) -> None:
        for place, chart in enumerate(charts, start=1):
            draw_chart(figure.add_subplot(num_rows, num_columns, place), chart)

    remedy = "make room there; everything else of the run is written"
    with refusal_named(f"{picture_path} could not be written", remedy), written_beside(picture_path) as beside:
        save_picture(beside, name, (4.6 * num_columns, 2.7 * num_rows + 0.4), draw)


def can_draw(picture_path: Path) -> bool:
    """Whether matplotlib is installed; if not, a line says so."""
    if find_spec("matplotlib") is None:
        logger.info(f"{picture_path.name} is not drawn, as matplotlib is not installed: pip install 'shardtune[pictures]'")
        return False
    return True


def save_picture(path: Path, title: str, size: tuple[float, float], draw: Callable[[Any], None]) -> None:
    """Write a PNG of `size` inches, with what `draw` puts into its figure."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context({"text.parse_math": False}):  # a name with two dollar signs is not a formula
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.12))
        figure.suptitle(one_line(title), fontsize=12, fontweight="bold")
        draw(figure)
        for axes in figure.axes:
            axes.title.set(fontsize=10, fontweight="bold")
            axes.tick_params(labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(True, color="#e6e6e6", linewidth=0.6)
            axes.set_axisbelow(True)
        # A canvas instead of pyplot needs no display and no global state.
        FigureCanvasAgg(figure).print_png(path)


def draw_chart(axes: Any, chart: Chart, *, has_legend: bool = True) -> None:
    """Draw one chart, as `report.html` shows it."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    for curve in chart.curves:
        steps, values = curve.steps, curve.values
        if curve.is_noisy:
            axes.plot(steps, values, color=curve.color, linewidth=0.8, alpha=0.35)
            steps, values = means(curve)
        marker = "o" if curve.has_points else None
        label = one_line(curve.label)
        axes.plot(steps, values, color=curve.color, linewidth=1.6, linestyle=curve.dash, marker=marker, markersize=4, label=label)
    if chart.is_log:
        axes.set_yscale("log")
    lowest, highest = axes.get_ylim()
    if chart.is_log:
        axes.yaxis.set_major_locator(MaxNLocator(5) if highest < 4 * lowest else LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    for kind, marked in chart.marks:
        _, color, dash = MARKS[kind]
        axes.vlines(marked, lowest, highest, colors=color, linestyles=dash, linewidth=0.8, alpha=0.5, zorder=0)
    axes.set_ylim(lowest, highest)
    axes.set_title(one_line(chart.title))
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel(chart.unit, fontsize=8)
    axes.margins(x=0.02)
    if has_legend and len(chart.curves) > 1:
        axes.legend(frameon=False, fontsize=7)
