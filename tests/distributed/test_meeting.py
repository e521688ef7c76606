"""Ranks that no launcher has started: they meet at `env://`, `tcp://` and `file://`, or each ends with one sentence in time."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

from tests.support.launch import REPOSITORY, LaunchResult, launch, start
from tests.support.ports import free_port
from tests.support.refusals import refusal
from tests.support.workbench import FP32, RECIPE, new_bench
from toolkit.errors import EXIT_USER_ERROR
from toolkit.tools import forks

TIMEOUT_S = 3
LIMIT_S = 200.0
"""Of a launch: less than the 300 s that torch waits by itself, should a wait not follow the run's timeout."""

WITHOUT_LAUNCHER = """
import json, os, runpy, sys

rank, changes = os.environ["RANK"], json.loads(sys.argv[1])
for name in list(os.environ):
    if name.split("_")[0] in ("ACCELERATE", "FSDP", "MASTER", "LOCAL"):
        del os.environ[name]
os.environ.update(changes["all"] | changes.get(rank, {}))
if "ABSENT" in os.environ:
    sys.exit(0)
if len(sys.argv) > 2:
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit(0)
from toolkit.errors import exit_on_user_error
with exit_on_user_error():
    from toolkit.launch.accelerator import build_accelerator
    if "GLOO_FAILS_LATER" in os.environ:
        import torch.distributed as dist
        init = dist.init_process_group
        def init_and_lose_the_network(*args, **options):
            init(*args, **options)
            os.environ["GLOO_SOCKET_IFNAME"] = "no-such-device"
        dist.init_process_group = init_and_lose_the_network
    build_accelerator(timeout_s=float(os.environ["TIMEOUT_S"]))
import torch, torch.distributed as dist
total = torch.ones(())
dist.all_reduce(total)
print(f"{int(total)} ranks are connected, local rank {os.environ['LOCAL_RANK']}")
"""
"""First argument: environment variables for all ranks and for single ones. Then: a recipe and its flags, else they only meet."""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("meeting") / "without_launcher.py"
    path.write_text(WITHOUT_LAUNCHER)
    return path


def at_env() -> dict[str, str]:
    return {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}


def meet(script: Path, variables: dict[str, str], *, num_processes: int = 2, **of_ranks: dict[str, str]) -> LaunchResult:
    """How ranks end that meet where `variables` say; `of_ranks` differ, as in `rank1={"WORLD_SIZE": "3"}`."""
    changes = {"all": {"TIMEOUT_S": str(TIMEOUT_S), **variables}, **{name[4:]: more for name, more in of_ranks.items()}}
    with (
        patch.object(forks, "PEER_GRACE_S", 60.0),  # nobody ends a rank that another one has left
        start(script, [json.dumps(changes)], preset="fsdp2_cpu", num_processes=num_processes) as running,
    ):
        return running.wait(LIMIT_S)


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
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in [name for name in os.environ if name.split("_")[0] in ("ACCELERATE", "FSDP", "MASTER", "LOCAL")]:
        del os.environ[name]


def test_they_meet_at_tcp(script: Path) -> None:
    result = meet(script, {"TOOLKIT_INIT_METHOD": f"tcp://127.0.0.1:{free_port()}"}, num_processes=3)
    assert result.returncodes == [0, 0, 0], result.stderr
    assert all(f"3 ranks are connected, local rank {rank}" in result.stdout for rank in range(3))


def test_they_meet_at_a_file_also_at_one_that_a_crash_has_left(script: Path, tmp_path: Path) -> None:
    where = {"TOOLKIT_INIT_METHOD": f"file://{tmp_path}/meeting"}
    check_refused(meet(script, where, rank1={"ABSENT": "1"}), "only 1 of 2 ranks came to file://", absent=(1,))
    assert (tmp_path / "meeting").stat().st_size > 0
    for _ in range(2):
        result = meet(script, where)
        assert result.returncodes == [0, 0], result.stderr
        assert result.stdout.count("2 ranks are connected") == 2


def test_a_missing_peer_is_named_by_all_who_came(script: Path) -> None:
    where = f"tcp://127.0.0.1:{free_port()}"
    result = meet(script, {"TOOLKIT_INIT_METHOD": where}, num_processes=3, rank2={"ABSENT": "1"})
    sentence = f"only 2 of 3 ranks came to {where} within 3 s (run.timeout_s), missing: 2; check that each was started with"
    check_refused(result, sentence, sentence, absent=(2,))


def test_without_rank_0_nobody_listens(script: Path, tmp_path: Path) -> None:
    result = meet(script, at_env(), rank0={"ABSENT": "1"})
    check_refused(result, "rank 1 of 2 found nobody at tcp://localhost:", absent=(0,))
    assert "Connection refused; check that this is the address of rank 0's machine" in result.stderr
    result = meet(script, {"TOOLKIT_INIT_METHOD": f"file://{tmp_path}/meeting"}, rank0={"ABSENT": "1"})
    check_refused(result, "rank 0 did not answer rank 1 of 2 at file://", absent=(0,))


