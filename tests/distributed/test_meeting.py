"""Ranks that no launcher has started: they meet at `env://`, `tcp://` and `file://`, or each ends with one sentence in time."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.support.launch import REPOSITORY, LaunchResult, free_port, start_on_ranks
from tests.support.refusals import refusal
from tests.support.small_run import run_in_this_process
from tests.support.workbench import FP32
from toolkit.errors import EXIT_USER_ERROR, exit_on_user_error
from toolkit.tools import forks

TIMEOUT_S = 3
LIMIT_S = 200.0
"""Of a launch: less than the 300 s that torch waits by itself, should a wait not follow the run's timeout."""

Variables = dict[str, str]
AT_ENV = {"MASTER_ADDR": "localhost", "MASTER_PORT": "{port}"}
AT_TCP = {"TOOLKIT_INIT_METHOD": "tcp://127.0.0.1:{port}"}
AT_FILE = {"TOOLKIT_INIT_METHOD": "file://{folder}/meeting"}
ABSENT = {"ABSENT": "1"}


def meet(folder: Path, variables: Variables, *, num_processes: int = 2, **of_ranks: Variables) -> LaunchResult:
    """How ranks end that meet where `variables` say, at a free port or in a folder; `of_ranks` differ, as in
    `rank1={"WORLD_SIZE": "3"}`."""
    places = {"port": free_port(), "folder": folder}
    filled = {name: value.format(**places) for name, value in variables.items()}
    args = ({"TIMEOUT_S": str(TIMEOUT_S), **filled}, of_ranks)
    with (
        patch.object(forks, "PEER_GRACE_S", 60.0),  # nobody ends a rank that another one has left
        start_on_ranks(come, preset="fsdp2_cpu", num_processes=num_processes, args=args) as running,
    ):
        return running.wait(LIMIT_S)


def come(variables: Variables, of_ranks: dict[str, Variables]) -> None:
    """On a rank, which then is one that no launcher has started."""
    import torch.distributed as dist

    own = of_ranks.get(f"rank{os.environ['RANK']}", {})
    forget_launcher()
    os.environ.update(variables | own)
    if "ABSENT" in os.environ:
        return
    init = dist.init_process_group

    def init_and_lose_the_network(*args, **options) -> None:
        init(*args, **options)
        os.environ["GLOO_SOCKET_IFNAME"] = "no-such-device"

    with exit_on_user_error():
        from toolkit.launch.accelerator import build_accelerator

        if "GLOO_FAILS_LATER" in os.environ:
            dist.init_process_group = init_and_lose_the_network
        build_accelerator(timeout_s=float(os.environ["TIMEOUT_S"]))
    total = torch.ones(())
    dist.all_reduce(total)
    print(f"{int(total)} ranks are connected, local rank {os.environ['LOCAL_RANK']}")


def forget_launcher() -> None:
    for name in [name for name in os.environ if name.split("_")[0] in ("ACCELERATE", "FSDP", "MASTER", "LOCAL")]:
        del os.environ[name]


