"""Runs in each rank of `python -m toolkit verify`: the unchanged recipe, with its calls wrapped to record what they do.

    accelerate launch --config_file PRESET.yaml -m toolkit.tools.verify.watched_run RECIPE.py FOLDER FLAG...

Rank 0 writes the records into FOLDER:

    texts.json      texts and tokens of the rows of step 1 and of the evaluation; tokenizer/: what made them
    loaded.*        after the checkpoint is loaded, or before the first step
    positions.*     the logits of long rows then
    gradients.*     in the first step, before clipping; late_gradients.*: in the second
    updated-1.*     after the first step
    saved-<step>.*  whenever a checkpoint is saved
    trained.*       after the last step, with what `rank_probes` saw; then a run that generates exports, and others end
    failed-<rank>.json   the error that ended the rank

`*.safetensors` holds unsharded tensors, `*.json` what each rank holds of them. torch's own full state dict gathers them, because
the toolkit's functions are what is being checked. Rank 0 takes everything into host memory.
"""

import contextlib
import hashlib
import json
import random
import re
import runpy
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from toolkit.checkpoint.manifest import Checkpoint
from toolkit.checkpoint.save import CheckpointWriter, Save
from toolkit.checkpoint.state import TrainState
from toolkit.config.load import RecipeConfig
from toolkit.data import batch_plan
from toolkit.data.batch_plan import Step
from toolkit.distributed.comm import gather_objects, rank, world_size
from toolkit.errors import UserError
from toolkit.launch.environment import launched_precision, set_unless_given
from toolkit.models.freeze import hash_tensor
from toolkit.objectives.objective import Objective
from toolkit.objectives.preference import Pairs
from toolkit.parallel.units import clean_name, local_tensor
from toolkit.parallel.wrap import ShardedModel, forget_forwards
from toolkit.tools.verify import EXPORTED, rank_probes
from toolkit.tracking.step_log import StepFigures
from toolkit.training import data, finetune, loop
from toolkit.training import run as run_module
from toolkit.training.run import leave
from toolkit.training.setup import Run
from toolkit.variables import given

WEIGHT_DECAY = re.compile(r"param_groups\.(.*)\.weight_decay")
"""A parameter's, in torch's state dict of an optimizer."""


def main() -> None:
    """Run a recipe with all its flags, and record it."""
    recipe, folder, *flags = sys.argv[1:]
    if torch.cuda.is_available():
        take_exact_kernels()
    watch(Path(folder))
    sys.argv = [recipe, *flags]
    try:
        runpy.run_path(recipe, run_name="__main__")
    except BaseException as error:  # re-raised below; a `UserError` is a SystemExit by now
        if not isinstance(error, SystemExit) or error.code:
            _note_failure(Path(folder), error)
        raise


def take_exact_kernels() -> None:
    """Take kernels of a GPU that add in a fixed order. A run in bf16 is there to try the attention that training takes.

    With `warn_only` memory-efficient attention splits its backward's sums (attention_backward.cu, num_splits_key); without it
    some operators fail."""
    set_unless_given("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    if launched_precision() == "no":
        for kernel in ("flash", "mem_efficient", "cudnn"):
            getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)


def watch(folder: Path) -> None:
    """Wrap the recorded calls, for the rest of this process. Only a run that generates exports: it takes as long as the steps."""
    # The original calls, and the probes of modes and dropout.
    resume, clip, save, finish = run_module.resume, loop.clip_gradients, CheckpointWriter.save, finetune.finish
    train_step, prepare = loop.train_step, finetune.prepare_data
    records = ["gradients", "late_gradients"]
    probes = rank_probes.Probes()
    for owner in (Objective, Pairs):
        rank_probes.watch_modes(probes, owner)
    rank_probes.watch_dropout(probes)

    # Each wrapper records before or after the original call.
    def prepare_and_look(objective: Objective, config: RecipeConfig, *args: Any, **more: Any) -> Any:
        few = partial(rank_probes.prepare_few, data.prepare_rows, config.train.global_batch_size_rows)
        with mock.patch.object(data, "prepare_rows", few):
            rows, plan, evaluation = prepare(objective, config, *args, **more)
        if rank() == 0:
            rank_probes.save_texts(folder, rows, rows.train.select(plan.step(1).rows), evaluation.rows)
        return rows, plan, evaluation

    def resume_and_look(run: Run, saved: Checkpoint | None) -> None:
        resume(run, saved)
        _record(folder / "loaded", run.sharded, run.optimizer)
        if saved is None and run.config.model.dropout:
            run.sharded.model.train()
            probes.dropout.append(rank_probes.look_at_dropout(run, rank(), 0, 0))
            forget_forwards(run.sharded.model)
        elif saved is None:
            _save(folder / "positions", rank_probes.look_at_positions(run.sharded))

    def look_and_clip(model: Any, *rest: Any) -> torch.Tensor:
        if records:  # the same on all ranks
            _save(folder / records.pop(0), _whole_gradients(model))
        return clip(model, *rest)

    def step_and_look(run: Run, step: Step, *args: Any) -> StepFigures:
        probes.run = run
        figures = train_step(run, step, *args)
        if step.step == 1:
            _record(folder / "updated-1", run.sharded, run.optimizer)
        return figures

    def look_and_save(writer: CheckpointWriter, state: TrainState, *, wait: bool = False) -> Save | None:
        _record(folder / f"saved-{state.step}", writer.sharded, writer.optimizer)
        return save(writer, state, wait=wait)

    def look_and_finish(run: Run) -> None:
        kinds = ("dropout", "wrong_modes")
        seen: dict[str, list[Any]] = {kind: sum(gather_objects(getattr(probes, kind)), []) for kind in kinds}
        _record(folder / "trained", run.sharded, None, **seen, num_forwards=probes.num_forwards)
        if run.config.run.name == EXPORTED:
            with mock.patch.object(run_module, "_tool") as tool:  # without page and picture, which take longer than the steps
                tool.return_value.draw_curves.return_value = None
                finish(run)
        else:
            leave(run.trackers)

    run_module.resume, finetune.finish = resume_and_look, look_and_finish  # type: ignore[assignment]
    finetune.prepare_data, batch_plan.LENGTH_NOISE = prepare_and_look, 1.0  # else two epochs of few rows have the same batches
    loop.clip_gradients, loop.train_step = look_and_clip, step_and_look  # type: ignore[assignment]
    CheckpointWriter.save = look_and_save  # type: ignore[method-assign,assignment]


