"""What every unit test has: the toolkit's log as a program has it, and one thread; and the tiny models of several rooms."""

import logging
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from toolkit.launch.log import start_logging

# Read when torch is imported; threads take longer to meet than tiny models to compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def printed_log() -> Iterator[None]:
    """Print the log, as in a run. Without `propagate` false, pytest's own handlers would count as those of the program."""
    logger = logging.getLogger("toolkit")
    logger.propagate = False
    start_logging()
    yield
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """Put handlers of signals back: processes that a later test starts would ignore the SIGTERM that ends them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def no_watchdog() -> Iterator[None]:
    """End the one of a run that a test has started: it would end this process after half an hour without a further step."""
    yield
    from toolkit.distributed import watchdog  # imports torch

    watchdog.stop()


@pytest.fixture(scope="session")
def bases(tmp_path_factory) -> Path:
    """A folder with each of `BASES`; nobody changes it."""
    from tests.support.adapter_models import BASES, save_base  # imports torch

    folder = tmp_path_factory.mktemp("bases")
    for name in BASES:
        save_base(folder / name, name)
    return folder


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator:
    """Escape half surrogates in what a test has printed: pytest-xdist could not send its report (execnet raises DumpError)."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report