def check_refused(result: LaunchResult, *sentences: str, absent: Sequence[int] = ()) -> None:
    """Each rank that came printed its sentence, where … is what the system says, and nothing else."""
    assert "Traceback" not in result.stderr
    said = [line.removeprefix("error: ") for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == len(sentences), result.stderr
    for line, sentence in zip(said, sentences, strict=True):
        assert all(part in line for part in sentence.split("…")), line
    codes = [0 if rank in absent else EXIT_USER_ERROR for rank in range(len(result.returncodes))]
    assert result.returncodes == codes, result.stderr


def test_they_meet_at_tcp(tmp_path):
    result = meet(tmp_path, AT_TCP, num_processes=3)
    assert result.returncodes == [0, 0, 0], result.stderr
    assert all(f"3 ranks are connected, local rank {rank}" in result.stdout for rank in range(3))


def test_they_meet_at_a_file_also_at_one_that_a_crash_has_left(tmp_path):
    check_refused(meet(tmp_path, AT_FILE, rank1=ABSENT), "only 1 of 2 ranks came to file://", absent=[1])
    assert (tmp_path / "meeting").stat().st_size > 0
    for _ in range(2):
        result = meet(tmp_path, AT_FILE)
        assert result.returncodes == [0, 0], result.stderr
        assert result.stdout.count("2 ranks are connected") == 2


UNCONNECTED = "the ranks have met, but cannot connect to each other (…"
REFUSED: dict[str, tuple[Variables, dict[str, Variables], list[str]]] = {
    "missing": (
        AT_TCP, {"rank2": ABSENT},
        ["only 2 of 3 ranks came to tcp://127.0.0.1:… within 3 s (run.timeout_s), missing: 2; check that each was started"] * 2,
    ),
    "no-rank-0": (
        AT_ENV, {"rank0": ABSENT},
        ["rank 1 of 2 found nobody at tcp://localhost:…: Connection refused; check that this is the address of rank 0's machine"],
    ),
    "no-rank-0-at-a-file": (AT_FILE, {"rank0": ABSENT}, ["rank 0 did not answer rank 1 of 2 at file://"]),
    "wrong-address": (
        AT_ENV, {"rank1": {"MASTER_ADDR": "no-such-host.invalid"}},
        ["only 1 of 2 ranks came to tcp://localhost:… within 3 s (run.timeout_s), missing: 1",
         "rank 1 of 2 found nobody at tcp://no-such-host.invalid:… within 3 s"],
    ),
    "another-world-size-at-once": (
        AT_ENV | {"TIMEOUT_S": "40", "TOOLKIT_ACCELERATE_YAML": "", "ACCELERATE_USE_CPU": "true"}, {"rank1": {"WORLD_SIZE": "3"}},
        ["rank 1 was started with WORLD_SIZE 3, rank 0 with 2: give all the same"] * 2,
    ),
    "no-way-to-each-other": (
        AT_ENV | {"GLOO_SOCKET_IFNAME": "no-such-device"}, {},
        [f"{UNCONNECTED}no-such-device): name the network device between the machines in GLOO_SOCKET_IFNAME"] * 2,
    ),
    # gloo beside another backend: as under nccl, which connects only at its first use.
    "no-way-at-the-first-use": (AT_ENV | {"GLOO_FAILS_LATER": "1"}, {}, [UNCONNECTED] * 2),
}  # fmt: skip
"""Where the ranks meet, what differs on a rank, and what those that came print, in the order of ranks."""


@pytest.mark.parametrize("case", REFUSED)
def test_ranks_that_do_not_meet_say_so_in_time(tmp_path, case):
    variables, of_ranks, sentences = REFUSED[case]
    absent = [int(rank.removeprefix("rank")) for rank, own in of_ranks.items() if own == ABSENT]
    result = meet(tmp_path, variables, num_processes=3 if absent == [2] else 2, **of_ranks)
    check_refused(result, *sentences, absent=absent)


def test_a_port_in_use_is_reported_by_rank_0_and_no_answer_by_the_other(tmp_path):
    """The port of a service that takes the connection and says nothing."""
    with socket.create_server(("", 0)) as service:
        where = f"tcp://127.0.0.1:{service.getsockname()[1]}"
        result = meet(tmp_path, {"TOOLKIT_INIT_METHOD": where})
    in_use = "rank 0 cannot listen on port …Address already in use…two of its processes have RANK 0"
    check_refused(result, in_use, f"rank 1 of 2 got no answer at {where} within 3 s (run.timeout_s)")


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({}, "MASTER_ADDR is not set: give the address and a free port of rank 0's machine"),
        (
            {"MASTER_ADDR": "localhost", "MASTER_PORT": "many"},
            "the ranks cannot meet at tcp://localhost:many: write tcp://host:port",
        ),
        ({"TOOLKIT_INIT_METHOD": f"tcp://{'a' * 70}:29500"}, "that is not the name of a host"),
        ({"TOOLKIT_INIT_METHOD": "mpi://"}, "the ranks cannot meet at mpi://: write tcp://host:port, file:///path or env://"),
        ({"TOOLKIT_INIT_METHOD": "file://here"}, "TOOLKIT_INIT_METHOD is file://here: write file:///folder/name, in a folder"),
        ({"TOOLKIT_INIT_METHOD": f"file:///{'a' * 300}/name"}, "which cannot be written (File name too long)"),
        (
            {"TOOLKIT_INIT_METHOD": "tcp://a:1", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            "TOOLKIT_INIT_METHOD is tcp://a:1, but these ranks meet in the store of their launcher",
        ),
        ({"RANK": "2"}, "RANK is 2, but WORLD_SIZE is 2: ranks go from 0 to 1"),
        ({"RANK": "one"}, "RANK is 'one': every rank needs RANK (from 0) and WORLD_SIZE"),
        ({"WORLD_SIZE": "4"}, "fsdp2_cpu.yaml: num_processes is 2, but WORLD_SIZE is 4: start so many, each with its RANK"),
        *(
            (
                {"WORLD_SIZE": size, "TOOLKIT_ACCELERATE_YAML": "two_machines.yaml"},
                f"WORLD_SIZE is {size}, but the num_machines of two_machines.yaml is 2: start equally many",
            )
            for size in ("three", "3", "0")
        ),
    ],
)
def test_wrong_variables_are_reported_before_anybody_waits(variables, sentence, tmp_path, monkeypatch):
    from toolkit.launch.accelerator import build_accelerator

    monkeypatch.setattr(os, "environ", os.environ.copy())
    forget_launcher()
    presets = REPOSITORY / "accelerate_configs"
    by_default = {"RANK": "1", "WORLD_SIZE": "2", "TOOLKIT_ACCELERATE_YAML": str(presets / "fsdp2_cpu.yaml")}
    os.environ.update(by_default | variables)
    monkeypatch.chdir(tmp_path)
    two = "num_machines: 2\nmain_process_ip: 127.0.0.1\nmain_process_port: 29500"
    Path("two_machines.yaml").write_text((presets / "ddp_cpu.yaml").read_text().replace("num_processes: 2", two))
    assert sentence in refusal(build_accelerator, timeout_s=60)


def test_a_recipe_without_a_launcher_runs_as_with_one(bench):
    """As `srun python recipes/t5.py` would start it."""
    launched = bench.run("launched", eval__generate=False)
    variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    args = (variables, bench.flags("by_hand", eval__generate=False))
    with start_on_ranks(run_by_hand, preset="fsdp2_cpu", overrides=FP32, args=args) as running:
        by_hand = running.wait()
    assert not any(by_hand.returncodes), by_hand.stderr[-4000:]
    assert ": 2 processes x " in launched and ": 2 processes x " in by_hand.stdout
    figures = [[(line["loss"], line["grad_norm"]) for line in bench.lines(name, "train")] for name in ("launched", "by_hand")]
    assert figures[0] == figures[1] and len(figures[0]) == 3


def run_by_hand(variables: Variables, argv: list[str]) -> None:
    forget_launcher()
    os.environ.update(variables)
    run_in_this_process("t5", argv)
