"""Rows of Python source: whole, natural, and without a way for the evaluation to leak into the training."""

from __future__ import annotations

import importlib.metadata
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.unit.recipe_sources import sources
from tests.unit.recipe_sources.sources import docstrings, stdlib

BOATS = '''"""Tools for boats."""
import os

OARS = 2


class OarLocker:
    """Keep oars where they belong."""

    # A dark page must hold too.
    @staticmethod
    def take_oar(number: int, *, from_left: bool = False) -> "Oar":
        """Return the oar of that number.

        It is taken out of the locker.
        """
        oar = OARS[number]  # may be missing

        return oar

    def put(self):
        self.take_oar(1)
'''
HELD_OUT_MODULE = next(name for name in (f"harbour{i}" for i in range(100)) if docstrings.is_held_out(name))
SEEN_MODULE = next(name for name in (f"harbour{i}" for i in range(100)) if not docstrings.is_held_out(name))


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of two modules; and a package beside it."""
    folder = tmp_path / "lib"
    (folder / "test").mkdir(parents=True)
    (folder / "test" / "ship.py").write_text(BOATS)
    (tmp_path / "packages" / "boats_for_tests").mkdir(parents=True)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder))
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    return folder


def write_package(library: Path, text: str) -> None:
    (library.parent / "packages" / "boats_for_tests" / "__init__.py").write_text(text)


def test_prompt_is_the_function_with_its_name_as_docstring_then_its_head_up_to_the_quotes(library: Path) -> None:
    (library / f"{HELD_OUT_MODULE}.py").write_text(BOATS)
    (row,) = sources.functions.read_functions(())
    assert row == {
        "prompt": "class OarLocker:\n"
        "    def take_oar(number, from_left):\n"
        '        """Take oar"""\n'
        "        oar = OARS[number]  # may be missing\n"
        "        return oar\n"
        "\n"
        "    @staticmethod\n"
        "    def take_oar(number, from_left):\n"
        '        """',
        "completion": "Return the oar of that number.",
        "lead_text": "Take oar",
        "group": HELD_OUT_MODULE,
        "split": "eval",
    }


def test_long_bodies_are_cut_at_the_end_of_a_line(library: Path) -> None:
    body = "\n".join(f"    step_{i} = prepare(step_{i - 1})" for i in range(1, 100))
    (library / f"{SEEN_MODULE}.py").write_text(f'def sail():\n    """Sail to the other side."""\n{body}\n')
    (row,) = sources.functions.read_functions(())
    assert row["prompt"].startswith('def sail():\n    """Sail"""\n    step_1 = prepare(step_0)\n')
    assert row["prompt"].endswith(')\n\ndef sail():\n    """')
    assert len(row["prompt"]) < sources.functions.MAX_PROMPT_BODY_CHARACTERS + 100


def test_a_page_break_moves_no_line(library: Path) -> None:
    """ast counts no line at a form feed, which older sources have between their parts."""
    write_package(library, BOATS.replace("OARS = 2\n", "OARS = 2  #\x0c\x0c\n"))
    rows = {row["completion"]: row for row in sources.functions.read_functions(("boats_for_tests",))}
    assert '"""Take oar"""\n        oar = OARS[number]' in rows["Return the oar of that number."]["prompt"]


def test_abstract_functions_train_but_are_not_evaluated(library: Path) -> None:
    for module in (HELD_OUT_MODULE, SEEN_MODULE):
        (library / f"{module}.py").write_text(
            f'def moor_{module}():\n    """Moor the ship of {module}."""\n    raise NotImplementedError\n'
        )
    assert [row["group"] for row in sources.functions.read_functions(())] == [SEEN_MODULE]


def test_packages_train_and_their_copies_of_held_out_functions_are_dropped(library: Path) -> None:
    (library / f"{HELD_OUT_MODULE}.py").write_text(BOATS)
    write_package(library, BOATS + '\n\ndef row():\n    """Row to the other side."""\n    return OARS\n')
    rows = sources.functions.read_functions(("boats_for_tests",))
    assert {(row["group"], row["split"], row["completion"]) for row in rows} == {
        (HELD_OUT_MODULE, "eval", "Return the oar of that number."),
        ("boats_for_tests", "train", "Row to the other side."),
    }
    assert "boats_for_tests" not in sys.modules


