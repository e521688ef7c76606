"""What every unit test has: the toolkit's log as a program has it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from toolkit.launch.log import start_logging


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
