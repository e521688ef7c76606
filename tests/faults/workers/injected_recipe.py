"""A recipe with signals, bad numbers and the like put in from outside: `injected_recipe.py FAULTS RECIPE FLAGS`.

FAULTS is JSON: [[name, {settings}], …]. Nothing of the toolkit knows of it: functions are replaced before the recipe starts, on
every rank alike. Started by `injected_runs`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
HELD_S = 0.4
"""How long a save is held up, so that training goes on beside it."""


def wrap(owner: Any, name: str, before: Callable[..., None]) -> None:
    """Call `before` with the same arguments ahead of every call of `owner.name`."""
    original = getattr(owner, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, both)


def send(ranks: list[int], signals: list[str], to_group: bool = False) -> None:
    """Signals to this process, or to its group with its loader workers in it, where it is one of `ranks`."""
    from toolkit.distributed.comm import rank

    if rank() in ranks:
        for name in signals:
            print(f"got {name}", flush=True)
            (os.killpg if to_group else os.kill)(os.getpid(), getattr(signal, name))


def signal_in_phase(phase: str, step: int, ranks: list[int], signals: list[str], nth: int = 1, to_group: bool = False) -> None:
    """At the n-th time that the training thread enters a phase of a step, in the watchdog's words."""
    from toolkit.distributed.watchdog import Watchdog

    seen: Counter[tuple[str, int]] = Counter()

    def look(_: Watchdog, phase_now: str, step_now: int | None, **__: bool) -> None:
        seen[phase_now, step_now] += 1
        if (phase_now, step_now, seen[phase_now, step_now]) == (phase, step, nth):
            send(ranks, signals, to_group)

    wrap(Watchdog, "at", look)


def signal_in_generation(call: int, ranks: list[int], signals: list[str]) -> None:
    """Inside the n-th `generate` of this rank."""
    from transformers import GenerationMixin

    calls = Counter[str]()

    def look(*_: Any, **__: Any) -> None:
        calls["generate"] += 1
        if calls["generate"] == call + 1:  # the first tries the evaluation before training
            send(ranks, signals)

    wrap(GenerationMixin, "_prepare_generation_config", look)


def signal_in_save(step: int, ranks: list[int], signals: list[str]) -> None:
    """While the shards of a step are written, which takes a while then."""
    from toolkit.checkpoint import save as checkpoint_writer
    from toolkit.checkpoint.save import CheckpointWriter

    steps = []
    wrap(CheckpointWriter, "_write", lambda _, snapshot, save: steps.append(save.step))

    def look(*_: Any) -> None:
        if steps[-1] == step:
            send(ranks, signals)
            time.sleep(HELD_S)

    wrap(checkpoint_writer, "save_tensors", look)


def tell_saves() -> None:
    """Each rank says when it begins to save."""
    from toolkit.checkpoint.save import CheckpointWriter

    wrap(CheckpointWriter, "save", lambda _, state, **__: print(f"saving step {state.step}", flush=True))


def signals_until_the_end(signals: list[str], every_s: float) -> None:
    """Every rank gets them again and again, from the first step on, until it has gone. A process of its own sends them."""
    from toolkit.distributed.signals import StopRequests

    def start() -> None:
        pid = os.getpid()
        if os.fork() == 0:
            with suppress(ProcessLookupError):
                while os.getppid() == pid:
                    for name in signals:
                        time.sleep(every_s)
                        os.kill(pid, getattr(signal, name))
            os._exit(0)

    entered = StopRequests.__enter__

    def enter(self: StopRequests) -> StopRequests:
        start()
        return entered(self)

    StopRequests.__enter__ = enter  # type: ignore[method-assign]


def wait_for_signal(step: int, file: str) -> None:
    """Each rank says in `file`-<rank> that it has begun a step, and waits there until a signal is noted (20 s at most)."""
    from toolkit.distributed.comm import rank
    from toolkit.distributed.signals import StopRequests
    from toolkit.training import loop

    stops: list[StopRequests] = []
    wrap(StopRequests, "__enter__", stops.append)

    def wait(_: str, __: int, step_now: int, *___: int) -> None:
        if step_now == step:
            Path(f"{file}-{rank()}").touch()
            give_up_at = time.monotonic() + 20
            while not stops[0].noted and time.monotonic() < give_up_at:
                time.sleep(0.02)

    wrap(loop, "seed_all", wait)


