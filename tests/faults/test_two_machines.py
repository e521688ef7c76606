"""Two machines: network namespaces joined by a cable of their own, in each an `accelerate launch` of the same run.

Nothing but that cable joins them: neither sees the other's loopback device, and there is no name service.
"""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.faults.harness import SCRIPT, arguments
from tests.faults.test_process_ends import LOST
from tests.faults.workers.faulty_recipe import at_step, this_rank
from tests.support.real_launch import accelerate_launch, finish
from tests.support.workbench import FP32, RECIPE, Workbench

ADDRESSES = ("10.213.0.1", "10.213.0.2")
PORT = 29500  # of a namespace, where nobody else is
CHANGES = {"model__dropout": 0, "checkpoint__every_steps": 2, "train__max_steps": 6, "train__micro_batch_size_rows": 2}


@pytest.fixture(scope="module")
def machines() -> Iterator[list[str]]:
    """Names of two namespaces, each with one end of a veth pair called `eth0` and its loopback device up."""
    names = [f"machine{number}-{os.getpid()}" for number in (0, 1)]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("-n", names[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")
    except (OSError, subprocess.CalledProcessError) as error:
        _remove(names)
        reason = getattr(error, "stderr", None) or str(error)
        pytest.skip(f"network namespaces cannot be made here: {reason.strip()}")
    yield names
    _remove(names)


def _remove(names: list[str]) -> None:
    if shutil.which("ip"):
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def test_a_run_that_loses_a_launcher_goes_on_and_is_that_of_one_machine(workbench, machines):
    bench = workbench
    assert ": 2 processes x " in bench.run("whole", **CHANGES)
    argv = arguments(bench, "run", partial(at_step, 3, partial(kill_of, 1, os.getppid)), **CHANGES)
    started = [_start(bench, machine, number, SCRIPT, argv) for number, machine in enumerate(machines)]
    printed = [finish(launcher) for launcher in started]
    assert "stopped by the end of its launcher after step " in printed[0] and "exitcode  : 75" in printed[0], printed[0]
    (stopped_after,) = re.findall(r"end of its launcher after step (\d+)", printed[0])
    # They meet again, read the checkpoint that each wrote its part of, and go on.
    started = [_start(bench, machine, number, RECIPE, bench.flags("run", **CHANGES)) for number, machine in enumerate(machines)]
    printed = [finish(launcher) for launcher in started]
    assert [launcher.returncode for launcher in started] == [0, 0], "\n\n".join(text[-4000:] for text in printed)
    assert ": 2 processes x " in printed[0] and f"after step {stopped_after}\n" in printed[0]
    # As over the same number of processes on one machine.
    whole, run = (bench.lines(name, "train") for name in ("whole", "run"))
    assert [line["step"] for line in run] == [1, 2, 3, 4, 5, 6]
    for figure in ("loss", "grad_norm"):
        assert [line[figure] for line in run] == pytest.approx([line[figure] for line in whole], rel=1e-6)
    evaluations = [[(line["loss"], line["rougeL"]) for line in bench.lines(name, "eval")] for name in ("whole", "run")]
    assert evaluations[1][-1] == pytest.approx(evaluations[0][-1], rel=1e-6)
    exported = [(bench.runs / name / "export" / "model.safetensors").read_bytes() for name in ("whole", "run")]
    assert len(exported[0]) == len(exported[1])


def kill_of(rank: int, process: Callable[[], int]) -> None:
    """A rank, or its launcher."""
    if this_rank() == rank:
        os.kill(process(), signal.SIGKILL)


def test_each_machine_names_a_lost_rank(workbench, machines):
    # On two real machines, no rank sees the processes of the other.
    within = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    argv = arguments(workbench, "run", partial(at_step, 3, partial(kill_of, 3, os.getpid)), **CHANGES)
    started = [_start(workbench, machine, number, SCRIPT, argv, 4, within) for number, machine in enumerate(machines)]
    printed = [finish(launcher) for launcher in started]
    sentence = LOST.format(who="rank 3")
    assert [text.splitlines().count(sentence) for text in printed] == [1, 1], "\n\n".join(printed)


def _start(
    bench: Workbench,
    machine: str,
    number: int,
    script: Path | str,
    argv: Sequence[str],
    num_processes: int = 2,
    within: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """The preset for several machines, on the CPU of one of them."""
    where = {"use_cpu": True, "num_processes": num_processes, "main_process_ip": ADDRESSES[0], "main_process_port": PORT}
    return accelerate_launch(
        script,
        argv,
        folder=bench.runs,
        preset="fsdp2_multi_node",
        overrides=FP32 | where | {"machine_rank": number},
        # gloo takes the address of the host's name, which here is the loopback's, unless a device is named.
        env={"GLOO_SOCKET_IFNAME": "eth0"},
        within=("ip", "netns", "exec", machine, *within),
    )


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
