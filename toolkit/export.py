"""A Hugging Face folder that plain transformers loads, reloaded and compared before the run calls it exported."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError

from toolkit.accelerator import compute_dtype
from toolkit.data.collate import collate
from toolkit.distributed import agreed, barrier, print_rank0, rank
from toolkit.errors import UserError
from toolkit.evaluation import EvaluationRows
from toolkit.sharding import ShardedModel, assign_parameters, evaluation_model, weightless_copy, whole_parameters

NUM_CHECK_ROWS = 4
LOGIT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest difference between the trained and the reloaded model's logits, as a share of the largest logit.

The reloaded model computes in fp32 on one process; the trained one in its compute dtype, sharded.
"""


def export_model(sharded: ShardedModel, data: EvaluationRows, folder: Path, max_shard_size: str) -> None:
    """Write the whole model, its configs and tokenizer to `folder`, reload it and compare. Collective.

    Parameters are gathered one unit at a time and collected in rank 0's host memory. Beside the folder,
    `export_check.safetensors` keeps a few inputs and the trained model's logits for them.

    An older export is replaced once the new one is proven. Logits that differ are a remark under bf16, whose rounding grows
    with the model, since the weights are compared bit for bit.

    Raises:
        RuntimeError: the reloaded weights are not bit for bit the trained ones, or under fp32 its logits differ.
        UserError: the folder cannot be written.
    """
    check = _trained_logits(sharded, data)
    weights = {}
    for name, whole in whole_parameters(sharded):
        if rank() == 0:
            weights[name] = whole.to("cpu", copy=True).contiguous()

    def write() -> None:
        if rank() != 0:
            return
        try:
            _write(sharded, data, weights, folder, check, max_shard_size)
        except (OSError, SafetensorError) as error:
            raise UserError(f"the export {folder} could not be written: {error}") from None

    agreed(write)
    barrier()


def _write(
    sharded: ShardedModel,
    data: EvaluationRows,
    weights: dict[str, torch.Tensor],
    folder: Path,
    check: dict[str, torch.Tensor],
    max_shard_size: str,
) -> None:
    """Into a folder beside, compared there, then renamed."""
    from safetensors.torch import save_file

    model = weightless_copy(sharded.skeleton)
    assign_parameters(model, weights)
    unfinished = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished, max_shard_size=max_shard_size)
    data.tokenizer.save_pretrained(unfinished)
    _compare(weights, check, unfinished, compute_dtype(sharded.accelerator))
    save_file(check, folder.with_name("export_check.safetensors"))
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


@torch.no_grad()
def _trained_logits(sharded: ShardedModel, data: EvaluationRows) -> dict[str, torch.Tensor]:
    """A few inputs, and the `logits` of the trained, sharded model for them. Collective."""
    rows = [data.rows[i] for i in range(min(NUM_CHECK_ROWS, len(data.rows)))]
    rows = rows or [{"input_ids": [data.pad_token_id + 1] * 4, "labels": [data.pad_token_id + 1] * 4}]
    batch = collate(rows, data.pad_token_id, data.decoder_start_token_id)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "decoder_input_ids")}
    on_device = {name: tensor.to(sharded.accelerator.device) for name, tensor in inputs.items()}
    with evaluation_model(sharded, unshard="never") as (model, _):
        logits_BTV = model(**on_device, use_cache=False).logits.float().cpu().contiguous()
    return {**inputs, "logits": logits_BTV}


@torch.no_grad()
def _compare(weights: dict[str, torch.Tensor], check: dict[str, torch.Tensor], folder: Path, trained_dtype: torch.dtype) -> None:
    """Reload the folder as a user would and hold it against the trained model."""
    from transformers import AutoModelForSeq2SeqLM

    reloaded = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
    parameters = dict(reloaded.named_parameters(remove_duplicate=False))
    for name, weight in weights.items():
        if name not in parameters or not torch.equal(parameters[name], weight.float()):
            raise RuntimeError(f"{folder}: {name} is not what was trained")
    inputs = {name: tensor for name, tensor in check.items() if name != "logits"}
    logits_BTV = reloaded(**inputs, use_cache=False).logits
    difference = (logits_BTV - check["logits"]).abs().max() / check["logits"].abs().max().clamp(min=1e-6)
    tolerance = LOGIT_TOLERANCE[trained_dtype]
    if difference <= tolerance:
        return
    told = f"logits of the reloaded export differ by {difference:.2e} of the largest, more than {tolerance}"
    if trained_dtype == torch.float32:
        raise RuntimeError(f"{folder}: {told}")
    print_rank0(f"{told}; its weights are bit for bit the trained ones, which computed in {trained_dtype}")
