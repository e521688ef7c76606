"""Ranks that no launcher has started: they meet at `env://`, `tcp://` and `file://`, or each ends with one sentence in time."""

import os
import socket
from unittest.mock import patch

import pytest
import torch
import yaml

from tests.support.launch import REPOSITORY, LaunchResult, start_on_ranks
from tests.support.ports import free_port
from tests.support.refusals import refusal
from tests.support.small_run import run_in_this_process
from tests.support.workbench import FP32
from toolkit.errors import EXIT_USER_ERROR, exit_on_user_error
from toolkit.tools import forks

TIMEOUT_S = 3
LIMIT_S = 200.0
"""Of a launch: less than the 300 s that torch waits by itself, should a wait not follow the run's timeout."""

Variables = dict[str, str]


def at_env() -> Variables:
    return {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}


def meet(variables: Variables, *, num_processes: int = 2, **of_ranks: Variables) -> LaunchResult:
    """How ranks end that meet where `variables` say; `of_ranks` differ, as in `rank1={"WORLD_SIZE": "3"}`."""
    args = ({"TIMEOUT_S": str(TIMEOUT_S), **variables}, of_ranks)
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


def check_refused(result: LaunchResult, *sentences: str, absent: tuple[int, ...] = ()) -> None:
    """Each rank that came printed its sentence, and nothing else."""
    assert "Traceback" not in result.stderr
    said = [line.removeprefix("error: ") for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == len(sentences), result.stderr
    for line, sentence in zip(said, sentences, strict=True):
        assert sentence in line, line
    codes = [0 if rank in absent else EXIT_USER_ERROR for rank in range(len(result.returncodes))]
    assert result.returncodes == codes, result.stderr


@pytest.fixture
def no_launch(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    forget_launcher()


def test_they_meet_at_tcp():
    result = meet({"TOOLKIT_INIT_METHOD": f"tcp://127.0.0.1:{free_port()}"}, num_processes=3)
    assert result.returncodes == [0, 0, 0], result.stderr
    assert all(f"3 ranks are connected, local rank {rank}" in result.stdout for rank in range(3))


def test_they_meet_at_a_file_also_at_one_that_a_crash_has_left(tmp_path):
    where = {"TOOLKIT_INIT_METHOD": f"file://{tmp_path}/meeting"}
    check_refused(meet(where, rank1={"ABSENT": "1"}), "only 1 of 2 ranks came to file://", absent=(1,))
    assert (tmp_path / "meeting").stat().st_size > 0
    for _ in range(2):
        result = meet(where)
        assert result.returncodes == [0, 0], result.stderr
        assert result.stdout.count("2 ranks are connected") == 2


def test_a_missing_peer_is_named_by_all_who_came():
    where = f"tcp://127.0.0.1:{free_port()}"
    result = meet({"TOOLKIT_INIT_METHOD": where}, num_processes=3, rank2={"ABSENT": "1"})
    sentence = f"only 2 of 3 ranks came to {where} within 3 s (run.timeout_s), missing: 2; check that each was started with"
    check_refused(result, sentence, sentence, absent=(2,))


def test_without_rank_0_nobody_listens(tmp_path):
    result = meet(at_env(), rank0={"ABSENT": "1"})
    check_refused(result, "rank 1 of 2 found nobody at tcp://localhost:", absent=(0,))
    assert "Connection refused; check that this is the address of rank 0's machine" in result.stderr
    result = meet({"TOOLKIT_INIT_METHOD": f"file://{tmp_path}/meeting"}, rank0={"ABSENT": "1"})
    check_refused(result, "rank 0 did not answer rank 1 of 2 at file://", absent=(0,))


def test_a_wrong_address_is_reported_by_both_sides():
    port = free_port()
    result = meet(at_env() | {"MASTER_PORT": str(port)}, rank1={"MASTER_ADDR": "no-such-host.invalid"})
    missing = f"only 1 of 2 ranks came to tcp://localhost:{port} within 3 s (run.timeout_s), missing: 1"
    check_refused(result, missing, f"rank 1 of 2 found nobody at tcp://no-such-host.invalid:{port} within 3 s")


def test_another_world_size_is_reported_at_once():
    result = meet(
        at_env() | {"TIMEOUT_S": "40", "TOOLKIT_ACCELERATE_YAML": "", "ACCELERATE_USE_CPU": "true"},
        rank1={"WORLD_SIZE": "3"},
    )
    check_refused(result, *["rank 1 was started with WORLD_SIZE 3, rank 0 with 2: give all the same"] * 2)


def test_a_port_in_use_is_reported_by_rank_0_and_no_answer_by_the_other():
    """The port of a service that takes the connection and says nothing."""
    with socket.create_server(("", 0)) as service:
        where = {"TOOLKIT_INIT_METHOD": f"tcp://127.0.0.1:{service.getsockname()[1]}"}
        result = meet(where)
    in_use = "rank 0 cannot listen on port"
    check_refused(result, in_use, f"rank 1 of 2 got no answer at {where['TOOLKIT_INIT_METHOD']} within 3 s (run.timeout_s)")
    assert "Address already in use" in result.stderr and "two of its processes have RANK 0" in result.stderr


def test_ranks_that_met_but_have_no_way_to_each_other():
    result = meet(at_env() | {"GLOO_SOCKET_IFNAME": "no-such-device"})
    check_refused(result, *["the ranks have met, but cannot connect to each other ("] * 2)
    assert result.stderr.count("no-such-device): name the network device between the machines in GLOO_SOCKET_IFNAME") == 2
    # gloo beside another backend: as under nccl, which connects only at its first use.
    result = meet(at_env() | {"GLOO_FAILS_LATER": "1"})
    check_refused(result, *["the ranks have met, but cannot connect to each other ("] * 2)


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
        ({"RANK": "2"}, "RANK is 2, but WORLD_SIZE is 2: ranks go from 0 to 1"),
        ({"RANK": "one"}, "RANK is 'one': every rank needs RANK (from 0) and WORLD_SIZE"),
        ({"WORLD_SIZE": "4"}, "fsdp2_cpu.yaml: num_processes is 2, but WORLD_SIZE is 4: start so many, each with its RANK"),
    ],
)
@pytest.mark.usefixtures("no_launch")
def test_wrong_variables_are_reported_before_anybody_waits(variables, sentence):
    from toolkit.launch.accelerator import build_accelerator

    preset = REPOSITORY / "accelerate_configs" / "fsdp2_cpu.yaml"
    os.environ.update({"RANK": "1", "WORLD_SIZE": "2", "TOOLKIT_ACCELERATE_YAML": str(preset), **variables})
    assert sentence in refusal(build_accelerator, timeout_s=60)


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("world_size", ["three", "3", "0"])
def test_ranks_that_machines_cannot_share_are_refused(tmp_path, world_size):
    from toolkit.launch.accelerator import build_accelerator

    mapping = yaml.safe_load((REPOSITORY / "accelerate_configs" / "ddp_cpu.yaml").read_text())
    del mapping["num_processes"]
    preset = tmp_path / "two_machines.yaml"
    preset.write_text(yaml.safe_dump(mapping | {"num_machines": 2, "main_process_ip": "127.0.0.1", "main_process_port": 29500}))
    os.environ.update({"RANK": "0", "WORLD_SIZE": world_size, "TOOLKIT_ACCELERATE_YAML": str(preset)})
    sentence = f"WORLD_SIZE is {world_size}, but the num_machines of {preset} is 2: start equally many"
    assert sentence in refusal(build_accelerator, timeout_s=60)


def test_under_a_launcher_another_place_is_refused(monkeypatch):
    from toolkit.distributed.rendezvous import rendezvous_arguments
    from toolkit.errors import UserError

    given = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True", "TOOLKIT_INIT_METHOD": "tcp://a:1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="TOOLKIT_INIT_METHOD is tcp://a:1, but these ranks meet in the store of their launcher"):
        rendezvous_arguments(5)


def test_a_recipe_without_a_launcher_runs_as_with_one(bench):
    """As `srun python recipes/t5.py` would start it."""
    launched = bench.run("launched", eval__generate=False)
    args = (at_env(), bench.flags("by_hand", eval__generate=False))
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
