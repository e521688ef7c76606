"""`python -m toolkit preview`: reads, tokenizes and plans as the run will, without process group or weights, and shows it: as a
page, or in the terminal by `rich`, coloured there; plain where it is piped, with marks in the colours' place."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import starmap
from pathlib import Path
from typing import Any

import torch
from markupsafe import Markup
from rich.console import Console
from rich.text import Text

from toolkit.config.load import RecipeConfig, load_config
from toolkit.config.python import CONFIGS
from toolkit.data.batch_plan import check_global_batch_size
from toolkit.errors import UserError, align, one_line, plural, refusal_named, visible
from toolkit.evaluation.metrics import load_text_metrics
from toolkit.files.durable import written_beside
from toolkit.launch.accelerate_yaml import check_accelerate_yaml
from toolkit.launch.environment import asked_for_cpu
from toolkit.models.config import load_model_config
from toolkit.models.load import build_skeleton
from toolkit.models.patches.documents import choose_packed_attention
from toolkit.models.patches.masks import choose_packing
from toolkit.objectives import objective_of
from toolkit.objectives.objective import Objective
from toolkit.tools.plan.strategy import Strategy, load_strategy
from toolkit.tools.preview.row import RowView, Tokens, describe_row, find_cut_row, view_row
from toolkit.tools.preview.step import CONTEXT, LOSS, LOST, NAMES, PADDING, Bar, Legend, StepView, describe_step, view_step
from toolkit.tools.preview.summary import summarize
from toolkit.tools.recipes import find_recipe
from toolkit.tools.report.sections import Heading, Histogram, Lines, Table, describe_data, load_template
from toolkit.training.data import num_steps, prepare_data
from toolkit.variables import num_launched

STYLES = {LOSS: "bold green", CONTEXT: "", PADDING: "dim", LOST: "strike red"}
MARKS = {LOSS: ("[[", "]]"), CONTEXT: ("", ""), PADDING: ("", ""), LOST: ("~~", "~~")}
"""Around tokens where there is no colour."""
BARS = {LOSS: "█", CONTEXT: "▒", PADDING: "·"}
BAR_WIDTH = 60


@dataclass(frozen=True, kw_only=True)
class Preview:
    """What is shown."""

    title: str
    processes: str
    """How many processes the step is for, and why."""
    summary: dict[str, Any] | None
    """Of `summarize`. None, as `step`, for a single row, which is shown in full length."""
    step: StepView | None
    rows: list[RowView]


def preview(run_arguments: list[str], *, config: list[str], html: Path | None, **options: Any) -> None:
    """Print the view, or write it as a page, with the arguments of the command line. Whatever the run itself would raise of its
    data, a row that is not there and a page that cannot be written are a `UserError`."""
    if num_launched() > 1:
        remedy = "start it without accelerate launch, and give its YAML as --accelerate-config"
        raise UserError(f"preview runs as several processes: {remedy}")
    found = collect([*(f"--config={file}" for file in config), *run_arguments], **options)
    if html is None:
        return print_parts(list_parts(found, has_remarks=False), Console())
    with (
        refusal_named(f"--html {html} cannot be written", "give a file in a folder that exists"),
        written_beside(html.absolute()) as beside,
    ):
        beside.write_text(render_page(found.title, list_parts(found, has_remarks=True)), encoding="utf-8")
    print(one_line(f"the page is {html}"))


def list_parts(preview: Preview, *, has_remarks: bool) -> Iterator[Any]:
    """The view from top to bottom; `has_remarks` as in `describe_data`."""
    yield Heading(preview.title, 1)
    yield Lines([preview.processes], "quiet")
    if preview.summary:
        yield from [Heading("Data", 2)] * has_remarks
        yield from describe_data(preview.summary, has_remarks=has_remarks)
    if preview.step:
        yield from describe_step(preview.step)
    if preview.rows:
        yield Heading("Rows as the model will see them", 2)
        yield Legend((LOSS, CONTEXT, LOST))
    for row in preview.rows:
        yield from describe_row(row, preview.step, is_whole=preview.step is None)


def render_page(title: str, parts: Iterable[Any]) -> str:
    """The page of these parts, styled as reports. Nothing is left that HTML would interpret."""
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    template = load_template(NAMES=NAMES)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return str(template.page(title, policy, template.flow(parts), Markup(style)))


def print_parts(parts: Iterable[Any], console: Console) -> None:
    """Print the parts of the view. Their lines are `Text`, in which rich interprets nothing."""
    for part in parts:
        for line in lines_of(part, console):
            console.print(line, soft_wrap=True)


def lines_of(part: Any, console: Console) -> Iterator[Text]:
    """The lines of a part; in a terminal wrapped to its width, elsewhere never."""

    def marked(kind: str, text: str) -> Text:
        has_colour = console.is_terminal and not console.no_color and console.color_system is not None
        before, after = ("", "") if has_colour else MARKS[kind]
        return Text(f"{before}{text}{after}", style=STYLES[kind])

    def wrapped(text: Text, indent: int = 2) -> Iterator[Text]:
        width = max(20, console.width - indent)
        for line in text.split("\n", allow_blank=True):
            for piece in line.wrap(console, width, overflow="fold") if console.is_terminal else [line]:
                yield Text(" " * (indent if piece.plain else 0)).append_text(piece)

    match part:
        case Heading(text, level):
            yield from [Text()] * (level < 4)
            style = {1: "bold", 4: "bold"}.get(level, "bold cyan")
            yield from wrapped(Text(visible(text), style=style), indent=2 * (level == 4))
        case Lines(lines, kind):
            for line in lines:
                yield from wrapped(Text(visible(line)), indent=4 if kind == "text" else 2)
        case Table(rows, left):
            for number, line in enumerate(align([list(map(visible, row)) for row in rows], left)):
                yield Text(f"  {line}".rstrip(), style="" if number else "dim")
        case Histogram(bins):
            width, most = max(len(label) for label, _ in bins), max(count for _, count in bins)
            for label, count in bins:
                yield Text(f"  {label:>{width}}  {'█' * math.ceil(BAR_WIDTH * count / most)} {count:,}")
        case Legend(kinds, True):
            yield Text(f"  {', '.join(f'{BARS[kind]} {NAMES[kind]}' for kind in kinds)}")
        case Legend(kinds):
            names = [marked(kind, NAMES[kind]) for kind in kinds]
            yield from wrapped(Text("tokens, with | between two: ").append_text(Text(", ").join(names)))
        case Bar():
            yield _draw(part)
        case Tokens():
            shown = ((kind, "|".join(visible(text).replace("\n", "⏎\n") for text in texts)) for kind, texts in part.by_kind())
            yield from wrapped(Text().append("|", style="dim").join(starmap(marked, shown)), indent=4)


def _draw(bar: Bar) -> Text:
    """Parts are as wide as their share of the longest pack; `|` is between two rows."""
    line, done, drawn = Text("    "), 0, 0
    for place, (kind, num) in enumerate(bar.pack.parts):
        if place in bar.pack.begins[1:]:
            line.append("|", style="dim")
        done += num
        end = round(BAR_WIDTH * done / bar.longest)
        line.append(BARS[kind] * (end - drawn), style=STYLES[kind])
        drawn = end
    return line.append(f"  {bar.label}")


def collect(
    run_arguments: list[str], accelerate_config: Path | None, recipe: str | None, num_rows: int, row_id: int | None
) -> Preview:
    """Prepare the data as the run does, and collect what is shown; arguments and errors of `preview`."""
    config: RecipeConfig = load_config(CONFIGS[find_recipe(run_arguments, recipe)], run_arguments)
    if accelerate_config is None:
        on_cpu = asked_for_cpu() or not torch.cuda.is_available()
        launch = Strategy(kind="single", num_shards=1, num_replicas=1, num_machines=1, compute_dtype=torch.float32, is_cpu=on_cpu)
        processes = "1 process; --accelerate-config PRESET.yaml shows the step of a launch"
    else:
        launch = load_strategy(accelerate_config, check_accelerate_yaml(accelerate_config).get("num_processes") or 1)
        processes = f"{plural(launch.num_processes, 'process')}, as in {accelerate_config}"
    check_global_batch_size(config.train, launch.num_processes)
    # The run's own phases, without its accelerator: the model on the meta device, then its rows and its batch plan.
    objective = objective_of(config)
    model_config, skeleton = _build_skeleton(objective, config, launch)
    config = choose_packing(config, skeleton, is_one_graph=launch.is_one_graph)
    metrics = load_text_metrics(config.eval.metrics, {})
    rows, plan, evaluation = prepare_data(objective, config, metrics, model_config, skeleton, launch.num_processes)
    name = config.model.name_or_path
    title = f"{config.run.name}: {name}, {objective.kind}"
    if row_id is not None:
        row = view_row(objective, rows, config.data, config.model, row_id)
        return Preview(title=title, processes=processes, summary=None, step=None, rows=[row])
    first = [int(rows.train[index]["row_id"]) for index in plan.step(1).rows[:num_rows]]
    shown = [view_row(objective, rows, config.data, config.model, of_step) for of_step in first]
    if num_rows and not any(side.num_lost for row in shown for side in row.sides):
        shown += filter(None, [find_cut_row(objective, rows, config.data, config.model)])
    step = view_step(objective, plan, rows.train, evaluation.collator, num_steps(config, plan))
    summary = summarize(rows, evaluation, config.data, name)
    return Preview(title=title, processes=processes, summary=summary, step=step, rows=shown)


def _build_skeleton(objective: Objective, config: RecipeConfig, launch: Strategy) -> tuple[Any, Any]:
    """The model's config and the model on the meta device, also where the package of flash attention is missing."""
    attention = config.model.attn_implementation or ""
    is_flash = "flash" in attention
    model = replace(config.model, attn_implementation="eager") if is_flash else config.model
    model_config = load_model_config(model, objective)
    skeleton = build_skeleton(model, model_config, objective)
    if is_flash:
        skeleton.config._attn_implementation = attention  # by which the collator is chosen
    elif config.packs:
        device_type, one_graph = "cpu" if launch.is_cpu else "cuda", launch.is_one_graph
        choose_packed_attention(skeleton, attention or None, device_type, launch.compute_dtype, is_one_graph=one_graph)
    return model_config, skeleton