@pytest.mark.parametrize("change", [("that number", "THAT number"), ("Return the oar of that number", "Give one oar")])
def test_held_out_functions_that_the_base_has_read_elsewhere_are_not_evaluated(library: Path, change: tuple[str, str]) -> None:
    text = BOATS.replace("return oar", "return oar_that_is_polished(and_dry, and_light, and_long, and_mine)")
    (library / f"{HELD_OUT_MODULE}.py").write_text(text)
    assert [row["split"] for row in sources.functions.read_functions(())] == ["eval"]
    (library / f"{SEEN_MODULE}.py").write_text(text.replace(*change))
    assert [row["split"] for row in sources.functions.read_functions(())] == ["train"]


def test_a_small_module_is_one_row(library: Path) -> None:
    (library / f"{SEEN_MODULE}.py").write_text(BOATS)
    assert stdlib.load_rows(None) == [{"text": BOATS, "group": SEEN_MODULE, "split": "train"}]


def test_a_long_class_goes_on_under_its_own_first_line(library: Path) -> None:
    methods = "\n".join(f"    def method_{i}(self):\n        return {i}\n" for i in range(100))
    (library / f"{HELD_OUT_MODULE}.py").write_text(f"class Fleet(Base):\n{methods}\n\ndef launch():\n    return Fleet()\n")
    texts = sorted((row["text"] for row in stdlib.load_rows(None)), key=lambda text: int(text.split("method_")[1].split("(")[0]))
    assert len(texts) > 1
    assert all(text.startswith("class Fleet(Base):\n") and text.count("class") == 1 for text in texts)
    assert all(f"    def method_{i}(self):\n        return {i}\n" in "".join(texts) for i in range(100))
    assert texts[-1].endswith("\n\ndef launch():\n    return Fleet()\n")


def test_a_long_function_is_cut_and_a_long_table_left_out(library: Path) -> None:
    statements = "\n".join(f"    statement_number_{i} = {i}" for i in range(200))
    table = "TABLE = [\n" + "    0x1234,\n" * 500 + "]\n"
    (library / f"{HELD_OUT_MODULE}.py").write_text(f"{table}\ndef run():\n{statements}\n")
    texts = [row["text"] for row in stdlib.load_rows(None)]
    assert len(texts) > 2
    assert max(map(len, texts)) <= stdlib.MAX_ROW_CHARACTERS + 100
    assert not any("0x1234" in text for text in texts)
    assert sum(text.count("statement_number") for text in texts) == 200


def test_training_rows_hold_a_docstring_and_held_out_rows_need_not(library: Path) -> None:
    steps = "\n".join(f"    step_{i} = prepare(step_{i - 1})" for i in range(1, 60))
    text = f'def tack():\n    """Sail upwind."""\n\n\ndef jibe():\n{steps}\n'
    for module in (HELD_OUT_MODULE, SEEN_MODULE):
        (library / f"{module}.py").write_text(text)
    rows = stdlib.load_rows(None)
    assert [row["text"].splitlines()[0] for row in rows if row["split"] == "train"] == ["def tack():"]
    held_out = sorted((row["text"] for row in rows if row["split"] == "eval"), key=text.index)
    assert len(held_out) > 1 and "".join(held_out) == text.replace("\n\n\n", "\n")


def test_base_and_adapter_hold_out_the_same_modules(library: Path) -> None:
    for module in (HELD_OUT_MODULE, SEEN_MODULE):
        (library / f"{module}.py").write_text(BOATS.replace("oar", module).replace("Oar", module))
    for rows in (stdlib.load_rows(None), sources.functions.read_functions(())):
        assert {(row["group"], row["split"]) for row in rows} == {(HELD_OUT_MODULE, "eval"), (SEEN_MODULE, "train")}


def test_identities_follow_the_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    functions_before, modules_before = sources.functions.identify(None), stdlib.identify(None)
    assert functions_before != modules_before
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0")
    assert sources.functions.identify(None) != functions_before
    assert stdlib.identify(None) == modules_before  # packages do not count
    monkeypatch.setattr(sys, "version", "4.0")
    assert stdlib.identify(None) != modules_before
