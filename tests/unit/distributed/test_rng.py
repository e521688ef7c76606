"""What ranks agree on: errors, and signals, known to all one step boundary later. What is done within `random_state_kept` leaves
every generator as it was, and a checkpoint gives each rank its own back. How a run's devices are described; the cores that a
process may use, and the threads of a rank for work on the host."""

import contextlib
import math
import os
import pickle
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.support.launch import run_on_ranks
from toolkit.distributed import comm, device, rng
from toolkit.distributed.comm import on_all_ranks
from toolkit.distributed.rng import random_state_kept
from toolkit.distributed.signals import Agreement, StopRequests
from toolkit.errors import SIGNALS, UserError
from toolkit.launch import accelerator
from toolkit.launch.accelerator import _num_threads
from toolkit.launch.process_state import process_state_kept
from toolkit.models.safetensors_index import ShardedReadUnsupported


def test_ranks_agree_on_the_first_error_with_its_class_unless_only_one_of_them_has_it(monkeypatch):
    """A user's file of rows, and a class in it, is loaded on one rank of a machine."""

    class OfTheirs(UserError):
        pass

    def gather(value) -> list:
        return [None, pickle.loads(pickle.dumps(value)), UserError("b is 4")]

    monkeypatch.setattr(comm, "gather_objects", gather)
    of_ours = ShardedReadUnsupported("it is quantized", "rank")
    for error, kind in ((OfTheirs("row 3 has no title"), UserError), (of_ours, ShardedReadUnsupported)):
        with pytest.raises(UserError, match=f"^{error}$") as raised:
            on_all_ranks(Mock(side_effect=error))
        assert type(raised.value) is kind and raised.value.printed_by == "run"


def draw() -> list[float]:
    """From every generator."""
    return [random.random(), np.random.random(), torch.rand(()).item()]


def test_draws_within_are_not_seen_after_it_however_it_ends():
    for ends_by in (None, ValueError):
        random.seed(1), np.random.seed(2), torch.manual_seed(3)
        expected = draw()
        random.seed(1), np.random.seed(2), torch.manual_seed(3)
        with contextlib.suppress(ValueError), random_state_kept():
            assert draw() == expected
            if ends_by is not None:
                raise ends_by
        assert draw() == expected


def test_a_seed_reaches_every_generator_and_gpu_and_writes_no_stack_for_devices_that_are_not_there(monkeypatch):
    drawn, seeds = [], []
    with monkeypatch.context() as patch:
        patch.setattr("traceback.format_stack", lambda *_: pytest.fail("a call for a device was put off"))
        for number in (1, 1, 2):
            rng.seed_all("step", number)
            drawn.append(draw())
    assert drawn[0] == drawn[1] and all(one != other for one, other in zip(*drawn[1:], strict=True))
    torch.manual_seed(rng.derive_seed("step", 1))
    assert torch.rand(()).item() == drawn[0][-1], "torch's is that of its manual_seed"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    rng.seed_all("step", 1)
    assert seeds == [rng.derive_seed("step", 1)]


def test_each_rank_gets_its_own_state_back(tmp_path, monkeypatch):
    monkeypatch.setattr(rng, "world_size", lambda: 2)
    monkeypatch.setattr(rng, "on_all_ranks", lambda work: work())
    drawn = []
    for work in (lambda: rng.save_random_state(rng.capture_random_state(), tmp_path), lambda: rng.load_random_state(tmp_path, 2)):
        for rank in (0, 1):
            monkeypatch.setattr(rng, "rank", lambda rank=rank: rank)
            rng.seed_all("before the save" if len(drawn) < 2 else "after it", rank)
            draw()  # a state in the middle of what a seed gives
            work()
            drawn.append(draw())
    assert drawn[2:] == drawn[:2] and drawn[0] != drawn[1]


NOTHING = Agreement(None, False)


