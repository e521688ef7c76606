"""What the operating system refuses one rank, outside of checkpoints: one sentence, and both ranks end with 2."""

from __future__ import annotations

import errno
import os
import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import Fault, attempt_with, check_one_sentence
from tests.faults.workers.faulty_recipe import at_step, refuse, tell, this_rank, this_run, wrap
from tests.support.workbench import Workbench


def refuse_to_open_tokens() -> None:
    """Only by the rank that did not make them."""
    import datasets

    if this_rank() == 1:
        wrap(datasets, "load_from_disk", lambda *_: refuse(errno.EIO))


def refuse_reads_of_weights() -> None:
    """The disk under the model fails after its files were opened."""
    from toolkit.models import safetensors_index

    def fail(*_: Any) -> None:
        refuse(errno.EIO)

    if this_rank() == 1:
        wrap(safetensors_index, "_read_part", fail)


def under_torch_elastic() -> None:
    """Each rank has a folder of the launch, through which it learns that another one has printed its sentence."""
    launch = this_run().with_name(f"{this_run().name}.launch") / "attempt_0"
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(launch / str(this_rank()) / "error.json")
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent.mkdir(parents=True, exist_ok=True)


def no_memory_at_step(step: int) -> None:
    """On one rank, where no rank asks the others how they are."""
    under_torch_elastic()
    if this_rank() == 1:
        at_step(step, no_memory)


def no_memory() -> None:
    tell()
    raise MemoryError


def few_open_files() -> None:
    """No rank can open one more, once they have met in their store."""
    from toolkit.launch import accelerator

    def limit() -> None:
        tell()
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), 4096))

    under_torch_elastic()
    wrap(accelerator, "connecting", limit)


IO = "Input/output error.*; check that disk or network file system, and start the same command again"
REFUSALS: dict[str, tuple[Fault, str]] = {
    "reading weights": (refuse_reads_of_weights, f"the system refuses: {IO}"),
    "opening tokens": (refuse_to_open_tokens, f"the system refuses: {IO}"),
    "memory at step 3": (partial(no_memory_at_step, 3), "the system refuses: Cannot allocate memory; .*"),
    "open files": (
        few_open_files,
        r"the system refuses: Too many open files.*; raise the limit on open files .*",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_one_rank_is_refused_ends_both(faulty_bench: Workbench, name: str) -> None:
    fault, sentence = REFUSALS[name]
    outcome = attempt_with(faulty_bench, f"refused {name}", fault, data__cache_dir=faulty_bench.runs / "cache")
    assert outcome.injected, outcome.stdout
    check_one_sentence(outcome, sentence)
