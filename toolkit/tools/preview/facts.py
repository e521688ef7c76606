"""What `preview` shows: the run's own phases of the data, without its process group and weights, and facts about the result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from toolkit.config.load import RecipeConfig, load_config
from toolkit.config.schema import LLMConfig, SummarizationConfig
from toolkit.data.batch_plan import check_global_batch_size
from toolkit.evaluation.metrics import load_text_metrics
from toolkit.launch.accelerate_yaml import check_accelerate_yaml
from toolkit.launch.environment import asked_for_cpu
from toolkit.models.attention import choose_packed_attention
from toolkit.models.config import AutoClass, is_encoder_decoder, load_model_config
from toolkit.models.load import build_skeleton
from toolkit.parallel.masks import choose_packing
from toolkit.tools.plan.strategy import Strategy, load_strategy
from toolkit.tools.preview.row import RowView, find_cut_row, view_row, view_rows
from toolkit.tools.preview.step import StepView, view_step
from toolkit.tools.preview.summary import Summary, summarize
from toolkit.tools.preview.wording import plural
from toolkit.tools.recipe import find_model
from toolkit.training.data import num_steps, prepare_data

MOST_PACKS = 24
"""Packs of the step that are drawn."""


@dataclass(frozen=True, kw_only=True)
class Preview:
    """What is shown."""

    title: str
    processes: str
    """How many processes the step is for, and why."""
    summary: Summary | None
    """None, as `step`, for a single row."""
    step: StepView | None
    rows: list[RowView]
    is_whole: bool
    """Whether rows are shown in full length."""


def collect(
    run_arguments: list[str], accelerate_config: Path | None, recipe: str | None, num_rows: int, row_id: int | None
) -> Preview:
    """Prepare the data as the run does, and collect what is shown; arguments and errors of `preview`."""
    config = _load_config(run_arguments, recipe)
    launch, processes = _read_launch(accelerate_config)
    check_global_batch_size(config.train, launch.num_processes)
    # The run's own phases, without its accelerator: the model on the meta device, then its rows and its batch plan.
    model_config, skeleton = _build_skeleton(config, launch)
    config = choose_packing(config, skeleton)
    metrics = load_text_metrics(config.eval.metrics, {})
    rows, plan, evaluation = prepare_data(config, metrics, model_config, skeleton, launch.num_processes)
    name = config.model.name_or_path
    title = f"{config.run.name}: {name}, {'a causal model' if isinstance(config, LLMConfig) else 'an encoder-decoder'}"
    if row_id is not None:
        views = [view_row(rows, config.data, config.model, row_id)]
        return Preview(title=title, processes=processes, summary=None, step=None, rows=views, is_whole=True)
    shown = view_rows(rows, config.data, config.model, plan.step(1).rows[:num_rows])
    if num_rows and not any(side.num_lost for row in shown for side in row.sides):
        cut = find_cut_row(rows, config.data, config.model)
        shown += [cut] if cut else []
    ids = {row.row_id for row in shown}
    step = view_step(plan, rows.train, evaluation.collator, num_steps(config, plan), MOST_PACKS, ids)
    return Preview(
        title=title,
        processes=processes,
        summary=summarize(rows, evaluation.rows, config.data, name),
        step=step,
        rows=shown,
        is_whole=False,
    )


def _load_config(run_arguments: list[str], recipe: str | None) -> RecipeConfig:
    is_t5 = is_encoder_decoder(find_model(run_arguments)) if recipe is None else recipe == "t5"
    config_class: Any = SummarizationConfig if is_t5 else LLMConfig
    return load_config(config_class, run_arguments)


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
    auto_class: AutoClass = "AutoModelForCausalLM" if isinstance(config, LLMConfig) else "AutoModelForSeq2SeqLM"
    attention = config.model.attn_implementation or ""
    is_flash = "flash" in attention
    model = replace(config.model, attn_implementation="eager") if is_flash else config.model
    model_config = load_model_config(model, auto_class)
    skeleton = build_skeleton(model, model_config, auto_class)
    if is_flash:
        skeleton.config._attn_implementation = attention  # by which the collator is chosen
    elif isinstance(config, LLMConfig) and config.data.packing:
        device_type, one_graph = "cpu" if launch.is_cpu else "cuda", launch.is_one_graph
        choose_packed_attention(skeleton, attention or None, device_type, launch.compute_dtype, is_one_graph=one_graph)
    return model_config, skeleton
