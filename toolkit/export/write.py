"""Writes Hugging Face folders for plain transformers and peft, and compares each before it counts as exported."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from toolkit.checkpoint.dcp import Tensors
from toolkit.config.load import RecipeConfig
from toolkit.data.collate import move_to
from toolkit.distributed.comm import on_rank_0
from toolkit.distributed.progress import Phase
from toolkit.distributed.watchdog import enter_phase
from toolkit.errors import UserError
from toolkit.evaluation.rows import EvaluationRows
from toolkit.export.card import Kind, Origin, save_card
from toolkit.export.compare import check_logits, reload
from toolkit.export.lora import Merge, coarsest, compare_adapter, load_adapter, write_adapter
from toolkit.export.model_files import Cast, ModelFiles, cast_on_meta, dtype_name
from toolkit.export.old_spelling import spell_config, spell_tokenizer
from toolkit.export.paths import ExportPaths, replaced, write_on_rank_0
from toolkit.export.run_data import cut_check_rows, save_trainer_state
from toolkit.export.usage import copy_processors, save_usage, set_generation, write_python
from toolkit.files.durable import give_usual_mode, written_beside
from toolkit.launch.accelerator import compute_dtype
from toolkit.models.lora import is_enabled
from toolkit.models.lora_files import base_name, hash_weight
from toolkit.models.quantized import dequantized
from toolkit.parallel.gather import dequantized_copy, evaluation_model, unsharded_parameters
from toolkit.parallel.wrap import ShardedModel

logger = logging.getLogger("toolkit")


def export_model(config: RecipeConfig, sharded: ShardedModel, data: EvaluationRows, origin: Origin, places: ExportPaths) -> None:
    """Write the model, or its adapter, with tokenizer and model card to folders, and compare it. Collective.

    Parameters are gathered one at a time. Rank 0 writes each and compares the file's bytes with it, so that its host memory holds
    one of them, not the model (`ModelFiles` prints what needs more). A folder replaces an older one once plain transformers or
    peft finds every name in it, in its shape, and every byte is the trained one. Then logits are compared, within the bounds of
    `choose_device`; a difference under bf16, whose rounding grows with the model, only prints a remark. Of the rows in `data` the
    first few are read.

    A folder that does not hold the trained weights, and is not put in place, or whose logits differ under fp32, is a
    `RuntimeError`; one that cannot be written is a `UserError` on every rank.
    """
    # What the exported model will generate with, and the trained model's logits for a few tokens.
    skeleton = sharded.skeleton
    if skeleton.can_generate():
        set_generation(skeleton, data.stop_token_ids, data.collator.pad_token_id, data.objective.task_params(config))
    enter_phase("export")
    check = _trained_logits(sharded, data)
    enter_phase("export", counts_cpu=True)
    export = _Export(config, sharded, data, check, origin, places)
    merge = None
    if is_enabled(config.adapter):
        adapter, base_hashes = _gather_adapter(sharded, origin.frozen_hashes, places)
        if places.adapter:
            export.write_adapter(places.adapter, adapter, base_hashes)
        merge = Merge(dequantized_copy(skeleton), adapter) if places.model else None
    if places.model:
        export.write_model(places.model, merge)


@dataclass(frozen=True)
class _Export:
    """An export under way. `write_adapter` and `write_model` are collectives."""

    config: RecipeConfig
    sharded: ShardedModel
    data: EvaluationRows
    check: Tensors
    """A few inputs, and the trained model's `logits` for them."""
    origin: Origin
    places: ExportPaths

    def write_adapter(self, folder: Path, adapter: Tensors, base_hashes: dict[str, str]) -> None:
        """Write and load the adapter, which is small, put the folder in place, then compare logits."""
        skeleton, dtype = self.sharded.skeleton, self.places.dtype or torch.float32
        cast = Cast(dict.fromkeys(adapter, dtype))

        def write() -> None:
            stored = {name: cast(name, weight) for name, weight in adapter.items()}
            write_adapter(unfinished, skeleton, stored, base_hashes)
            self._write_rest(unfinished, "adapter", dtype)
            compare_adapter(unfinished, skeleton, stored)

        with replaced(folder) as unfinished:
            write_on_rank_0(folder, write)
        on_rank_0(lambda: self._compare_adapter(folder))
        if self.places.dtype is not None:
            logger.info(cast.describe())

    def _compare_adapter(self, folder: Path) -> None:
        """Compare the logits of the adapter in `folder`, loaded onto its original base. For rank 0."""
        skeleton, computed = dequantized_copy(self.sharded.skeleton), compute_dtype(self.sharded.accelerator)
        why = f"the adapter is bit for bit the trained one, whose model computed in {computed}"
        load = functools.partial(load_adapter, folder, skeleton)
        if self.sharded.stored:
            why = f"it was trained on the base in {self.config.adapter.base_dtype}, and names the original one"
        coarse = None if self.sharded.stored else coarsest(skeleton, computed, self.places.dtype)
        check_logits(folder, skeleton, load, self.check, self.sharded.accelerator.device, coarse, why)

    def write_model(self, folder: Path, merge: Merge | None) -> None:
        """Gather, write and read back one weight after another, put the folder in place, then compare logits."""
        model = merge.model if merge else self.sharded.skeleton
        model = cast_on_meta(model, self.places.dtype) if self.places.dtype else model
        cast = Cast({name: parameter.dtype for name, parameter in model.named_parameters(remove_duplicate=False)})
        stored, base_dtype = self.sharded.stored, self.config.adapter.base_dtype
        originals = stored if self.config.export.merge_into == "original" else {}

        def write(name: str, whole: torch.Tensor) -> None:
            if name in originals:
                whole = originals[name].read_all()
            named = (name, whole) if merge is None else merge.merged(name, whole)
            if named is not None:
                files.add(named[0], cast(*named))

        with replaced(folder) as unfinished:
            files = ModelFiles(unfinished, model, self.config.export.max_shard_size)
            write_on_rank_0(folder, files.begin)
            write_on_rank_0(folder, lambda: self.origin.remarks.extend(spell_config(unfinished, model)))
            _gather(self.sharded, write, folder)
            write_on_rank_0(folder, files.finish)
            write_on_rank_0(folder, lambda: self._write_rest(unfinished, "merged" if merge else "model", model.dtype))
        device, computed = self.sharded.accelerator.device, compute_dtype(self.sharded.accelerator)
        why = f"its weights are bit for bit the trained ones, which computed in {computed}"
        if merge or self.places.dtype:
            why = f"its weights were rounded to {model.dtype}, and the trained model computed in {computed}"
        load, coarse = functools.partial(reload, model, folder), None if originals else coarsest(model, computed)
        if originals:
            why = f"it is merged into the original base, and the adapter was trained on that in {base_dtype}"
        elif stored:
            logger.info(f"{folder} is merged into the dequantized {base_dtype} base, on which the adapter was trained")
        on_rank_0(lambda: check_logits(folder, model, load, self.check, device, coarse, why))
        for remark in self.origin.remarks:
            logger.info(f"{folder}: {remark}")
        if self.places.dtype is not None:
            logger.info(cast.describe())

    def _write_rest(self, unfinished: Path, kind: Kind, dtype: torch.dtype) -> None:
        """Write what every exported folder has beside weights, and the check of this export."""
        from transformers import AutoTokenizer

        objective, tokenizer = self.data.objective, self.data.tokenizer
        tokenizer.save_pretrained(unfinished)
        try:
            AutoTokenizer.from_pretrained(unfinished)
        except Exception as error:  # a damaged tokenizer may raise anything
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            fix = f"check the disk of {unfinished.parent}, and start the same command again"
            raise UserError(f"transformers cannot load the tokenizer that was exported ({reason}): {fix}") from None
        self.origin.remarks.extend(spell_tokenizer(unfinished, tokenizer))
        config, skeleton, origin = self.config, self.sharded.skeleton, self.origin
        if skeleton.can_generate():
            skeleton.generation_config.save_pretrained(unfinished)  # type: ignore[union-attr]
        data, stored = origin.data, dtype_name(dtype)
        kept = data.kept_tokens if data else {}
        save_usage(config, unfinished, dtype=origin.computed_in, step=origin.step, weights_dtype=stored, kept_tokens=kept)
        if kind != "adapter" and skeleton.input_modalities != "text":
            copy_processors(config.model, unfinished)
        is_adapter, tag = kind == "adapter", objective.pipeline_tag(config)
        use = write_python(objective, config, skeleton.config, tokenizer, ".", origin, is_adapter=is_adapter)
        save_card(unfinished, config, skeleton.config, origin, kind, stored, use, tag)
        save_trainer_state(unfinished, origin.lines, origin.step, data.num_training_rows if data else None)
        if self.places.check_file is not None:
            with written_beside(self.places.check_file) as beside:
                save_file(self.check, beside)
                give_usual_mode(beside)


