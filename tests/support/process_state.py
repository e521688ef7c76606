"""What a program may have set in its process and in libraries, and finds as it was after a run."""

import logging
import os
import random
import signal
import sys
import warnings

import datasets
import huggingface_hub.utils
import numpy as np
import torch
import torch.distributed as dist
from transformers.utils import logging as of_transformers

from toolkit.errors import SIGNALS


def state_of_the_process() -> dict:
    backends = torch.backends
    c10d = dist.distributed_c10d
    log = logging.getLogger("toolkit")
    return {
        "environment": dict(os.environ),
        "outputs": (sys.stdout, sys.stderr),
        "log": (log.level, log.propagate, [*log.handlers], [*log.filters]),
        "warnings": [*warnings.filters],
        "bars of transformers": of_transformers.is_progress_bar_enabled(),
        "bars of the hub": huggingface_hub.utils.are_progress_bars_disabled(),
        "bars of datasets": datasets.are_progress_bars_disabled(),
        "random state": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
        "threads": torch.get_num_threads(),
        "fp32 on CUDA": backends.cuda.matmul.fp32_precision,
        "fp32 on a CPU": backends.mkldnn.matmul.fp32_precision,
        "fp32 of cuDNN": (backends.cudnn.conv.fp32_precision, backends.cudnn.rnn.fp32_precision),
        "timeouts": (c10d.default_pg_timeout, c10d.default_pg_nccl_timeout),
        "signal handlers": [signal.getsignal(number) for number in SIGNALS],
        "hook of errors": sys.excepthook,
    }


def changes_since(before: dict) -> dict[str, tuple[str, str]]:
    """What differs from an earlier `state_of_the_process`, and how."""
    return {name: (repr(before[name]), repr(now)) for name, now in state_of_the_process().items() if now != before[name]}
