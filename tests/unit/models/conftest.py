"""What the tests of models share."""

from pathlib import Path

import pytest

from tests.support.adapter_models import BASES, save_base


@pytest.fixture(scope="session")
def bases(tmp_path_factory) -> Path:
    """A folder with each of `BASES`; nobody changes it."""
    folder = tmp_path_factory.mktemp("bases")
    for name in BASES:
        save_base(folder / name, name)
    return folder
