"""Asynchronous checkpoints: shards are staged in host memory, and a thread writes them while training continues.

    training   step 20 | step 21: forward, backward | update | step 22 | …
    device             | copy beside them           |
    thread                         wait for the copy | write, hash, fsync | gather | manifest, rename | prune |

On a GPU the copy runs beside step 21, whose update waits for it on the device. On a CPU it is made before step 21.
At most one save runs at a time. The thread's collectives use a gloo group of their own. A failure reaches the training thread
of every rank at the second step boundary after it, through `StopRequests.agree`, or through `finish`.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from toolkit.checkpoint.dcp import Tensors, save_tensors
from toolkit.checkpoint.find import BestMetric, prune
from toolkit.checkpoint.manifest import commit, step_folder
from toolkit.checkpoint.state import Identity, TrainState, state_tensors
from toolkit.config.schema import CheckpointConfig
from toolkit.distributed.comm import build_group, gather_objects, raise_together, rank, world_size
from toolkit.distributed.rng import capture_random_state, save_random_state
from toolkit.distributed.watchdog import enter_phase
from toolkit.errors import Stopped, UserError, refused
from toolkit.files.durable import describe_files, fsync_path
from toolkit.launch.rank_consistency import installed_versions
from toolkit.parallel.wrap import ShardedModel
from toolkit.private import private


class HostCopier:
    """Stages this rank's shards in host memory (pinned if on CUDA), which the first copy allocates and later ones reuse.

    The first copy, and under FSDP1 every one, is complete when `copy` returns. On CUDA later ones run on a stream of their own,
    beside the next forward and backward, which only read what is copied (torchtitan/trainer.py waits before its update, too).
    """

    def __init__(self, device: torch.device) -> None:
        self.device, on_cuda = device, device.type == "cuda"
        self.staged: Tensors = {}
        options = StagingOptions(
            use_pinned_memory=on_cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_cuda
        )
        self.stager = DefaultStager(options)
        self.stream = torch.Stream(device) if on_cuda else None
        self.copied: torch.Event | None = None

    def copy(self, tensors: Tensors) -> Tensors:
        """Copies with the same placements; complete after `wait`, and valid until the next call."""
        # torch's stager does not support FSDP1's ShardedTensors; its older one does, but allocates each time.
        fsdp1 = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, private("ShardedTensor"))}
        others = {name: tensor for name, tensor in tensors.items() if name not in fsdp1}
        if self.staged.keys() != others.keys():
            self.staged = self.stager.stage(others)  # type: ignore[assignment]
        else:  # the stager would build every DTensor again, which takes half as long as the copy on a CPU
            if self.stream is not None:
                self.stream.wait_stream(torch.accelerator.current_stream(self.device))
            with torch.no_grad(), self.stream or contextlib.nullcontext():
                for name, tensor in others.items():
                    mine, copy = (t.to_local() if isinstance(t, DTensor) else t for t in (tensor, self.staged[name]))
                    copy.copy_(mine, non_blocking=True)
            self.copied = None if self.stream is None else self.stream.record_event()
        return {**self.staged, **BlockingAsyncStager().stage(fsdp1)}  # type: ignore[dict-item]

    def make_device_wait(self) -> None:
        """Let what the device is given from now on wait for the last copy."""
        if self.copied is not None:
            torch.accelerator.current_stream(self.device).wait_event(self.copied)

    def wait(self) -> None:
        """Let the host wait for the last copy."""
        if self.copied is not None:
            self.copied.synchronize()

    def close(self) -> None:
        """Free the host memory."""
        self.wait()
        self.staged = {}
        self.stager.close()


PATIENCE_S = 10.0
"""How long a rank that fails alone waits for its running save; gloo notices a dead peer at once."""


@dataclass
class Save:
    """One save."""

    step: int
    blocking_s: float = 0.0
    """Time that training waited for it."""
    write_s: float = 0.0
    num_bytes: int = 0
    """Size of the files of all ranks."""
    remarks: list[str] = field(default_factory=list)
    """Sentences to print: old checkpoints that could not be removed."""
    error: BaseException | None = None


class CheckpointWriter:
    """Writes the checkpoints of a run. Collective: build it, and call every method, on every rank."""

    def __init__(
        self,
        run_folder: Path,
        sharded: ShardedModel,
        optimizer: torch.optim.Optimizer,
        identity: Identity,
        config: CheckpointConfig,
        best_metric: BestMetric,
        best_saved: float | None = None,
    ) -> None:
        """`best_metric` ranks checkpoints for `config.keep_best`; `best_saved` is the best value that a checkpoint has."""
        self.run_folder, self.sharded, self.optimizer = run_folder, sharded, optimizer
        self.identity, self.config = identity, config
        self.best_metric, self.best_saved = best_metric, best_saved
        self.copier = HostCopier(sharded.accelerator.device)
        self.group = build_group()
        self.under_way: Save | None = None
        self.thread: threading.Thread | None = None

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Wait for the running save: without limit if all ranks leave together, else briefly, as a peer may be dead.

        A thread that still runs at interpreter exit would abort the process, and SIGABRT would hide the root cause.
        """
        if self.thread is not None:
            enter_phase("saving", counts_cpu=True)
            self.thread.join(None if isinstance(error, UserError | Stopped) else PATIENCE_S)
        self.copier.close()

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows that the current save has failed. Not a collective."""
        return self.under_way is not None and self.under_way.error is not None

    @property
    def is_writing(self) -> bool:
        """Whether this rank's thread is writing. Not a collective."""
        return self.thread is not None and self.thread.is_alive()

    def is_best(self, state: TrainState) -> bool:
        """Whether `state` was evaluated at its step and is better than all saved checkpoints. Not a collective."""
        value = state.metrics.get(self.best_metric.name)
        return value is not None and self.best_metric.is_better(value, self.best_saved)

    def save(self, state: TrainState, *, wait: bool = False) -> Save | None:
        """Save the run as it is after `state.step`; returns the previous save, unless `take_finished` has returned it already.

        With `wait`, or without `checkpoint.async_save`, the checkpoint is on disk when this returns. Otherwise training may
        continue while a thread writes it. If this save or the previous one could not be written (disk full, folder read-only),
        that is a `UserError` on every rank.
        """
        start_s = time.perf_counter()
        # 1. The previous save must finish first.
        enter_phase("saving", state.step, counts_cpu=True)
        before = self.finish()
        # 2. Stage the shards in host memory, so that later steps do not change them.
        enter_phase("saving", state.step)
        tensors = state_tensors(self.sharded, self.optimizer)
        behind = self.config.async_save and not wait
        if behind:
            tensors = self.copier.copy(tensors)
        manifest = {
            "step": state.step,
            "world_size": world_size(),
            "versions": installed_versions(),
            "identity": asdict(self.identity),
            "state": state.in_manifest(),
            "metrics": dict(state.metrics),
            "measured_on": self.best_metric.measured_on,
        }
        self.under_way = Save(state.step)
        snapshot = self.under_way, tensors, capture_random_state(), manifest  # which later steps do not change
        if self.is_best(state):
            self.best_saved = state.metrics[self.best_metric.name]
        # 3. Write, in a thread or here.
        if behind:
            self.thread = threading.Thread(target=self._write, args=snapshot, name="checkpoint", daemon=True)
            self.thread.start()
        else:
            enter_phase("saving", state.step, counts_cpu=True)
            self._write(*snapshot)
            self._raise_failure()
        self.under_way.blocking_s = time.perf_counter() - start_s
        return before

    def take_finished(self) -> Save | None:
        """The current save, if this rank's thread has finished it without an error; else None. Not a collective."""
        if self.under_way is None or self.is_writing or self.under_way.error is not None:
            return None
        done, self.under_way, self.thread = self.under_way, None, None
        return done

    def finish(self) -> Save | None:
        """Wait for the current save; returns it, unless `take_finished` has returned it already. One that could not be written
        is a `UserError` on every rank."""
        if self.thread is not None:
            self.thread.join()
        self._raise_failure()
        return self.take_finished()

    def _raise_failure(self) -> None:
        error = self.under_way.error if self.under_way else None
        if error is not None and not isinstance(error, UserError):
            raise error
        raise_together(error)

    def _write(self, save: Save, tensors: Tensors, random_state: Tensors, manifest: dict[str, Any]) -> None:
        """Body of the thread; keeps any error for the training thread. The manifest lacks `files`."""
        start_s = time.perf_counter()
        try:
            self.copier.wait()
            self._write_and_commit(save, tensors, random_state, manifest)
        except BaseException as error:
            save.error = error
        save.write_s = time.perf_counter() - start_s

    def _write_and_commit(self, save: Save, tensors: Tensors, random_state: Tensors, manifest: dict[str, Any]) -> None:
        """Start, write, finish, remove old ones: each on all ranks, before the next begins. Collective."""
        folder = step_folder(self.run_folder, save.step)
        unfinished = folder.with_name(f"{folder.name}.tmp")

        def start() -> None:
            if unfinished.is_file():  # somebody else's
                unfinished.unlink()
            shutil.rmtree(unfinished, ignore_errors=True)  # left behind by a crash
            (unfinished / "state").mkdir(parents=True)

        def write() -> dict[str, dict[str, Any]]:
            names = [f"state/{name}" for name in save_tensors(tensors, unfinished / "state", self.group)]
            names.append(save_random_state(random_state, unfinished))
            for name in names:
                fsync_path(unfinished / name)
            return describe_files(unfinished, names)

        def remove() -> list[str]:
            return prune(self.run_folder, self.config.keep_last, self.config.keep_best, self.best_metric, folder)

        try:
            self._together(start, folder, [0])
            files = {name: about for part in self._together(write, folder) for name, about in part.items()}
            self._together(lambda: commit(unfinished, folder, {**manifest, "files": files}), folder, [0])
        except (UserError, RuntimeError):
            if rank() == 0:
                shutil.rmtree(unfinished, ignore_errors=True)  # frees a full disk
            raise
        save.num_bytes = sum(about["bytes"] for about in files.values())
        save.remarks = self._together(remove, folder, [0])[0]

    def _together(self, work: Callable[[], Any], folder: Path, ranks: Sequence[int] | None = None) -> list[Any]:
        """Call `work` on every rank, or on these, and gather the results; if it fails on any, all raise the first one's sentence:
        a `UserError` if a file system refuses, else a `RuntimeError`. Collective."""
        result, failure, error = None, None, None
        try:
            result = work() if ranks is None or rank() in ranks else None
        except BaseException as e:  # any error: if this rank left here, the others would hang
            error = e
            text = " ".join(str(refused(e) or e).split())[:300]
            refuses = isinstance(e, OSError | SafetensorError) or refused(e)
            failure = (UserError, text) if refuses else (RuntimeError, f"{type(e).__name__}: {text}")
        gathered = gather_objects((result, failure), self.group)
        if first := next((failure for _, failure in gathered if failure is not None), None):
            kind, sentence = first
            raise kind(f"checkpoint {folder} could not be written: {sentence}") from error
        return [result for result, _ in gathered]
