"""Writes Hugging Face folders for plain transformers and peft, and reloads and compares each before it counts as exported."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from toolkit.checkpoint.folders import put_in_place
from toolkit.config.load import RecipeConfig
from toolkit.data.collate import move_to
from toolkit.distributed.comm import on_rank_0, rank
from toolkit.distributed.watchdog import at, moved, working
from toolkit.errors import UserError
from toolkit.evaluation.rows import EvaluationRows
from toolkit.export.compare import compare_logits, compare_weights, reload
from toolkit.export.lora import compare_adapter, compare_merged, merge, write_adapter
from toolkit.files.durable import fsync_tree, refused_write, written_beside
from toolkit.files.modes import give_usual_mode
from toolkit.launch.accelerator import compute_dtype
from toolkit.models.lora import is_enabled
from toolkit.models.lora_files import base_name, hash_weight
from toolkit.parallel.gather import assign_parameters, evaluation_model, whole_parameters
from toolkit.parallel.wrap import ShardedModel, copy_on_meta

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NUM_CHECK_ROWS = 4

Tensors = dict[str, torch.Tensor]


def export_model(config: RecipeConfig, sharded: ShardedModel, data: EvaluationRows, run_folder: Path) -> None:
    """Write the model, or its adapter, with the tokenizer to the run folder's `export/`, reload and compare it. Collective.

    Parameters are gathered one unit at a time and collected in rank 0's host memory. With an adapter, only its parameters
    are collected, unless `export.merge` also writes the merged model to `merged/`. `export_check.safetensors` keeps a few
    inputs and the trained model's logits for them.

    A new export replaces an older one only after the comparison. Weights must match bit for bit; logits that differ under
    bf16, whose rounding grows with the model, only print a remark.

    Raises:
        RuntimeError: the reloaded weights are not bit for bit the trained ones, or its logits differ under fp32.
        UserError: a folder cannot be written.
    """
    # Every rank gathers; rank 0 keeps what it will write.
    has_adapter, merges = is_enabled(config.adapter), config.export.merge
    at("export")
    check = _trained_logits(sharded, data)
    moved()
    weights: Tensors = {}
    base_hashes: dict[str, str] = {}
    trained = {name for name, parameter in sharded.skeleton.named_parameters() if parameter.requires_grad}
    for name, whole in whole_parameters(sharded):
        if rank() != 0:
            continue
        if has_adapter and (base := base_name(name)) is not None:
            base_hashes[base] = hash_weight(whole)
        if name in trained or not has_adapter or merges:
            weights[name] = whole.to("cpu", copy=True).contiguous()

    # Rank 0 writes and compares.
    def write() -> None:
        exported = Exported(
            sharded.skeleton, data.tokenizer, check, compute_dtype(sharded.accelerator), config.export.max_shard_size
        )
        folder = run_folder / "export"
        with written_beside(run_folder / "export_check.safetensors") as check_file:  # first: it is the smallest
            _save_check(check, check_file)
            if has_adapter:
                adapter = {name: weight for name, weight in weights.items() if name in trained}
                _replace(folder, lambda unfinished: _write_adapter(exported, adapter, base_hashes, unfinished))
            else:
                _replace(folder, lambda unfinished: _write_model(exported, weights, unfinished))
            if merges:
                _replace(run_folder / "merged", lambda unfinished: _write_merged(exported, weights, unfinished))

    working("export")
    on_rank_0(lambda: _guarded(run_folder / "export", write))


def check_export_places(config: RecipeConfig, run_folder: Path) -> None:
    """Check before the run that the export can be renamed into place.

    Raises:
        UserError: a link, a mount point or a file is in its place.
    """
    if config.train.max_steps == 0 and not config.export.merge:
        return
    for name in ("export", "export.tmp", *(("merged", "merged.tmp") if config.export.merge else ())):
        place = run_folder / name
        kinds = {"a link": place.is_symlink(), "a mount point": place.is_mount(), "a file": place.is_file()}
        if kind := next((kind for kind, is_it in kinds.items() if is_it), None):
            raise UserError(
                f"{place} is {kind}, and an export replaces a folder of the run's own file system: remove it, or give a place "
                "on the other disk as run.output_dir"
            )


@dataclass(frozen=True)
class Exported:
    """What every exported folder needs besides weights."""

    skeleton: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    check: Tensors
    """A forward's arguments, and the trained model's `logits` for them."""
    computed: torch.dtype
    """Dtype of the trained model's forward."""
    max_shard_size: str


def _write_model(exported: Exported, weights: Tensors, folder: Path) -> None:
    model = copy_on_meta(exported.skeleton)
    assign_parameters(model, weights)
    model.save_pretrained(folder, max_shard_size=exported.max_shard_size)
    exported.tokenizer.save_pretrained(folder)
    reloaded = reload(exported.skeleton, folder)
    compare_weights(weights, reloaded, folder)
    why = f"its weights are bit for bit the trained ones, which computed in {exported.computed}"
    compare_logits(exported.check, reloaded, folder, exported.computed, why)


def _write_adapter(exported: Exported, weights: Tensors, base_hashes: dict[str, str], folder: Path) -> None:
    write_adapter(folder, exported.skeleton, weights, base_hashes)
    exported.tokenizer.save_pretrained(folder)
    compare_adapter(folder, exported.skeleton, weights, exported.check, exported.computed)


def _write_merged(exported: Exported, weights: Tensors, folder: Path) -> None:
    model = merge(exported.skeleton, weights)
    model.save_pretrained(folder, max_shard_size=exported.max_shard_size)
    exported.tokenizer.save_pretrained(folder)
    compare_merged(folder, model, exported.check, exported.computed)


def _save_check(check: Tensors, path: Path) -> None:
    save_file(check, path)
    give_usual_mode(path)


def _replace(folder: Path, write: Callable[[Path], None]) -> None:
    """Call `write` on a temporary folder and rename it over the older one; remove it if it cannot be written."""
    unfinished = folder.with_name(f"{folder.name}.tmp")

    def write_and_rename() -> None:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        write(unfinished)
        give_usual_mode(unfinished)
        fsync_tree(unfinished)
        put_in_place(unfinished, folder)

    try:
        _guarded(folder, write_and_rename)
    except UserError:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _guarded(folder: Path, work: Callable[[], None]) -> None:
    try:
        work()
    except UserError:
        raise
    except Exception as error:  # a tokenizer raises nothing more exact
        if not isinstance(error, OSError | SafetensorError) and refused_write(error) is None:
            raise
        raise UserError(f"the export {folder} could not be written: {error}") from None


@torch.no_grad()
def _trained_logits(sharded: ShardedModel, data: EvaluationRows) -> Tensors:
    """A few inputs, and the trained, sharded model's `logits` for them. Collective."""
    rows = [data.rows[i] for i in range(min(NUM_CHECK_ROWS, len(data.rows)))]
    token = data.collator.pad_token_id + 1
    inputs = data.collator.model_inputs(rows or [{"input_ids": [token] * 4, "labels": [token] * 4}])
    on_device = move_to(sharded.accelerator.device, inputs)
    with evaluation_model(sharded, unshard="never") as (model, _):
        logits_BTV = model(**on_device, use_cache=False).logits.float().cpu().contiguous()
    return {**inputs, "logits": logits_BTV}
