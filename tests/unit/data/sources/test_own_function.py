"""Rows from a function of the user's: columns, split, fingerprint, and one sentence for whatever it does wrong. Datasets given
by Python code: what is refused, and the files that stand for them."""

import sys
from functools import partial
from pathlib import Path
from textwrap import dedent

import datasets
import pytest

from tests.support.refusals import refusal
from tests.support.rows import CHAT, load_llm, load_rows, load_t5
from toolkit import load_config
from toolkit.checkpoint.load import _without_places
from toolkit.config.data import MixEntry
from toolkit.data.rows.example import read_examples
from toolkit.data.rows.load import TextRows
from toolkit.data.sources.own_function import check_datasets, save_datasets

NAME = "my_rows.py:load_rows"


def write(code: str, name: str = "my_rows.py") -> None:
    Path(name).write_text(dedent(code))


def load(load_files, code: str | None = None, **settings) -> TextRows:
    if code is not None:
        write(code)
    return load_files(**{"source": NAME} | settings)


t5, llm = partial(load, load_t5), partial(load, load_llm)


def returns(rows: str) -> str:
    return f"def load_rows(config): return {rows}"


def test_rows_of_a_generator_with_group_split_and_lead_text():
    rows = t5("""
        def load_rows(config):
            for i in range(8):
                yield {"source": f"text {i}", "target": f"t {i}", "split": "eval" if i == 5 else "train", "lead_text": "lead"}
            for i in range(200):
                yield {"source": f"more {i}", "target": "t", "group": str(i % 40), "lead_text": None, "other": object}
    """, eval_fraction=0.4)  # fmt: skip
    assert [row["prompt"] for row in rows.evaluation][0] == "text 5"
    assert set(rows.train["prompt"][:7]) == {f"text {i}" for i in range(8)} - {"text 5"}
    assert rows.train["lead_text"][0] == "lead" and rows.train["lead_text"][-1] == rows.train["prompt"][-1]
    trained, held_out = (
        {int(text[5:]) % 40 for text in side["prompt"] if "more" in text} for side in (rows.train, rows.evaluation)
    )
    assert trained and held_out and not trained & held_out


def test_rows_to_skip_are_counted_and_num_rows_reads_no_further():
    rows = t5("""
        def load_rows(config):
            yield {"source": "a", "target": "b", "skip": None}
            yield {"skip": "with a broken page"}
            yield {"source": "c", "target": "d"}
            raise OSError
    """, num_rows=3)  # fmt: skip
    assert rows.train["prompt"][:] == ["a", "c"]
    assert rows.remarks == ["skipped 1 of 3 rows of my_rows.py:load_rows with a broken page (row 2)"]


def test_the_kind_of_an_llm_row_follows_from_its_columns():
    rows = [{"prompt": "p", "completion": "c", "lead_text": "first"}, {"messages": CHAT, "tools": None}, {"text": "plain"}]
    train = llm(returns(repr(rows))).train
    pair, chat, text = read_examples(train[:])
    assert (pair.prompt, pair.completion, text.text, chat.messages) == ("p", "c", "plain", CHAT)
    assert train["lead_text"][0] == "first"
    assert f"{NAME}, row 1, message 1 has no content" in refusal(llm, returns("[{'messages': [{'role': 'user'}]}]"))


def test_the_function_gets_the_data_section_and_its_files():
    for name in ("b.txt", "a.txt", "held_out.txt"):
        Path(name).write_text(name)
    code = """
        from pathlib import Path
        def load_rows(config):
            for split, files in (("train", config.files), ("eval", config.eval_files)):
                for file in files:
                    yield {"text": Path(file).read_text() + config.loss_on, "split": split}
    """
    rows = llm(code, files="[ab].txt", eval_files=["held_out.txt"])
    assert (rows.train["text"][:], len(rows.evaluation)) == (["a.txtcompletions", "b.txtcompletions"], 1)
    assert llm(mix=[MixEntry(source=NAME, files="b.txt")], source=None).train["text"][:] == ["b.txtcompletions"]
    assert "data.files: there is no file c.txt" in refusal(llm, files="c.txt")


def test_beside_files_in_a_mix():
    Path("a.jsonl").write_text('{"text": "of a file"}\n')
    entries = [MixEntry(source=NAME), MixEntry(files="a.jsonl"), MixEntry(source="my_rows.py:two")]
    code = returns("[{'text': 'one'}]") + "\ndef two(config): return [{'text': 'two'}]"
    train = llm(code, source=None, mix=entries).train
    assert list(zip(train["text"], train["mix_entry"], strict=True)) == [("one", 0), ("of a file", 1), ("two", 2)]
    for identify in ("", "\ndef identify(config): return 'x'"):
        code = returns("[{'prompt': 'p', 'completion': 'c'}]") + identify
        assert refusal(llm, code, source=None, mix=entries[:2], messages_column="body").startswith(
            f"data.messages_column is body, but no column of that name is read from {NAME}, a.jsonl with data.format auto: "
        )
    assert len(list(Path("cache").glob("rows/*"))) == 1
    assert llm(returns("[{'body': 'x'}]"), text_column="body").train["text"][:] == ["x"]


