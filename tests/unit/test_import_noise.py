"""What torchao prints at its import is left out, and nothing else of the same loggers."""

from __future__ import annotations

import enum
import logging
import subprocess
import sys

import pytest

import toolkit  # noqa: F401


class OfAnotherLibrary(enum.Enum):
    FIRST = 1


def test_importing_torchao_prints_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import toolkit.errors, torchao"], capture_output=True, text=True, timeout=600, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize(
    ("logger", "message", "arguments"),
    [
        ("torchao", "Failed to load the config: no such file", ()),
        ("torchao", "Skipping import of cpp extensions due to incompatible torch version", ()),
        ("torch.utils._pytree", "something else", ()),
        ("torch.utils._pytree", "%s is an Enum subclass. Calling register_constant() on it is deprecated", (OfAnotherLibrary,)),
    ],
)
def test_other_messages_of_the_same_loggers_pass(logger: str, message: str, arguments: tuple[object, ...]) -> None:
    record = logging.LogRecord(logger, logging.WARNING, __file__, 1, message, arguments, None)
    assert logging.getLogger(logger).filters and logging.getLogger(logger).filter(record)