def test_a_wrong_address_is_reported_by_both_sides(script: Path) -> None:
    port = free_port()
    result = meet(script, at_env() | {"MASTER_PORT": str(port)}, rank1={"MASTER_ADDR": "no-such-host.invalid"})
    missing = f"only 1 of 2 ranks came to tcp://localhost:{port} within 3 s (run.timeout_s), missing: 1"
    check_refused(result, missing, f"rank 1 of 2 found nobody at tcp://no-such-host.invalid:{port} within 3 s")


def test_another_world_size_is_reported_at_once(script: Path) -> None:
    result = meet(
        script,
        at_env() | {"TIMEOUT_S": "40", "TOOLKIT_ACCELERATE_YAML": "", "ACCELERATE_USE_CPU": "true"},
        rank1={"WORLD_SIZE": "3"},
    )
    check_refused(result, *["rank 1 was started with WORLD_SIZE 3, rank 0 with 2: give all the same"] * 2)


def test_a_port_in_use_is_reported_by_rank_0_and_no_answer_by_the_other(script: Path) -> None:
    """The port of a service that takes the connection and says nothing."""
    with socket.create_server(("", 0)) as service:
        where = {"TOOLKIT_INIT_METHOD": f"tcp://127.0.0.1:{service.getsockname()[1]}"}
        result = meet(script, where)
    in_use = "rank 0 cannot listen on port"
    check_refused(result, in_use, f"rank 1 of 2 got no answer at {where['TOOLKIT_INIT_METHOD']} within 3 s (run.timeout_s)")
    assert "Address already in use" in result.stderr and "two of its processes have RANK 0" in result.stderr


def test_ranks_that_met_but_have_no_way_to_each_other(script: Path) -> None:
    result = meet(script, at_env() | {"GLOO_SOCKET_IFNAME": "no-such-device"})
    check_refused(result, *["the ranks have met, but cannot connect to each other ("] * 2)
    assert result.stderr.count("no-such-device): name the network device between the machines in GLOO_SOCKET_IFNAME") == 2
    # gloo beside another backend: as under nccl, which connects only at its first use.
    result = meet(script, at_env() | {"GLOO_FAILS_LATER": "1"})
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
def test_wrong_variables_are_reported_before_anybody_waits(variables: dict[str, str], sentence: str) -> None:
    from toolkit.launch.accelerator import build_accelerator

    preset = REPOSITORY / "accelerate_configs" / "fsdp2_cpu.yaml"
    os.environ.update({"RANK": "1", "WORLD_SIZE": "2", "TOOLKIT_ACCELERATE_YAML": str(preset), **variables})
    assert sentence in refusal(build_accelerator, timeout_s=60)


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("world_size", ["three", "3", "0"])
def test_ranks_that_machines_cannot_share_are_refused(tmp_path: Path, world_size: str) -> None:
    from toolkit.launch.accelerator import build_accelerator

    mapping = yaml.safe_load((REPOSITORY / "accelerate_configs" / "ddp_cpu.yaml").read_text())
    del mapping["num_processes"]
    preset = tmp_path / "two_machines.yaml"
    preset.write_text(yaml.safe_dump(mapping | {"num_machines": 2, "main_process_ip": "127.0.0.1", "main_process_port": 29500}))
    os.environ.update({"RANK": "0", "WORLD_SIZE": world_size, "TOOLKIT_ACCELERATE_YAML": str(preset)})
    sentence = f"WORLD_SIZE is {world_size}, but the num_machines of {preset} is 2: start equally many"
    assert sentence in refusal(build_accelerator, timeout_s=60)


def test_under_a_launcher_another_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from toolkit.distributed.rendezvous import rendezvous_arguments
    from toolkit.errors import UserError

    given = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True", "TOOLKIT_INIT_METHOD": "tcp://a:1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="TOOLKIT_INIT_METHOD is tcp://a:1, but these ranks meet in the store of their launcher"):
        rendezvous_arguments(5)


def test_a_recipe_without_a_launcher_runs_as_with_one(script: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """As `srun python recipes/t5.py` would start it."""
    bench, figures = new_bench(tmp_path_factory, "meeting"), {}
    for name, what in (("launched", (RECIPE, [])), ("by_hand", (script, [json.dumps({"all": at_env()}), str(RECIPE)]))):
        result = launch(what[0], [*what[1], *bench.flags(name, eval__generate=False)], preset="fsdp2_cpu", overrides=FP32)
        assert not any(result.returncodes), result.stderr[-4000:]
        figures[name] = [(line["loss"], line["grad_norm"]) for line in bench.lines(name, "train")]
        assert ": 2 processes x " in result.stdout
    assert figures["launched"] == figures["by_hand"] and len(figures["by_hand"]) == 3