def test_fingerprint_is_of_the_file_and_of_the_rows_and_of_no_place():
    reading = """
        from pathlib import Path
        def load_rows(config):
            for line in Path(__file__).with_name("texts").read_text().split():
                yield {"source": line, "target": "t"}
    """
    Path("texts").write_text("a b c")
    first = t5(reading).fingerprint
    assert t5(reading).fingerprint == first
    assert t5(dedent(reading) + "# changed").fingerprint != first
    Path("texts").write_text("a b d")
    assert t5(reading).fingerprint != first
    Path("elsewhere").mkdir()
    for name in ("my_rows.py", "texts"):
        Path(name).rename(Path("elsewhere") / name)
    Path("elsewhere/texts").write_text("a b c")
    assert t5(source="elsewhere/my_rows.py:load_rows").fingerprint == first
    assert _without_places(f"../elsewhere/{NAME}") == _without_places(NAME) != _without_places("my_rows.py:other")
    assert _without_places([{"source": f"../{NAME}", "files": "a"}]) == _without_places([{"source": NAME}])


def test_identify_stands_for_the_rows():
    counting = """
        def load_rows(config):
            with open("calls", "a") as calls:
                calls.write("x")
            return [{"source": "a", "target": "b"}]
    """
    t5(counting)
    t5()
    assert Path("calls").read_text() == "xxx"  # hashed and read, then hashed
    Path("calls").unlink()
    Path("version").write_text("1")
    first = t5(dedent(counting) + "\ndef identify(config): return open('version').read()\n").fingerprint
    assert t5().fingerprint == first and Path("calls").read_text() == "x"
    Path("version").write_text("2")
    assert t5().fingerprint != first


def test_the_file_runs_as_it_is_and_imports_what_is_beside_it():
    Path("project").mkdir()
    write("TARGET = 't'", "project/my_targets.py")
    before = list(sys.path)
    code = "from my_targets import TARGET\ndef load_rows(config): return [{'source': 'a', 'target': TARGET}]"
    write(code, "project/my_rows.py")
    assert t5(source="project/my_rows.py:load_rows").train["completion"][:] == ["t"]
    assert sys.path == before
    # Same size, within the same second: an import would take the compiled file.
    write(code.replace("'a'", "'b'"), "project/my_rows.py")
    assert t5(source="project/my_rows.py:load_rows").train["prompt"][:] == ["b"]
    assert not list(Path("project").glob("__pycache__/my_rows*"))
    # Another folder has another file of that name, and what is beside the file counts like the file.
    Path("other").mkdir()
    write("TARGET = 'u'", "other/my_targets.py")
    write(code + "\ndef identify(config): return ''", "other/my_rows.py")
    other = t5(source="other/my_rows.py:load_rows")
    assert other.train["completion"][:] == ["u"] and "my_targets" not in sys.modules
    write("TARGET = 'longer'", "other/my_targets.py")
    assert t5(source="other/my_rows.py:load_rows").train["completion"][:] == ["longer"]
    dataclasses = """
        from __future__ import annotations
        from dataclasses import asdict, make_dataclass
        Row = make_dataclass("Row", ["source", "target"])
        def load_rows(config): return map(asdict, [Row("a", "b")])
    """
    assert t5(dataclasses).train["completion"][:] == ["b"]


