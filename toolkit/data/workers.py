"""Processes that work ahead: they collate batches, or tokenize rows."""

import atexit
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from toolkit.errors import SIGNALS, UserError
from toolkit.variables import tokenize_in_one_thread


def load_ahead(
    load: Callable[[Any], Any], keys: Iterable[Any], *, num_workers: int, pin_memory: bool = False
) -> Iterator[tuple[Any, Any]]:
    """Yield each key with what `load` makes of it, in order; with `num_workers` above 0, by so many processes ahead of their use.

    A `UserError` of `load` is raised here as it is. A process that is lost is torch's RuntimeError, see `errors.LOADER_WORKER`.
    """
    loader = torch.utils.data.DataLoader(
        _Loaded(load),
        sampler=keys,  # type: ignore[arg-type]  # any iterable of keys works
        batch_size=None,
        num_workers=num_workers,
        worker_init_fn=_prepare_worker,
        multiprocessing_context="fork" if num_workers else None,  # functions of users need not be pickled
        generator=torch.Generator(),  # which gives the workers' seeds in place of the global one
        pin_memory=pin_memory,
        collate_fn=tuple,  # type: ignore[arg-type]  # items are collated where they are read
    )
    loaded = iter(loader)
    if num_workers:
        atexit.register(_end_workers)  # exit functions run last in, first out: before those that wait for the workers
    return map(_raise_errors, loaded)


class _Loaded(torch.utils.data.Dataset):
    """What `load` makes of a key."""

    def __init__(self, load: Callable[[Any], Any]) -> None:
        self.load = load

    def __getitem__(self, key: Any) -> tuple[Any, Any]:
        try:
            return key, self.load(key)
        except UserError as error:  # torch would raise it with the worker's traceback as its text
            return key, error


def _raise_errors(loaded: tuple[Any, Any]) -> tuple[Any, Any]:
    if isinstance(loaded[1], UserError):
        raise loaded[1]
    return loaded


def _prepare_worker(worker: int) -> None:
    """Leave signals to the rank: a terminal signals the whole process group, but workers must live until it has reached a step
    boundary. Send batches through the pipe, by value.

    torch would put each tensor into /dev/shm, of which containers have 64 MiB, and send its file descriptor through a socket in
    TMPDIR, whose path may have 107 characters. A worker that cannot do that only prints so, and its rank waits.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    ForkingPickler.register(torch.Tensor, lambda tensor: (torch.from_numpy, (tensor.numpy(),)))
    tokenize_in_one_thread()


def _end_workers() -> None:
    """At the exit of a rank: multiprocessing ends the workers by SIGTERM, which they ignore, and waits for them for ever.

    Workers are daemons. Other children are the caller's own: multiprocessing waits for them.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises where a worker was killed
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
