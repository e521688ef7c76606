"""TCP ports for the ranks of a test, which no other test and no connection takes meanwhile."""

import itertools
import os
import random
import socket
from contextlib import suppress

FIRST_PORT, PORTS_OF_A_WORKER = 12_000, 2_000
"""Linux gives connections ports from 32768 on."""

_numbers = itertools.count(random.SystemRandom().randrange(PORTS_OF_A_WORKER))


def free_port() -> int:
    """Another port at each call, of a range that belongs to this one of the processes that pytest-xdist runs tests in."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = FIRST_PORT + worker % 10 * PORTS_OF_A_WORKER
    while True:
        port = first + next(_numbers) % PORTS_OF_A_WORKER
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
