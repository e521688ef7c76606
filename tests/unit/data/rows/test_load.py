"""The split, the fingerprint, the cache, and what settings may go together."""

import tracemalloc
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest
from datasets import Dataset, Features

from tests.support.chats import say
from tests.support.model_folders import save_jsonl
from tests.support.refusals import refusal
from tests.support.rows import load_rows
from toolkit.config.data import DataConfig, LLMDataConfig
from toolkit.data.rows import load as loading
from toolkit.data.rows.example import Example, build_schema
from toolkit.data.rows.load import Splitter


def write(name, *pairs):
    Path(name).write_text("source,target\n" + "".join(f"{source},{target}\n" for source, target in pairs))


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A csv of 400 rows in the working directory, every text twice with different targets."""
    monkeypatch.chdir(tmp_path)
    write("rows.csv", *((f"text {i % 200}", f"target {i}") for i in range(400)))
    return DataConfig(source="csv", files="rows.csv", eval_fraction=0.2, cache_dir="cache")


def load(config, **settings):
    return load_rows(replace(config, **settings))


def test_split_is_near_the_fraction_keeps_groups_together_and_grows_with_it_in_any_order_of_rows(config):
    rows = load_rows(config)
    held_out = set(rows.evaluation["completion"])
    assert 50 <= len(rows.evaluation) <= 110  # 80 expected of 200 groups of two, standard deviation 11
    assert not set(rows.train["prompt"]) & set(rows.evaluation["prompt"])
    assert sorted([*rows.train["row_id"], *rows.evaluation["row_id"]]) == list(range(400))
    header, *lines = Path("rows.csv").read_text().splitlines(keepends=True)
    Path("reversed.csv").write_text(header + "".join(reversed(lines)))
    assert set(load(config, files="reversed.csv").evaluation["completion"]) == held_out
    assert held_out < set(load(config, eval_fraction=0.5).evaluation["completion"])


def test_a_fraction_that_holds_out_nothing(config):
    rows = load(config, eval_fraction=0.0)
    assert (len(rows.train), len(rows.evaluation), rows.remarks) == (400, 0, [])
    assert rows.evaluation.features == rows.train.features == Features.from_arrow_schema(build_schema())
    remark = "data.eval_fraction 1e-09 holds out none of the 400 rows: there is nothing to evaluate on"
    assert load(config, eval_fraction=1e-9).remarks == [remark]


@pytest.mark.parametrize(("num_rows", "of_the_second"), [(7, []), (13, ["text 0", "text 1", "text 2"])])
def test_num_rows_limits_the_rows_read_over_all_files(config, num_rows, of_the_second):
    write("more.csv", *((f"more {i}", "m") for i in range(10)))
    rows = load(config, files=["more.csv", "rows.csv"], num_rows=num_rows, eval_fraction=0.0)
    assert rows.train["prompt"][:] == [f"more {i}" for i in range(10)][:num_rows] + of_the_second


def test_eval_files_are_the_evaluation_rows_and_equal_rows_leave_training(config):
    write("held_out.csv", ("text 3", "target 3"), ("new text", "n"))
    rows = load(config, eval_files=["held_out.csv"], num_rows=250)
    assert rows.evaluation["completion"][:] == ["target 3", "n"]
    assert rows.evaluation["row_id"][:] == [0, 1]
    assert len(rows.train) == 249 and "target 203" in rows.train["completion"][:]
    assert rows.train["row_id"][0] == 2
    assert rows.remarks == [
        "skipped 1 of 250 rows of rows.csv that equal a row of data.eval_files (row 4)",
        "training rows with the prompt of a row of data.eval_files, and something else: 1 of 249, which are kept",
    ]


def test_rows_that_only_start_alike_are_neither_copies_nor_one_group(config):
    """As a long instruction before every text."""
    rows = [(f"{'the same instruction ' * 9}{i}", f"target {i}") for i in range(50)]
    write("rows.csv", *rows)
    write("held_out.csv", *rows[:5])
    assert len(load(config, eval_files=["held_out.csv"]).train) == 45
    apart = load(config, eval_fraction=0.5)
    assert 10 < len(apart.evaluation) < 40 and apart.remarks == []


def test_a_row_is_remembered_in_8_bytes():
    splitter = Splitter(0.0)
    tracemalloc.start()
    for number in range(20_000):
        splitter.holds_out(Example(text=f"row {number % 18_000}", held_out=number == 1), is_eval_row=False)
    kept_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept_bytes < 20_000 * 8 * 1.2  # an array grows by an eighth
    assert splitter.sentences() == [
        "training rows that repeat an earlier row exactly: 1999 of 19999, which are kept",
        "held-out rows that are training rows too: 1 of 1, which say little about new rows",
    ]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_memory_does_not_grow_with_the_length_of_rows(tmp_path, name):
    """60 rows of 1 MB, of which a block holds 8."""
    rows = Dataset.from_dict({"text": [f"{i} " + "x" * 1_000_000 for i in range(60)]})
    (rows.to_json if name == "rows.jsonl" else rows.to_parquet)(str(tmp_path / name))
    of_arrow, before = pyarrow.proxy_memory_pool(pyarrow.default_memory_pool()), pyarrow.default_memory_pool()
    pyarrow.set_memory_pool(of_arrow)
    tracemalloc.start()
    try:
        load_rows(LLMDataConfig(files=str(tmp_path / name), cache_dir=str(tmp_path / "cache")))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pyarrow.set_memory_pool(before)
    assert peak_bytes < 30e6
    assert of_arrow.max_memory() < 60e6


def test_a_text_that_no_arrow_file_holds_is_refused(config, monkeypatch):
    def fail(*_):
        raise pyarrow.ArrowCapacityError("array cannot contain more than 2147483646 bytes, have 2147483653")

    monkeypatch.setattr(pyarrow, "array", fail)
    monkeypatch.setattr(loading, "_CHARACTERS_PER_BLOCK", 1)
    assert refusal(load_rows, config) == "rows.csv, row 1: a text of over 2 GiB: split it"


def test_fingerprint_is_of_contents_and_settings_and_not_of_paths_or_tokenizing(config):
    Path("changed.csv").write_text(Path("rows.csv").read_text().replace("target 7\n", "target 8\n"))
    for name in ("one", "two"):
        write(f"{name}.csv", (name, 1))
    settings = [
        *({}, {"files": "changed.csv"}, {"num_rows": 399}, {"eval_fraction": 0.3}),
        {"source_column": "target", "target_column": "source"},
        *({"files": ["rows.csv", "one.csv"]}, {"files": ["one.csv", "rows.csv"]}),
        *({"eval_files": ["one.csv"], "files": ["two.csv", "rows.csv"]}, {"eval_files": ["one.csv", "two.csv"]}),
    ]
    prints = [load(config, **changes).fingerprint for changes in settings]
    assert len(set(prints)) == len(settings)
    Path("moved.csv").write_bytes(Path("rows.csv").read_bytes())
    for changes in ({"files": "moved.csv", "cache_dir": "other"}, {"prefix": "a: ", "max_source_length_tokens": 8}):
        assert load(config, **changes).fingerprint == prints[0]


def test_second_load_comes_from_the_cache_with_what_was_skipped_and_repeated(config, monkeypatch):
    write("rows.csv", ("a", "b"), ("c", ""), ("a", "b"), ("a", "another"))
    first = load(config, eval_fraction=0.0)
    monkeypatch.setattr(loading, "write_rows", None)  # called again, it would raise
    Path("rows.csv").rename("renamed.csv")
    second = load(config, files="renamed.csv", eval_fraction=0.0)
    assert second.train[:] == first.train[:] and second.train["completion"][:] == ["b", "b", "another"]
    assert second.remarks == [
        "skipped 1 of 4 rows of renamed.csv with an empty target (row 2)",
        "training rows that repeat an earlier row exactly: 1 of 3, which are kept",
    ]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"source": "some/rows"}, "data.files is given, but data.source some/rows reads no files"),
        ({"eval_fraction": 1.0}, "all rows are held out, none is left to train on: lower data.eval_fraction"),
        ({"eval_files": "broken.csv"}, "broken.csv, line 3002: "),
        ({"eval_files": "empty.csv"}, "none of the 1 rows can be used: skipped 1 of 1 rows of empty.csv with"),
        ({"eval_files": "rows.csv"}, "none of the 400 rows can be used: "),
    ],
)
def test_rows_and_settings_that_leave_nothing_are_refused_and_nothing_is_cached(config, settings, sentence):
    write("broken.csv", *[("a", "b")] * 3000, ("a", "b,c"))
    write("empty.csv", ("a", ""))
    assert sentence in refusal(load, config, **settings)
    assert not list(Path("cache").glob("rows/*"))


def test_fingerprints_of_rows_are_those_of_this_version_of_the_reader(config):
    """A tokenizer that is trained on the rows is kept under them, so a run begun before could not go on with others. Raise
    `READER_VERSION` before these change."""
    Path("a.csv").write_text("source,target,id\n" + "".join(f"text {i},t {i},{i}\n" for i in range(20)))
    rows = [{"messages": say("hi", "one"), "tools": [{"name": "add"}], "id": i} for i in range(3)]
    save_jsonl(Path("a.jsonl"), rows)
    Path("own.py").write_text(
        'def load(config):\n    yield {"prompt": "a", "completion": "b"}\ndef identify(config): return "1"\n'
    )
    Path("a.txt").write_text("one\n\ntwo\n")
    of_llm = LLMDataConfig(cache_dir="cache", eval_fraction=0.0)
    prints = [load(config, files="a.csv", eval_fraction=0.0), load(of_llm, files="a.txt")]
    prints += [load(of_llm, source="jsonl", files="a.jsonl"), load(of_llm, source="own.py:load")]
    expected = ["a0edc4d8462a", "33883209c976", "c7e7ca82e5b4", "2e83d4c72898"]
    assert [rows.fingerprint[:12] for rows in prints] == expected
