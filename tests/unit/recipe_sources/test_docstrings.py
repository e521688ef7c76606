"""The embedded rows: real docstrings, split by module without leaks."""

from __future__ import annotations

import importlib.metadata
import sys

import pytest

from tests.unit.recipe_sources.sources import docstrings

MODULE = '''
"""Tools for boats."""


class OarLocker:
    """Keep oars where they belong.

    An oar that is not in its place cannot be found in the dark.
    """

    def take_oar(self, number):
        """Return the oar of that number."""


def _generated(*args):
    """_generated(a, b) -> int"""
'''


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("packages")
    (folder / "boats_for_tests").mkdir()
    (folder / "boats_for_tests" / "__init__.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    try:
        return docstrings.read_docstrings(("boats_for_tests", "no_such_package"))
    finally:
        sys.path.remove(str(folder))


def test_packages_are_read_without_being_imported(rows: list[dict[str, str]]) -> None:
    boats = {row["target"]: row for row in rows if row["group"].startswith("boats_for_tests")}
    assert "boats_for_tests" not in sys.modules
    assert boats.keys() == {"Tools for boats.", "Keep oars where they belong.", "Return the oar of that number."}
    locker = boats["Keep oars where they belong."]
    assert locker["lead_text"] == "An oar that is not in its place cannot be found in the dark."
    assert locker["source"].endswith(locker["lead_text"])
    assert "oar locker" in locker["source"].lower()
    assert "number" in boats["Return the oar of that number."]["source"]


def test_whole_modules_of_the_standard_library_are_held_out(rows: list[dict[str, str]]) -> None:
    held_out = [row for row in rows if row["split"] == "eval"]
    assert 100 < len(held_out) < 1000
    assert not {row["group"] for row in held_out} & {row["group"] for row in rows if row["split"] == "train"}
    assert {row["group"].split(".")[0] for row in held_out} <= sys.stdlib_module_names
    assert all(len(row["lead_text"]) >= docstrings.MIN_EVAL_BODY_CHARACTERS for row in held_out)


def test_nothing_held_out_is_trained_on(rows: list[dict[str, str]]) -> None:
    def words(text: str) -> str:
        return " ".join(text.lower().split())

    held_out = [row for row in rows if row["split"] == "eval"]
    trained = [row for row in rows if row["split"] == "train"]
    assert not {words(row["lead_text"]) for row in held_out} & {words(row["lead_text"]) for row in trained}
    assert not {words(row["source"]) for row in held_out} & {words(row["source"]) for row in trained}


def test_identity_follows_the_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    before = docstrings.identify(None)
    assert before == docstrings.identify(None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0")
    assert docstrings.identify(None) != before
