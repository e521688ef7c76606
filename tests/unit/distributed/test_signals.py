"""Signals are noted, reported to all ranks at a step boundary, and known to all at the next one."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from tests.support.launch import run_on_ranks
from toolkit.distributed.signals import Agreement, StopRequests
from toolkit.errors import SIGNALS

NOTHING = Agreement(None, False)


@pytest.fixture(autouse=True)
def terminal() -> Iterator[None]:
    """As started in a terminal, whatever has started the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def send(number: int) -> None:
    """To this process; Python handles it before the next line."""
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_is_agreed_on_one_boundary_later_and_handlers_are_put_back(number):
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopRequests() as stops:
        assert all(signal.getsignal(number) not in before for number in SIGNALS)
        assert stops.agree() == NOTHING
        send(number)
        assert stops.agree() == NOTHING, "read before it was exchanged: the ranks would not have had time to answer"
        assert stops.agree() == Agreement(number.name, False)
        assert stops.agree() == Agreement(number.name, False), "forgotten"
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_rank_that_nohup_started_survives_its_terminal_and_a_second_signal_only_changes_the_name():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequests() as stops:
        send(signal.SIGHUP)
        stops.agree(write_failed=True)
        assert stops.agree() == Agreement(None, True), "no signal, and a save that has failed"
        assert stops.agree() == NOTHING, "which is reported once"
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            send(number)
        stops.agree()
        assert stops.agree() == Agreement("SIGTERM", False)


def test_beside_the_main_thread_no_handler_is_set():
    """Python allows it nowhere else; training in a thread goes on without."""
    before, agreements = [signal.getsignal(number) for number in SIGNALS], []

    def train() -> None:
        with StopRequests() as stops:
            agreements.extend([stops.agree(), stops.agree()])

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert agreements == [NOTHING, NOTHING]
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_ranks_agree_at_the_same_boundary():
    """Each rank gets other signals at other times, one's save fails, and another's fingerprint differs once."""
    sent = {1: {3: signal.SIGUSR1}, 0: {5: signal.SIGTERM}}
    failed = {0: {6}}
    first, second = run_on_ranks(agree_often, preset="ddp_cpu", overrides={"mixed_precision": "no"}, args=(sent, failed))
    assert first == second
    names = [agreement.signal_name for agreement in first]
    # Sent between the boundaries 2 and 3: exchanged at 3, read at 4.
    assert names == [None] * 4 + ["SIGUSR1"] * 2 + ["SIGTERM"] * 3 or names == [None] * 4 + ["SIGUSR1"] * 5
    assert [agreement.write_failed for agreement in first] == [False] * 7 + [True, False]
    assert [agreement.differ for agreement in first] == [False] * 3 + [True] + [False] * 5


def agree_often(sent: dict[int, dict], failed: dict[int, set[int]]) -> list[Agreement]:
    """Nine boundaries; before boundary n this rank gets `sent[rank][n]`."""
    from toolkit.distributed.comm import rank
    from toolkit.launch.accelerator import build_accelerator

    build_accelerator()
    agreements = []
    with StopRequests() as stops:
        for boundary in range(9):
            if boundary in sent[rank()]:
                send(sent[rank()][boundary])
            fingerprint = 2**63 - 1 - (rank() == 1 and boundary == 2)
            agreements.append(stops.agree(write_failed=boundary in failed.get(rank(), ()), fingerprint=fingerprint))
        stops.agree()  # its own collective is read too: none is under way when the group ends
        stops._read()
    return agreements