@torch.no_grad()
def _trained_logits(sharded: ShardedModel, data: EvaluationRows) -> Tensors:
    """A few inputs, and the trained, sharded model's `logits` for them. Collective."""
    token = int(data.collator.pad_token_id == 0)  # in every vocabulary
    rows: list[dict[str, list[int]]] = cut_check_rows(data) or [{"input_ids": [token] * 4, "labels": [token] * 4}]
    inputs = data.collator.model_inputs(rows)
    on_device = move_to(sharded.accelerator.device, inputs)
    with evaluation_model(sharded, unshard="never") as (model, _):
        logits_BTV = model(**on_device, use_cache=False).logits.float().cpu().contiguous()
    return {**inputs, "logits": logits_BTV}


def _gather_adapter(sharded: ShardedModel, frozen: dict[str, str], places: ExportPaths) -> tuple[Tensors, dict[str, str]]:
    """On rank 0 the trained parameters by name, in host memory, and the hash of each of the base's. Collective.

    The run has hashed its `frozen` parameters, and the weights that it has in codes; only those in other dtypes than bf16 are
    gathered to be hashed in it.
    """
    named = {name: p for name, p in sharded.skeleton.named_parameters() if p.is_floating_point()}
    trained = {name for name, parameter in named.items() if parameter.requires_grad}
    known = {name for name in frozen if (name in named and named[name].dtype == torch.bfloat16) or name in sharded.stored}
    adapter: Tensors = {}
    base_hashes = {base: frozen[name] for name in frozen if name in known and (base := base_name(name)) is not None}

    def keep(name: str, whole: torch.Tensor) -> None:
        if (base := base_name(name)) is not None:
            base_hashes[base] = hash_weight(whole)
        if name in trained:
            adapter[name] = whole.to("cpu", copy=True).contiguous()

    _gather(sharded, keep, places.adapter or places.model or Path(), named.keys() - known)
    return adapter, base_hashes


def _gather(
    sharded: ShardedModel, take: Callable[[str, torch.Tensor], None], folder: Path, names: set[str] | None = None
) -> None:
    """Gather one parameter after another, dequantized, all or those of `names`; rank 0 calls `take` with each. What
    it cannot write is a `UserError` on every rank. Collective.

    The other ranks wait for it over the control group, whose limit a slow disk cannot reach. In the next gather they could wait
    for no longer than its own.
    """
    enter_phase("export")
    named = dequantized_copy(sharded.skeleton).named_parameters()
    wanted = [p.nbytes for name, p in named if names is None or name in names]
    with Phase(f"exporting to {folder.name}", sum(wanted), "B") as exporting:
        for name, whole in dequantized(unsharded_parameters(sharded, names), sharded.skeleton):
            enter_phase("export", counts_cpu=True)
            write_on_rank_0(folder, functools.partial(take, name, whole))
            exporting.add(whole.nbytes)
            enter_phase("export")
    enter_phase("export", counts_cpu=True)