@pytest.fixture
def terminal() -> None:
    """As started in a terminal, whatever has started the tests; `own_signals` puts it back."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_is_agreed_on_one_boundary_later_and_handlers_are_put_back(number, terminal):
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopRequests() as stops:
        assert all(signal.getsignal(number) not in before for number in SIGNALS)
        assert stops.agree() == NOTHING
        signal.raise_signal(number)
        assert stops.agree() == NOTHING, "read before it was exchanged: the ranks would not have had time to answer"
        assert stops.agree() == Agreement(number.name, False)
        assert stops.agree() == Agreement(number.name, False), "forgotten"
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_rank_that_nohup_started_survives_its_terminal_and_a_second_signal_only_changes_the_name(terminal):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequests() as stops:
        signal.raise_signal(signal.SIGHUP)
        stops.agree(write_failed=True)
        assert stops.agree() == Agreement(None, True), "no signal, and a save that has failed"
        assert stops.agree() == NOTHING, "which is reported once"
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        stops.agree()
        assert stops.agree() == Agreement("SIGTERM", False)


def test_beside_the_main_thread_no_handler_is_set(terminal):
    """Python allows it nowhere else; training in a thread goes on without."""
    before = [signal.getsignal(number) for number in SIGNALS]

    def train() -> list[Agreement]:
        with StopRequests() as stops:
            return [stops.agree(), stops.agree()]

    with ThreadPoolExecutor() as threads:
        assert threads.submit(train).result() == [NOTHING, NOTHING]
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_ranks_agree_at_the_same_boundary(terminal):
    first, second = run_on_ranks(agree_often, preset="ddp_cpu", overrides={"mixed_precision": "no"})
    assert first == second
    names = [agreement.signal_name for agreement in first]
    # Sent between the boundaries 2 and 3: exchanged at 3, read at 4.
    assert names == [None] * 4 + ["SIGUSR1"] * 2 + ["SIGTERM"] * 3 or names == [None] * 4 + ["SIGUSR1"] * 5
    assert [agreement.write_failed for agreement in first] == [False] * 7 + [True, False]
    assert [agreement.differ for agreement in first] == [False] * 3 + [True] + [False] * 5


def agree_often() -> list[Agreement]:
    """Nine boundaries: each rank gets another signal before another one, one's save fails, another's fingerprint differs once."""
    accelerator.build_accelerator()
    agreements, rank = [], comm.rank()
    with StopRequests() as stops:
        for boundary in range(9):
            now = rank, boundary
            if now in ((1, 3), (0, 5)):
                signal.raise_signal(signal.SIGUSR1 if rank == 1 else signal.SIGTERM)
            agreements.append(stops.agree(write_failed=now == (0, 6), fingerprint=2**63 - 1 - (now == (1, 2))))
        stops.agree()  # its own collective is read too: none is under way when the group ends
        stops._read()
    return agreements


GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def test_ranks_say_what_they_compute_on_know_the_smallest_gpu_and_refuse_to_share_one(monkeypatch):
    """accelerate gives rank 2 the GPU of rank 0 where there are two, and nccl fails later with words about the network."""
    gpu = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=85_045_870_592, uuid="GPU-0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(device, "available_cores", lambda: 12)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)

    def gathered(*others: object) -> None:
        monkeypatch.setattr(device, "gather_objects", lambda own: [own, *others])

    gathered(("another (1.0 GiB)", 1), ("NVIDIA H100 80GB HBM3 (79.2 GiB)", 3))
    assert device.describe_device(GPU) == (
        "2 processes, each on NVIDIA H100 80GB HBM3 (79.2 GiB) with 3 threads; 1 process on another (1.0 GiB) with 1 thread"
    )
    gathered()
    assert device.describe_device(CPU) == "1 process on the CPU (12 cores) with 3 threads"
    assert device.smallest_gpu_bytes(CPU) is None
    gathered(40 * 2**30)
    assert device.smallest_gpu_bytes(GPU) == 40 * 2**30
    gathered("GPU-1")
    device.check_own_gpu(GPU)
    gathered("GPU-1", "GPU-0", "GPU-1")
    with pytest.raises(UserError, match="4 processes share 2 GPUs, and each needs one of its own: set num_processes to 2"):
        device.check_own_gpu(GPU)


@pytest.mark.parametrize(
    ("own", "files", "quota", "cores"),
    [
        ("0::/", {"cpu.max": "max 100000"}, math.inf, 12),
        ("0::/", {"cpu.max": "250000 100000"}, 2.5, 3),
        ("0::/", {"cpu.max": "10000 100000"}, 0.1, 1),
        ("0::/job/task", {"job/cpu.max": "400000 100000", "job/task/cpu.max": "max 100000"}, 4.0, 4),
        ("0::/gone", {"cpu.max": "100000 100000"}, 1.0, 1),
        ("3:memory:/job", {}, math.inf, 12),
    ],
)
def test_affinity_and_the_smallest_quota_of_the_groups_around_limit_the_cores(tmp_path, monkeypatch, own, files, quota, cores):
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(f"{text}\n")
    (tmp_path / "own").write_text(f"{own}\n")
    assert device._cpu_quota_cores(tmp_path / "root", tmp_path / "own") == quota
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.setattr(device, "_cpu_quota_cores", lambda: quota)
    assert device.available_cores() == cores


MINE = {0, 1, 2}


@pytest.mark.parametrize(
    ("device", "own_cores", "ranks", "num_threads"),
    [
        (GPU, set(range(12)), [(node, set(range(12))) for node in (0, 0, 0, 0, 1, 1, 1, 1)], 3),  # they share their node's
        (GPU, MINE, [(0, MINE), (0, {3, 4, 5}), (0, {6, 7, 8}), (0, {9, 10, 11}), (1, MINE)], 3),  # each is bound to its own
        (CPU, set(range(12)), [], 1),  # a rehearsal keeps the launcher's number
    ],
)
def test_ranks_with_gpus_share_the_cores_of_their_node(monkeypatch, device, own_cores, ranks, num_threads):
    """On a machine of 12 cores, as `accelerate launch` starts 4 ranks."""
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "4"})
    monkeypatch.setattr("toolkit.distributed.device._cpu_quota_cores", lambda: 12.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: own_cores)
    monkeypatch.setattr(accelerator, "gather_objects", lambda _: ranks)
    assert _num_threads(device) == num_threads


def test_the_setting_overrides_the_launcher(monkeypatch):
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"})
    monkeypatch.setattr("toolkit.launch.environment.find_accelerate_yaml", lambda: None)
    with process_state_kept():
        accelerator.build_accelerator(num_threads=3)
        assert torch.get_num_threads() == 3
