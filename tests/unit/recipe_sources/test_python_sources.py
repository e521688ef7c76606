"""Rows of docstrings and of Python source: whole, natural, and without a way for the evaluation to leak into the training."""

import importlib.metadata
import json
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.launch import REPOSITORY
from toolkit.data.sources.own_function import run_file

docstrings, functions, pairs, stdlib = (
    run_file(REPOSITORY / "recipes" / "sources" / f"{name}.py", name)[0]
    for name in ("docstrings", "functions", "pairs", "stdlib")
)

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
        oar = OARS.take(number)  # may be missing

        return oar

    def put(self):
        self.take_oar(1)
'''


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("packages")
    (folder / "boats_for_tests").mkdir()
    signature = '\n\ndef _generated(*args):\n    """_generated(a, b) -> int"""\n'
    (folder / "boats_for_tests" / "__init__.py").write_text(BOATS + signature)
    sys.path.insert(0, str(folder))
    try:
        return docstrings.read_docstrings(("boats_for_tests", "no_such_package"))
    finally:
        sys.path.remove(str(folder))


def test_packages_are_read_without_being_imported(rows):
    boats = {row["target"]: row for row in rows if row["group"].startswith("boats_for_tests")}
    assert "boats_for_tests" not in sys.modules
    assert boats.keys() == {"Tools for boats.", "Keep oars where they belong.", "Return the oar of that number."}
    row = boats["Return the oar of that number."]
    assert row["lead_text"] == "It is taken out of the locker."
    assert row["source"].endswith(row["lead_text"]) and "number" in row["source"]
    assert "oar locker" in boats["Keep oars where they belong."]["source"].lower()


def test_whole_modules_of_the_standard_library_are_held_out_and_nothing_of_them_is_trained_on(rows):
    held_out, trained = ([row for row in rows if row["split"] == split] for split in ("eval", "train"))
    assert 100 < len(held_out) < 1000
    assert {row["group"].split(".")[0] for row in held_out} <= sys.stdlib_module_names
    assert all(len(row["lead_text"]) >= docstrings.MIN_EVAL_BODY_CHARACTERS for row in held_out)
    for column in ("group", "lead_text", "source"):
        words = [{" ".join(row[column].lower().split()) for row in part} for part in (held_out, trained)]
        assert not words[0] & words[1], column


SUMMARY = "Takes number and from_left, returns oar."
HARBOURS = [f"harbour{i}" for i in range(100)]
HELD_OUT = [name for name in HARBOURS if docstrings.is_held_out(name)]
HELD_OUT_MODULE = next(name for name in HELD_OUT if not functions.was_chosen_on(name))
CHOSEN_ON_MODULE = next(name for name in HELD_OUT if functions.was_chosen_on(name))
SEEN_MODULE = next(name for name in HARBOURS if not docstrings.is_held_out(name))


@pytest.fixture
def library(tmp_path, monkeypatch) -> Path:
    """A standard library of two modules; and a package beside it."""
    folder = tmp_path / "lib"
    (folder / "test").mkdir(parents=True)
    (folder / "test" / "ship.py").write_text(BOATS)
    (tmp_path / "packages" / "boats_for_tests").mkdir(parents=True)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder))
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    return folder


def test_a_row_is_a_function_without_its_docstring_and_what_it_takes_and_returns(library):
    (library / f"{HELD_OUT_MODULE}.py").write_text(BOATS)
    (row,) = functions.read_functions(())
    code = "def take_oar(number, from_left):\noar = OARS.take(number)\nreturn oar\n"
    where = {"lead_text": "def take_oar(number, from_left):", "group": HELD_OUT_MODULE, "split": "eval"}
    assert row == dict.fromkeys(("source", "prompt"), code) | dict.fromkeys(("target", "completion"), SUMMARY) | where


LONGEST = "a" * functions.MAX_RETURN_CHARACTERS
SAIL = """
def sail(boat, *flags, wind=1, **rest):
    def tack():
        raise KeyError
    try:
        return tack(boat)
    except KeyError:
        raise OSError
    if wind:
        return None
    return tack(boat)

def drift(boat):
    boat.anchor = None
    boat.engine.stop()
"""
LENGTHS = f"""
def short(a):
    return a

def long(a):
    {"a = list(a); " * 20}
    return a

def expression(a):
    a = list(a) or [None, None]
    return {LONGEST}a

def fitting(a):
    a = list(a) or [None, None]
    return {LONGEST}
"""


@pytest.mark.parametrize(
    ("text", "summary"),
    [
        (SAIL, "Takes boat, *flags, wind and **rest, returns tack(boat) or None, raises OSError."),
        (LENGTHS, f"Takes a, returns {LONGEST}."),
    ],
    ids=["each thing once in text order and nothing of functions inside", "short and long ones are left out"],
)
def test_the_summary_of_the_one_function_that_is_taken(library, text, summary):
    (library / f"{SEEN_MODULE}.py").write_text(text)
    assert [row["target"] for row in functions.read_functions(())] == [summary]


def test_packages_train_and_their_copies_of_held_out_functions_are_dropped(library):
    (library / f"{HELD_OUT_MODULE}.py").write_text(BOATS)
    other = "\n\ndef row(boat, seconds):\n    boat.move(seconds, by=OARS)\n    return boat\n"
    package = library.parent / "packages" / "boats_for_tests" / "__init__.py"
    package.write_text(BOATS + other + BOATS.replace("take_oar", "take_another_oar"))
    rows = functions.read_functions(("boats_for_tests",))
    assert {(row["group"], row["split"], row["target"]) for row in rows} == {
        (HELD_OUT_MODULE, "eval", SUMMARY),
        ("boats_for_tests", "train", "Takes boat and seconds, returns boat."),
    }
    assert "boats_for_tests" not in sys.modules


@pytest.mark.parametrize("change", [("take_oar", "give_oar"), ("OARS.take(number)", "find(number, OARS)")])
def test_held_out_functions_that_the_base_has_read_elsewhere_are_not_evaluated(library, change):
    """The same code under another name, and other code with the same summary. A module that settings were chosen on is out."""
    (library / f"{HELD_OUT_MODULE}.py").write_text(BOATS)
    (library / f"{CHOSEN_ON_MODULE}.py").write_text(BOATS.replace("take_oar", "take_it").replace("number", "figure"))
    assert [row["split"] for row in functions.read_functions(())] == ["eval"]
    (library / f"{SEEN_MODULE}.py").write_text(BOATS.replace(*change))
    assert [row["split"] for row in functions.read_functions(())] == ["train"]


def test_a_long_class_goes_on_under_its_own_first_line(library):
    methods = "\n".join(f"    def method_{i}(self):\n        return {i}\n" for i in range(100))
    (library / f"{HELD_OUT_MODULE}.py").write_text(f"class Fleet(Base):\n{methods}\n\ndef launch():\n    return Fleet()\n")
    texts = sorted((row["text"] for row in stdlib.load_rows(None)), key=lambda text: int(text.split("method_")[1].split("(")[0]))
    assert len(texts) > 1
    assert all(text.startswith("class Fleet(Base):\n") and text.count("class") == 1 for text in texts)
    assert all(f"    def method_{i}(self):\n        return {i}\n" in "".join(texts) for i in range(100))
    assert texts[-1].endswith("\n\ndef launch():\n    return Fleet()\n")


def test_a_long_function_is_cut_and_a_long_table_left_out(library):
    statements = "\n".join(f"    statement_number_{i} = {i}" for i in range(200))
    table = "TABLE = [\n" + "    0x1234,\n" * 500 + "]\n"
    (library / f"{HELD_OUT_MODULE}.py").write_text(f"{table}\ndef run():\n{statements}\n")
    texts = [row["text"] for row in stdlib.load_rows(None)]
    assert len(texts) > 2
    assert max(map(len, texts)) <= stdlib.MAX_ROW_CHARACTERS + 100
    assert not any("0x1234" in text for text in texts)
    assert sum(text.count("statement_number") for text in texts) == 200


def test_training_rows_hold_a_docstring_and_held_out_rows_need_not(library):
    steps = "\n".join(f"    step_{i} = prepare(step_{i - 1})" for i in range(1, 60))
    text = f'def tack():\n    """Sail upwind."""\n\n\ndef jibe():\n{steps}\n'
    for module in (HELD_OUT_MODULE, SEEN_MODULE):
        (library / f"{module}.py").write_text(text)
    rows = stdlib.load_rows(None)
    assert {(row["group"], row["split"]) for row in rows} == {(HELD_OUT_MODULE, "eval"), (SEEN_MODULE, "train")}
    assert [row["text"].splitlines()[0] for row in rows if row["split"] == "train"] == ["def tack():"]
    held_out = sorted((row["text"] for row in rows if row["split"] == "eval"), key=text.index)
    assert len(held_out) > 1 and "".join(held_out) == text.replace("\n\n\n", "\n")


def test_base_and_adapter_hold_out_the_same_modules(library):
    for module in (HELD_OUT_MODULE, SEEN_MODULE):
        (library / f"{module}.py").write_text(BOATS.replace("oar", module).replace("Oar", module))
    modules = stdlib.load_rows(None)
    assert [row["text"] for row in modules if row["group"] == SEEN_MODULE] == [(library / f"{SEEN_MODULE}.py").read_text()]
    for rows in (modules, functions.read_functions(())):
        assert {(row["group"], row["split"]) for row in rows} == {(HELD_OUT_MODULE, "eval"), (SEEN_MODULE, "train")}


def test_identities_follow_the_versions(monkeypatch):
    sources = (docstrings, functions, stdlib)
    before = [source.identify(None) for source in sources]
    assert before == [source.identify(None) for source in sources] and len(set(before)) == 3
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0")
    changed = [source.identify(None) != identity for source, identity in zip(sources, before, strict=True)]
    assert changed == [True, True, False], "packages do not count for the base"
    monkeypatch.setattr(sys, "version", "4.0")
    assert stdlib.identify(None) != before[2]


def test_a_wrong_line_has_a_part_of_another_functions_and_pairs_stay_in_their_split():
    lines = {"a": "Takes a, returns 1.", "b": "Takes b, raises KeyError.", "c": "Takes c, returns 3."}
    rows = [{"prompt": name, "target": line, "lead_text": "", "group": "", "split": "train"} for name, line in lines.items()]
    made = pairs.build_pairs([*rows, rows[0] | {"split": "eval"}])
    assert [(pair["prompt"], pair["chosen"], pair["rejected"]) for pair in made] == [
        ("a", lines["a"], "Takes b, returns 1."),
        ("b", lines["b"], "Takes b, returns 3."),
        ("c", lines["c"], "Takes a, returns 3."),
    ]


def test_a_wrong_line_of_a_model_is_beside_the_right_one_and_each_evaluation_row_has_a_pair(tmp_path):
    lines = {"a": "Takes a, returns 1.", "b": "Takes b, raises KeyError.", "c": "Takes c, returns 3.", "d": "Takes d, returns 4."}
    rows = [
        {"prompt": name, "target": line, "lead_text": "", "group": "", "split": "train" if name < "c" else "eval"}
        for name, line in lines.items()
    ]
    (tmp_path / "rows").write_text("".join(json.dumps(row) + "\n" for row in rows))
    written = [lines["a"] + "\n", "Takes b, returns b.", lines["c"], "Takes d."]
    (tmp_path / "lines").write_text("".join(json.dumps({"prediction": line}) + "\n" for line in written))
    made = pairs.load_lines(SimpleNamespace(files=[tmp_path / "rows", tmp_path / "lines"]))
    assert [(pair["split"], pair["chosen"], pair["rejected"]) for pair in made] == [
        ("train", lines["b"], "Takes b, returns b."),
        ("eval", lines["c"], "Takes d, returns 3."),
        ("eval", lines["d"], "Takes d."),
    ]