def bad_loss(value: str, at: list[list[int]]) -> None:
    """The loss of these [step, rank, micro-batch] is not finite, and so are the gradients it gives."""
    from toolkit.training import loop

    here: list[tuple[int, ...]] = [()]
    wrap(loop, "seed_all", lambda purpose, seed, *place: here.append(place))
    summed_loss = loop.summed_loss

    def spoil(*args: Any) -> Any:
        loss_sum, num_correct = summed_loss(*args)
        return (loss_sum * float(value) if list(here[-1]) in at else loss_sum), num_correct

    loop.summed_loss = spoil  # type: ignore[assignment]


def bad_gradient(value: str, steps: list[int], rank: int) -> None:
    """One element of one rank's gradient is not finite in these steps, after all ranks have reduced it."""
    from toolkit.distributed import comm as distributed
    from toolkit.parallel.units import local_tensor
    from toolkit.training import loop

    step = _current_step(loop)

    def spoil(model: torch.nn.Module, max_norm: float | None) -> None:
        if step[-1] in steps and distributed.rank() == rank:
            mine = [local_tensor(p.grad) for p in model.parameters() if p.grad is not None]
            next(gradient for gradient in mine if gradient.numel()).view(-1)[0] = float(value)

    wrap(loop, "clip_gradients", spoil)


def spike(steps: list[int], factor: float) -> None:
    """Gradients are so many times larger in these steps."""
    from toolkit.parallel.units import local_tensor
    from toolkit.training import loop

    step = _current_step(loop)

    def enlarge(model: torch.nn.Module, max_norm: float | None) -> None:
        if step[-1] in steps:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    local_tensor(parameter.grad).mul_(factor)

    wrap(loop, "clip_gradients", enlarge)


def watch_updates(file: str) -> None:
    """Write down for each step which parameters and moments it changed on this rank, bit for bit, and Adam's step counts."""
    from toolkit.distributed.comm import rank
    from toolkit.training import loop

    train_step = loop.train_step

    def watched(session: Any, step: Any, *args: Any) -> Any:
        before = _bits(session)
        figures = train_step(session, step, *args)
        after = _bits(session)
        # A moment that did not exist was 0.
        changed = [name for name, t in after.items() if not torch.equal(before.get(name, torch.zeros_like(t)), t)]
        counts = sorted({int(t.item()) for name, t in after.items() if name.endswith(".step")})
        with Path(f"{file}-{rank()}.jsonl").open("a") as out:
            print(json.dumps({"step": step.step, "changed": len(changed), "of": len(after), "counts": counts}), file=out)
        return figures

    loop.train_step = watched  # type: ignore[assignment]


def check_loaded(file: str) -> None:
    """Right after a resume, compare weights and moments of every rank with the checkpoint read whole, through torch alone."""
    from toolkit.distributed.comm import rank
    from toolkit.training import setup as stages

    resume = stages.resume

    def checked(config: Any, context: Any, run: Any) -> Any:
        state = resume(config, context, run)
        Path(f"{file}-{rank()}.json").write_text(json.dumps(_compare(context.resume_from, run.sharded, run.optimizer)))
        return state

    stages.resume = checked  # type: ignore[assignment]


def remove(what: str, step: int, in_save: bool = False) -> None:
    """Rank 0 removes a file or a folder when it begins a step, or once it has written its shards of the step's checkpoint."""
    from toolkit.checkpoint import save as checkpoint_writer
    from toolkit.distributed.comm import rank
    from toolkit.training import loop

    path, left = Path(what), [1]

    def strike() -> None:
        if rank() == 0 and left:
            left.clear()
            print(f"removed {path}", flush=True)
            gone = path.rename(path.with_name(f"{path.name}.gone"))  # all of it at once
            shutil.rmtree(gone) if gone.is_dir() else gone.unlink()

    if in_save:
        wrap(checkpoint_writer, "describe_files", lambda folder, _: strike() if folder.stem == f"step-{step:08d}" else None)
    else:
        wrap(loop, "seed_all", lambda _, __, step_now, *___: strike() if step_now == step else None)


