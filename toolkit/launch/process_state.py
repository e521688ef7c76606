"""Undoes what a run changes in its process and in libraries, for the program that goes on after it."""

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from toolkit.distributed.rng import random_state_kept
from toolkit.launch.environment import environment_kept
from toolkit.private import private

logger = logging.getLogger("toolkit")


@contextmanager
def process_state_kept() -> Iterator[None]:
    """Put back at the end, also after an error: the environment, outputs, log, warnings, progress bars, random state, threads of
    torch, its precision of fp32 products, the timeouts of its process groups, the setting of its allocator, and, where the groups
    are closed, its hook of uncaught errors, which names the rank."""
    with ExitStack() as undo:
        undo.enter_context(environment_kept())
        undo.enter_context(warnings.catch_warnings())
        undo.enter_context(random_state_kept())
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        undo.callback(logger.setLevel, logger.level)
        undo.callback(setattr, logger, "handlers", [*logger.handlers])
        undo.callback(setattr, logger, "filters", [*logger.filters])
        timeouts = [(dist.distributed_c10d, name) for name in ("default_pg_timeout", "default_pg_nccl_timeout")]
        for place, name in [(sys, "stdout"), (sys, "stderr"), (logger, "propagate"), *timeouts]:
            undo.callback(setattr, place, name, getattr(place, name))
        undo.callback(_precision_of_products())
        if torch.cuda.is_available():
            undo.callback(_set_allocator, private("_accelerator_getAllocatorSettings")())
        hook = sys.excepthook
        undo.callback(lambda: None if dist.is_initialized() else setattr(sys, "excepthook", hook))
        for put_back in _progress_bars():
            undo.callback(put_back)
        yield


def _set_allocator(before: str) -> None:
    if private("_accelerator_getAllocatorSettings")() != before:
        off = [] if "expandable_segments" in before else ["expandable_segments:False"]  # torch's default
        private("_accelerator_setAllocatorSettings")(",".join([*filter(None, [before]), *off]))


def _precision_of_products() -> Callable[[], None]:
    """What puts back the precision of fp32 products as it is now, whichever of torch's two ways has set it."""
    backends: Any = torch.backends
    places = backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv, backends.cudnn.rnn
    before = of_cuda, of_cpu, of_cudnn, _ = [place.fp32_precision for place in places]

    def put_back() -> None:
        # The older way has flags of its own; reading them is an error after the newer one was used.
        torch.set_float32_matmul_precision("medium" if of_cpu == "bf16" else "high" if of_cuda == "tf32" else "highest")
        backends.cudnn.allow_tf32 = of_cudnn == "tf32"
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision

    return put_back


def _progress_bars() -> list[Callable[[], object]]:
    """What puts back libraries' bars as they are now. The last comes first, as transformers switches those of the hub too."""
    import datasets
    import huggingface_hub.utils as hub
    from transformers.utils import logging as transformers

    return [
        hub.disable_progress_bars if hub.are_progress_bars_disabled() else hub.enable_progress_bars,
        datasets.disable_progress_bars if datasets.are_progress_bars_disabled() else datasets.enable_progress_bars,
        transformers.enable_progress_bar if transformers.is_progress_bar_enabled() else transformers.disable_progress_bar,
    ]
