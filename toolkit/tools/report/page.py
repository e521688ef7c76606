"""`report.html`: one self-contained page that shows a run, or several overlaid. It makes no request."""

from __future__ import annotations

import base64
import hashlib
import logging
import shlex
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup

from toolkit.distributed.comm import rank
from toolkit.errors import refusal_named
from toolkit.files.durable import written_beside
from toolkit.tools.report import sections
from toolkit.tools.report.charts import MARKS, NUM_BUCKETS, Chart, draw, list_charts
from toolkit.tools.report.facts import RunFacts, is_number, read_runs
from toolkit.tools.report.parts import Lines, load_template
from toolkit.tools.report.predictions import as_json, collect_predictions

logger = logging.getLogger("toolkit")

REPORT_FILE = "report.html"
NO_PREDICTIONS = [Lines(["There are no predictions: no evaluation has generated texts, or their files are gone."])]


def save_page(run_folders: Sequence[Path], path: Path) -> None:
    """Write the page of these runs.

    Raises:
        UserError: a folder is not a run's, or the page cannot be written.
    """
    page = render_page(read_runs(run_folders))
    with (
        refusal_named(f"{path} could not be written", "make room there, or give another --output"),
        written_beside(path) as beside,
    ):
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
    charts, predictions = list_charts(runs), collect_predictions(runs)

    def shown(section: sections.Section) -> Markup:
        return Markup(sections.show(section, runs, template.flow))

    content = {
        "Summary": shown(sections.describe_summary),
        "Curves": template.curves(_chart_notes(runs, charts), charts, MARKS),
        "Predictions": template.predictions(_text_notes(runs, predictions)) if predictions else template.flow(NO_PREDICTIONS),
        "Data": shown(sections.describe_rows),
        "Checkpoints": shown(sections.describe_checkpoints),
        "Memory": shown(sections.describe_memory),
        "Shard units": shown(sections.describe_units),
        "Config": shown(sections.describe_config),
        "Versions and commands": shown(sections.describe_commands),
    }
    scripts = ["\n".join(Resources(mode="inline", components=["bokeh"]).js_raw), _own_file("page.js")]
    # Nothing runs but these two scripts, and nothing is requested.
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:; script-src {hashes}"
    title = " · ".join(run.name for run in runs)
    drawn = {f"chart-{number}": draw(chart) for number, chart in enumerate(charts)}
    data = {"charts": Markup(as_json(drawn)), "predictions": Markup(as_json(predictions))}
    body = template.report(title, content, data, [*map(Markup, scripts)])
    return str(template.page(title, policy, body)).encode("utf-8")


def _chart_notes(runs: Sequence[RunFacts], charts: list[Chart]) -> list[Lines]:
    notes = list(sections.missing(runs, "curves"))
    if any(len(curve.steps) > 2 * NUM_BUCKETS for chart in charts for curve in chart.curves):
        drawn = f"Of longer curves, the lowest and the highest value of each of {NUM_BUCKETS} ranges of steps are drawn."
        notes.append(Lines([drawn], "quiet"))
    if len(runs) > 1:
        notes.append(Lines(["The reports of single runs mark checkpoints, skipped updates and resumes."], "quiet"))
    return notes


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


def _own_file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