def _note_failure(folder: Path, error: BaseException) -> None:
    """Write the error that ended the rank, with its time: peers may fail later because of it, with meaningless errors."""
    cause = error.__context__ if isinstance(error, SystemExit) and error.__context__ else error
    text = " ".join(str(cause).split())
    reason = text if isinstance(cause, UserError) else f"{type(cause).__name__}: {text}"
    about = {"reason": reason, "time_s": time.time()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"failed-{given('RANK') or 0}.json").write_text(json.dumps(about), encoding="utf-8")


def _record(path: Path, sharded: ShardedModel, optimizer: torch.optim.Optimizer | None = None, **more: Any) -> None:
    """Write unsharded parameters and moments (a hash for frozen parameters), and what each rank holds of them. Collective."""
    # Gather weights and moments on rank 0's CPU only. FSDP1 on a CPU gathers on all ranks: its offload to the CPU segfaults.
    model, named = sharded.model, dict(sharded.skeleton.named_parameters())
    frozen = {name for name, p in named.items() if not p.requires_grad}
    offloads = not (isinstance(model, FullyShardedDataParallel) and next(model.parameters()).device.type == "cpu")
    gathers = world_size() > 1
    options = StateDictOptions(full_state_dict=gathers, cpu_offload=gathers and offloads, flatten_optimizer_state_dict=True)
    gathered: dict[str, Any] = get_model_state_dict(model, options=options)
    weights = _on_cpu(gathered.items())
    assert rank() != 0 or weights.keys() >= named.keys(), f"not gathered: {sorted(named.keys() - weights.keys())}"
    states: dict[str, Any] = {}
    if optimizer is not None and optimizer.state:  # without state, torch would take a step to create it
        states = get_optimizer_state_dict(model, optimizer, options=options)

    # What this rank holds, and how it is sharded.
    here = [t for state in (optimizer.state.values() if optimizer else ()) for t in state.values()]
    local = {
        "parameter_bytes": sum(local_tensor(p).nbytes for p in model.parameters()),
        "moment_bytes": sum(local_tensor(t).nbytes for t in here if isinstance(t, torch.Tensor) and t.dim()),
    }
    # Of this rank's generators; hashed here, because the toolkit's own capture is what is being checked.
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    numbers = [state.tolist() for state in (torch.get_rng_state(), *devices)]
    of_numpy: Any = np.random.get_state(legacy=True)
    random_state = repr((random.getstate(), of_numpy[1].tolist(), of_numpy[2:], numbers))
    about = {
        "ranks": gather_objects(local),
        "placements": sorted({str(p.placements) for p in model.parameters() if isinstance(p, DTensor)}),
        "weight_decay": {
            match[1]: decay for name, decay in states.items() if (match := WEIGHT_DECAY.fullmatch(clean_name(name)))
        },
        "parameters": {
            name: {"shape": list(p.shape), "itemsize": p.element_size(), "is_trainable": p.requires_grad}
            for name, p in named.items()
        },
        "random": gather_objects(hashlib.sha256(random_state.encode()).hexdigest()),
        "buffers": {clean_name(name): [str(t.dtype), hash_tensor(t, t.dtype)] for name, t in sharded.unwrapped.named_buffers()},
        "has_relu": any(isinstance(module, torch.nn.ReLU) for module in sharded.skeleton.modules()),
        "frozen": {name: hash_tensor(t, t.dtype) for name, t in weights.items() if name in frozen},
    }
    trained = {f"model.{name}": t for name, t in weights.items() if name in named and name not in frozen}
    kept = _on_cpu((f"optimizer.{name}", t) for name, t in states.items() if name.startswith("state."))
    _save(path, trained | kept, about | more)


def _whole_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Unsharded gradients of trainables, by clean name. Collective."""
    gathered: Any = contextlib.nullcontext()
    if isinstance(model, FullyShardedDataParallel):
        gathered = FullyShardedDataParallel.summon_full_params(model, with_grads=True, writeback=False)
    with gathered:
        return _on_cpu((name, p.grad) for name, p in model.named_parameters() if p.requires_grad and p.grad is not None)


def _on_cpu(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Unsharded copies on the CPU, by clean name. Collective, where they are sharded."""
    whole = ((name, t.full_tensor() if isinstance(t, DTensor) else t) for name, t in named)
    return {clean_name(name).removeprefix("module."): t.detach().to("cpu", copy=True).contiguous() for name, t in whole}


def _save(path: Path, tensors: dict[str, torch.Tensor], about: dict[str, Any] | None = None) -> None:
    """Write a record on rank 0. The JSON is written last, so that a record with it is complete."""
    if rank() != 0:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path.with_suffix(".safetensors"))
    if about is not None:
        path.with_suffix(".json").write_text(json.dumps(about), encoding="utf-8")


if __name__ == "__main__":
    main()