ROW = "{'source': 'a', 'target': 'b'}"


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("def load_row(config): ...", "the file has no function load_rows: name one that it defines (load_row)"),
        ("def load_rows(): ...", "the file raised TypeError: load_rows() takes 0 positional arguments but 1 was given"),
        ("def load_rows(config) return 3", "line 1 of the file raised SyntaxError: expected ':'"),
        ("import no_such_module_here", "line 1 of the file raised ModuleNotFoundError: No module named 'no_such_module_here'"),
        ("\nraise SystemExit(3)", "line 2 of the file raised SystemExit: 3: correct it there"),
        (returns("None"), "my_rows.py:load_rows returns None, which holds no rows: yield dicts, or return a list or a Dataset"),
        (returns("{'train': [], 'test': []}"), "returns a dict with the keys train, test: return the rows of one of them"),
        (returns("[]"), "my_rows.py:load_rows holds no rows: give a source with at least one"),
        (returns("'text'"), "row 1: 't' is of type str, not a dict: yield {column: value, ...}"),
        (returns(f"[{ROW}, {{'source': 'a'}}]"), "row 2 has no column 'target' (its columns: source)"),
        (returns(f"[{ROW} | {{'group': 3}}]"), "row 1, column group: 3 is of type int, not text: write it as a string"),
        (returns(f"[{ROW} | {{'skip': ' '}}]"), "row 1, column skip is empty: give the reason to leave the row out, or None"),
        (returns("[{1: 'a', 'target': 'b'}]"), "row 1 has no column 'source' (its columns: 1 of type int, target)"),
        ("import numpy\n" + returns(f"[{ROW} | {{'split': numpy.array(['train', 'eval'])}}]"), "is neither train nor eval"),
        ("import numpy\n" + returns(f"[{ROW} | {{'target': numpy.array([1, 2])}}]"), "array([1, 2]) is of type ndarray"),
        ("class Rows:\n    def __iter__(self): return 1 / 0\ndef load_rows(config): return Rows()", "line 2 of the file"),
        (returns(f"[{ROW} | {{'split': 'test'}}]"), "row 1, column split: 'test' is neither train nor eval"),
        (f"def load_rows(config):\n    yield {ROW}\n    yield {{}}['what']\n", f"{NAME}: line 3 of the file raised KeyError"),
        (
            "import itertools\ncalls = itertools.count()\n" + returns("[{'source': f'{next(calls)}', 'target': 'b'}]"),
            f"{NAME} gives other rows when it is called again: seed what is random, sort what has no order",
        ),
        (returns(f"[{ROW}]") + "\ndef identify(config): ...", "the result of identify: None is of type NoneType, not text"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence(code, sentence):
    assert sentence in refusal(t5, code)
    assert not list(Path("cache").glob("rows/*")), "rows of a refused source are in the cache"


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("my_row.py:load_rows", "data.source: there is no file my_row.py: did you mean my_rows.py?"),
        ("my_rows.py", f"data.source my_rows.py names no function: write it behind the file, as in {NAME}"),
        ("folder.py:load_rows", "data.source: folder.py is a folder"),
    ],
)
def test_what_is_wrong_with_the_name_is_one_sentence(source, sentence):
    Path("folder.py").mkdir()
    for read in (t5, llm):
        assert sentence in refusal(read, "", source=source)
    assert sentence.replace("data.source", "data.mix[0].source") in refusal(llm, source=None, mix=[MixEntry(source=source)])


NEEDED = {"model.name_or_path": "model", "train.max_steps": 2}
CHATS = [[{"role": "user", "content": f"hello {i}"}, {"role": "assistant", "content": f"you, {i}"}] for i in range(4)]


def config(**overrides):
    return load_config("llm", overrides=NEEDED | {key.replace("__", "."): value for key, value in overrides.items()})


def dataset(rows):
    return datasets.Dataset.from_list([{"messages": row} for row in rows])


def test_rows_are_those_of_the_datasets_and_a_changed_cell_is_another_file(tmp_path, capfd):
    datasets.enable_progress_bars()
    here = check_datasets(config(data__cache_dir=str(tmp_path)), dataset(CHATS), None)
    given = save_datasets(here, dataset(CHATS), dataset(CHATS[:1]))
    assert "parquet" not in capfd.readouterr().err, "no bar of datasets is shown"
    assert given.data.source == "parquet"
    assert Path(given.data.files[0]).name.startswith("train-") and Path(given.data.eval_files[0]).name.startswith("evaluation-")
    rows = load_rows(given.data)
    assert len(rows.train) == 3 and len(rows.evaluation) == 1  # a training row that is evaluated is left out
    assert given == save_datasets(here, dataset(CHATS).select([1, 0, 2, 3]).select([1, 0, 2, 3]), dataset(CHATS[:1]))
    changed = save_datasets(here, dataset(CHATS[::-1]), None)
    assert changed.data.files != given.data.files and changed.data.eval_files is None
    assert len(list((tmp_path / "datasets").iterdir())) == 3
    (tmp_path / "file").touch()
    sentence = refusal(save_datasets, config(data__cache_dir=str(tmp_path / "file")), dataset(CHATS), None)
    assert sentence.startswith(f"the dataset cannot be written to {tmp_path}/file/datasets (Not a directory): make room there")


def test_what_is_no_dataset_or_beside_other_rows_is_refused():
    rows = dataset(CHATS)
    both = datasets.DatasetDict(a=rows, b=rows)
    mistakes = [
        (config(), None, None, "there are no rows: give finetune a datasets.Dataset as train, or set data.files in the config"),
        (config(), None, rows, "evaluation is a dataset, but train is not given: "),
        (config(), CHATS, None, "train is a list: give a datasets.Dataset, as from Dataset.from_list"),
        (config(), rows, both, "evaluation is a DatasetDict with the keys a, b: give one of them"),
        (config(), rows.select([]), None, "train has no rows: "),
        (config(), rows.with_transform(lambda batch: batch), None, "train has a transform, which a run does not keep: "),
        (config(data__source="a/b"), rows, None, "data.source is given beside a dataset as train: leave one of them out"),
        (config(data__eval_files="x.csv"), rows, None, "data.eval_files is given beside a dataset as train: "),
    ]
    for wrong, train, evaluation, sentence in mistakes:
        assert refusal(check_datasets, wrong, train, evaluation).startswith(sentence)
    check_datasets(config(), rows, rows)
    check_datasets(config(data__source="some/rows"), None, None)
