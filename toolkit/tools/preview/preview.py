"""`python -m toolkit preview`: reads, tokenizes and plans as the run will, without process group or weights, and shows it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from markupsafe import Markup
from rich.console import Console

from toolkit.config.load import RecipeConfig, load_config
from toolkit.config.python import CONFIGS
from toolkit.data.batch_plan import check_global_batch_size
from toolkit.errors import UserError, one_line, plural
from toolkit.evaluation.metrics import load_text_metrics
from toolkit.files.durable import written_beside
from toolkit.launch.accelerate_yaml import check_accelerate_yaml
from toolkit.launch.environment import asked_for_cpu
from toolkit.models.attention import choose_packed_attention
from toolkit.models.config import load_model_config
from toolkit.models.load import build_skeleton
from toolkit.parallel.masks import choose_packing
from toolkit.tools.plan.strategy import Strategy, load_strategy
from toolkit.tools.preview.row import find_cut_row, view_row
from toolkit.tools.preview.step import view_step
from toolkit.tools.preview.summary import summarize
from toolkit.tools.preview.terminal import print_preview
from toolkit.tools.preview.wording import NAMES, Preview, list_parts
from toolkit.tools.recipes import find_recipe
from toolkit.tools.report.parts import load_template
from toolkit.training.data import num_steps, prepare_data
from toolkit.variables import num_launched


def preview(
    run_arguments: list[str],
    *,
    config: list[str],
    accelerate_config: Path | None,
    recipe: str | None,
    num_rows: int,
    row_id: int | None,
    html: Path | None,
) -> None:
    """Print the view, or write it as a page, with the arguments of the command line.

    Raises:
        UserError: whatever the run itself would raise of its data; a row that is not there; a page that cannot be written.
    """
    run_arguments = [*(f"--config={file}" for file in config), *run_arguments]
    if num_launched() > 1:
        raise UserError(
            "preview runs as several processes: start it without accelerate launch, and give its YAML as --accelerate-config"
        )
    if num_rows < 0:
        raise UserError(f"--rows is {num_rows}: give 0 or more")
    if html is not None and (html.is_dir() or not html.parent.is_dir() or not os.access(html.parent, os.W_OK)):
        reason = "it is a folder" if html.is_dir() else f"{html.parent} is not a folder that can be written"
        raise UserError(f"--html {html} cannot be written ({reason}): give a file in a folder that exists")
    found = collect(run_arguments, accelerate_config, recipe, num_rows, row_id)
    if html is None:
        return print_preview(found, Console())
    with written_beside(html) as beside:
        beside.write_text(render_page(found.title, list_parts(found, has_remarks=True)), encoding="utf-8")
    print(one_line(f"the page is {html}"))


def render_page(title: str, parts: Iterable[Any]) -> str:
    """The page of these parts, and of those of `report.parts`, styled as reports. Nothing is left that HTML would interpret."""
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    template = load_template(NAMES=NAMES)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return str(template.page(title, policy, template.flow(parts), Markup(style)))


def collect(
    run_arguments: list[str], accelerate_config: Path | None, recipe: str | None, num_rows: int, row_id: int | None
) -> Preview:
    """Prepare the data as the run does, and collect what is shown; arguments and errors of `preview`."""
    config: RecipeConfig = load_config(CONFIGS[find_recipe(run_arguments, recipe)], run_arguments)
    launch, processes = _read_launch(accelerate_config)
    check_global_batch_size(config.train, launch.num_processes)
    # The run's own phases, without its accelerator: the model on the meta device, then its rows and its batch plan.
    model_config, skeleton = _build_skeleton(config, launch)
    config = choose_packing(config, skeleton)
    metrics = load_text_metrics(config.eval.metrics, {})
    rows, plan, evaluation = prepare_data(config, metrics, model_config, skeleton, launch.num_processes)
    name = config.model.name_or_path
    title = f"{config.run.name}: {name}, {'an encoder-decoder' if model_config.is_encoder_decoder else 'a causal model'}"
    first = [int(rows.train[index]["row_id"]) for index in plan.step(1).rows[:num_rows]] if row_id is None else [row_id]
    shown = [view_row(rows, config.data, config.model, row_id) for row_id in first]
    if row_id is not None:
        return Preview(title=title, processes=processes, summary=None, step=None, rows=shown)
    if num_rows and not any(side.num_lost for row in shown for side in row.sides):
        cut = find_cut_row(rows, config.data, config.model)
        shown += [cut] if cut else []
    step = view_step(plan, rows.train, evaluation.collator, num_steps(config, plan))
    summary = summarize(rows, evaluation.rows, config.data, name)
    return Preview(title=title, processes=processes, summary=summary, step=step, rows=shown)


def _read_launch(accelerate_config: Path | None) -> tuple[Strategy, str]:
    """How the run will be launched, and that in words; without an accelerate YAML, one process on this machine."""
    if accelerate_config is None:
        on_cpu = asked_for_cpu() or not torch.cuda.is_available()
        one = Strategy(kind="single", num_shards=1, num_replicas=1, num_machines=1, compute_dtype=torch.float32, is_cpu=on_cpu)
        return one, "1 process; --accelerate-config PRESET.yaml shows the step of a launch"
    num = check_accelerate_yaml(accelerate_config).get("num_processes") or 1
    return load_strategy(accelerate_config, num), f"{plural(num, 'process')}, as in {accelerate_config}"


def _build_skeleton(config: RecipeConfig, launch: Strategy) -> tuple[Any, Any]:
    """The model's config and the model on the meta device, also where the package of flash attention is missing."""
    attention = config.model.attn_implementation or ""
    is_flash = "flash" in attention
    model = replace(config.model, attn_implementation="eager") if is_flash else config.model
    model_config = load_model_config(model, config.task)
    skeleton = build_skeleton(model, model_config, config.task)
    if is_flash:
        skeleton.config._attn_implementation = attention  # by which the collator is chosen
    elif config.packs:
        device_type, one_graph = "cpu" if launch.is_cpu else "cuda", launch.is_one_graph
        choose_packed_attention(skeleton, attention or None, device_type, launch.compute_dtype, is_one_graph=one_graph)
    return model_config, skeleton
