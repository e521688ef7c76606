"""What the tests with a tracker's real package share."""

import os
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from unittest.mock import patch

import pytest

from tests.support.workbench import Workbench
from tests.trackers.checks import run_two

absent = [name for name in ("tensorboard", "wandb", "trackio", "mlflow") if find_spec(name) is None]
if absent:
    collect_ignore = [f"test_{name}.py" for name in absent]
    targets = ", ".join(f"make test-{name}" for name in absent)
    warnings.warn(f"tests/trackers is left out where the tracker is not installed: {targets} runs it", stacklevel=1)


@pytest.fixture(scope="module")
def bench(bench) -> Iterator[Workbench]:
    """A place for the runs of a file of tests. Trackers write below it, and find neither a key nor a home of this machine."""
    home = {"HOME": str(bench.runs), "TRACKIO_DIR": str(bench.runs / "trackio"), "WANDB_MODE": "offline"}
    with patch.dict(os.environ, home | {"MLFLOW_TRACKING_URI": f"sqlite:///{bench.runs / 'mlflow.db'}"}):
        for name in ("WANDB_API_KEY", "NETRC"):
            os.environ.pop(name, None)
        yield bench


@pytest.fixture(scope="module")
def logged(request, bench) -> Workbench:
    """The bench with the two runs of a file of tests, whose name has that of the tracker."""
    run_two(bench, request.module.__name__.rpartition("test_")[2])
    return bench