def umask(mode: int) -> None:
    """What a system's settings give to every process."""
    os.umask(mode)


def no_capabilities() -> None:
    """Root may read everything, unless it has given that up."""
    import ctypes

    version_3_of_this_thread = (ctypes.c_uint32 * 2)(0x20080522, 0)
    if ctypes.CDLL(None, use_errno=True).capset(version_3_of_this_thread, (ctypes.c_uint32 * 6)()) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def kill_tokenizing_process() -> None:
    """One of the processes that rank 0 tokenizes with is killed, as by a system that runs out of memory."""
    from transformers import PreTrainedTokenizerBase

    from toolkit.data.tokens import cache as token_cache

    token_cache._ROWS_WORTH_SEVERAL_PROCESSES = 1
    rank_itself = os.getpid()
    look = lambda *_, **__: None if os.getpid() == rank_itself else os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    wrap(PreTrainedTokenizerBase, "__call__", look)


def tell_finalization() -> None:
    """Say where a rank that ends early is left to Python's finalization, which threads of gloo may abort."""
    from toolkit import errors

    leave = errors._leave

    def told(exit_code: int) -> None:
        leave(exit_code)
        print("Python finalizes", flush=True)

    errors._leave = told


def no_export() -> None:
    """End after the training, which is what most tests are about."""
    from toolkit.training import setup as stages

    stages.finish = lambda config, run: run.sharded.accelerator.end_training()


def _current_step(loop: Any) -> list[int]:
    """A list whose last element is the step under way."""
    steps = [0]
    wrap(loop, "seed_all", lambda purpose, seed, step, *_: steps.append(step))
    return steps


def _bits(session: Any) -> dict[str, torch.Tensor]:
    """This rank's parts of all parameters and optimizer states, copied."""
    from toolkit.parallel.units import local_tensor

    found = {}
    for name, parameter in session.run.sharded.model.named_parameters():
        found[name] = parameter
        for what, value in session.run.optimizer.state.get(parameter, {}).items():
            found[f"{name}.{what}"] = value
    local = {name: local_tensor(tensor).detach() for name, tensor in found.items()}
    return {name: tensor.clone() for name, tensor in local.items() if tensor.numel()}  # with FSDP1 a rank may hold nothing


def _compare(folder: Path, sharded: Any, optimizer: Any) -> dict[str, Any]:
    """What the ranks hold and the checkpoint's tensors; collective."""
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torch.distributed.tensor import DTensor

    from tests.recipes.test_resume import load_whole
    from toolkit.checkpoint.state import state_tensors

    theirs, ours = load_whole(folder / "state"), state_tensors(sharded, optimizer)
    unequal = []
    for name, tensor in ours.items():
        whole = theirs.get(name)
        if whole is None or tensor.shape != whole.shape:
            unequal.append(name)
        elif isinstance(tensor, ShardedTensor):
            for shard in tensor.local_shards():
                meta = shard.metadata
                part = whole[tuple(slice(o, o + n) for o, n in zip(meta.shard_offsets, meta.shard_sizes, strict=True))]
                unequal += [] if torch.equal(part, shard.tensor) else [name]
        elif not torch.equal(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor, whole):
            unequal.append(name)
    missing = sorted(theirs.keys() - ours.keys())
    num_moments = sum(name.startswith("optimizer.") for name in ours)
    return {"unequal": unequal, "missing": missing, "num_weights": len(ours) - num_moments, "num_moments": num_moments}


FAULTS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        signal_in_phase, signal_in_generation, signal_in_save, signals_until_the_end, wait_for_signal, tell_saves,
        bad_loss, bad_gradient, spike, watch_updates, check_loaded, remove, umask, no_capabilities,
        kill_tokenizing_process, tell_finalization, no_export,
    )
}  # fmt: skip


def main() -> None:
    """What each rank does."""
    faults, recipe, *flags = sys.argv[1:]
    # A rank of `tests.support.launch` has the start method of its server; the loader workers of a real one are its forks.
    multiprocessing.set_start_method("fork", force=True)
    for name, settings in json.loads(faults):
        FAULTS[name](**settings)
    sys.argv = [f"{recipe}.py", *flags]
    runpy.run_path(str(RECIPES / f"{recipe}.py"), run_name="__main__")


if __name__ == "__main__":
    main()
