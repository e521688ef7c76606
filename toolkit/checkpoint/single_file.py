"""Saves the full state dict of a sharded model to one file, from rank 0's memory; large models use sharded checkpoints."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from toolkit.distributed.comm import on_rank_0, rank
from toolkit.distributed.watchdog import working
from toolkit.errors import UserError
from toolkit.files.durable import written_beside
from toolkit.files.modes import give_usual_mode
from toolkit.parallel.gather import whole_parameters
from toolkit.parallel.wrap import ShardedModel


def save_whole_state(sharded: ShardedModel, path: Path) -> dict[str, float]:
    """Gather the parameters one unit at a time into rank 0's host memory and write them as safetensors. Collective.

    The write is atomic. The file holds parameters only, under their names in the unwrapped model.

    Returns:
        `blocking_s`, the time that every rank waited; `write_s`; and `num_bytes` of the file.

    Raises:
        UserError: the file cannot be written; on every rank.
    """
    # All ranks gather; rank 0 keeps the parameters and writes them.
    start_s = time.perf_counter()
    weights: dict[str, torch.Tensor] = {}
    for name, whole in whole_parameters(sharded):
        if rank() == 0:
            weights[name] = whole.to("cpu", copy=True).contiguous()
    gathered_s = time.perf_counter()

    def write() -> int:
        try:
            with written_beside(path) as unfinished:
                save_file(weights, unfinished)
                give_usual_mode(unfinished)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} could not be written: {error}") from None
        return path.stat().st_size

    working("saving")
    num_bytes = on_rank_0(write)
    end_s = time.perf_counter()
    return {"blocking_s": end_s - start_s, "write_s": end_s - gathered_s, "num_bytes": num_bytes}
