"""The split, the fingerprint, the cache, and what settings may go together."""

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest
from datasets import Dataset, List, Value

from tests.support.chats import say
from tests.support.refusals import refusal
from toolkit.config.data import DataConfig, LLMDataConfig
from toolkit.data.rows import load as loading
from toolkit.data.rows.example import Example
from toolkit.data.rows.load import Splitter, load_rows


@pytest.fixture
def config(tmp_path):
    """A csv of 400 rows, every text twice with different targets."""
    lines = [f"text {i % 200},target {i}\n" for i in range(400)]
    (tmp_path / "rows.csv").write_text("source,target\n" + "".join(lines))
    return DataConfig(source="csv", files=str(tmp_path / "rows.csv"), eval_fraction=0.2, cache_dir=str(tmp_path / "cache"))


def test_split_is_near_the_fraction_keeps_groups_together_and_grows_with_it_in_any_order_of_rows(config, tmp_path):
    rows = load_rows(config)
    held_out = set(rows.evaluation["completion"])
    assert 50 <= len(rows.evaluation) <= 110  # 80 expected of 200 groups of two, standard deviation 11
    assert not set(rows.train["prompt"]) & set(rows.evaluation["prompt"])
    assert sorted([*rows.train["row_id"], *rows.evaluation["row_id"]]) == list(range(400))
    header, *lines = (tmp_path / "rows.csv").read_text().splitlines(keepends=True)
    (tmp_path / "reversed.csv").write_text(header + "".join(reversed(lines)))
    assert set(load_rows(replace(config, files=str(tmp_path / "reversed.csv"))).evaluation["completion"]) == held_out
    assert held_out < set(load_rows(replace(config, eval_fraction=0.5)).evaluation["completion"])


def test_a_fraction_that_holds_out_nothing(config):
    rows = load_rows(replace(config, eval_fraction=0.0))
    assert (len(rows.train), len(rows.evaluation), rows.remarks) == (400, 0, [])
    for side in (rows.train, rows.evaluation):  # of no rows too
        types = {name: feature.dtype for name, feature in side.features.items() if name != "weight_0"}
        texts = dict.fromkeys(("prompt", "completion", "text", "messages", "tools", "lead_text"), "string")
        assert types == dict.fromkeys(("row_id", "mix_entry", "first_trained"), "int64") | texts
        assert side.features["weight_0"] == List(Value("int64"))
    rows = load_rows(replace(config, eval_fraction=1e-9))
    assert rows.remarks == ["data.eval_fraction 1e-09 holds out none of the 400 rows: there is nothing to evaluate on"]


def test_num_rows_limits_the_rows_read_over_all_files(config, tmp_path):
    (tmp_path / "more.csv").write_text("source,target\n" + "".join(f"more {i},m\n" for i in range(10)))
    files = [str(tmp_path / "more.csv"), str(tmp_path / "rows.csv")]
    rows = load_rows(replace(config, files=files, num_rows=13, eval_fraction=0.0))
    assert rows.train["prompt"][:] == [f"more {i}" for i in range(10)] + ["text 0", "text 1", "text 2"]
    assert len(load_rows(replace(config, files=files, num_rows=7, eval_fraction=0.0)).train) == 7


def test_eval_files_are_the_evaluation_rows_and_equal_rows_leave_training(config, tmp_path):
    (tmp_path / "held_out.csv").write_text("source,target\ntext 3,target 3\nnew text,n\n")
    rows = load_rows(replace(config, eval_files=[str(tmp_path / "held_out.csv")], num_rows=250))
    assert rows.evaluation["completion"][:] == ["target 3", "n"]
    assert rows.evaluation["row_id"][:] == [0, 1]
    assert len(rows.train) == 249 and "target 203" in rows.train["completion"][:]
    assert rows.train["row_id"][0] == 2
    assert rows.remarks == [
        f"skipped 1 of 250 rows of {tmp_path / 'rows.csv'} that equal a row of data.eval_files (row 4)",
        "training rows with the prompt of a row of data.eval_files, and something else: 1 of 249, which are kept",
    ]


def test_questions_about_one_document_are_rows_of_their_own(tmp_path):
    """With the document as system turn or first, and a question that is the same for all documents."""
    chats = [say("what is it?", f"answer {i}", system=f"document {i}") for i in range(100)]
    chats += [say(f"question {i}", "yes", system="the document") for i in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in (chats[3], chats[103])))
    config = LLMDataConfig(files=str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path / "cache"), eval_fraction=0.2)
    assert 15 <= len(load_rows(config).evaluation) <= 65  # 40 expected of 200 groups, standard deviation 6
    rows = load_rows(replace(config, eval_files=str(tmp_path / "eval.jsonl")))
    skipped = f"skipped 2 of 200 rows of {tmp_path / 'rows.jsonl'} that equal a row of data.eval_files (first: rows 4, 104)"
    assert (len(rows.train), len(rows.evaluation), rows.remarks) == (198, 2, [skipped])


def test_rows_that_only_start_alike_are_neither_copies_nor_one_group(config, tmp_path):
    """As a long instruction before every text."""
    rows = [f"{'the same instruction ' * 9}{i},target {i}\n" for i in range(50)]
    for name, some in (("rows.csv", rows), ("held_out.csv", rows[:5])):
        (tmp_path / name).write_text("source,target\n" + "".join(some))
    assert len(load_rows(replace(config, eval_files=[str(tmp_path / "held_out.csv")])).train) == 45
    apart = load_rows(replace(config, eval_fraction=0.5))
    assert 10 < len(apart.evaluation) < 40 and apart.remarks == []


def test_rows_that_repeat_earlier_ones_are_kept_and_counted(config, tmp_path):
    once, twice = tmp_path / "rows.csv", tmp_path / "twice.csv"
    twice.write_text(once.read_text() + "text 3,target 3\ntext 4,another target\n")
    for _ in range(2):  # the second time from the cache
        rows = load_rows(replace(config, files=[str(once), str(twice)], eval_fraction=0.0))
        assert rows.remarks == ["training rows that repeat an earlier row exactly: 401 of 802, which are kept"]
        assert len(rows.train) == 802


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
    assert refusal(load_rows, config) == f"{config.files}, row 1: a text of over 2 GiB: split it"


def test_fingerprint_is_of_contents_and_settings_and_not_of_paths_or_tokenizing(config, tmp_path):
    rows, changed, moved = str(tmp_path / "rows.csv"), str(tmp_path / "changed.csv"), str(tmp_path / "moved.csv")
    (tmp_path / "changed.csv").write_text((tmp_path / "rows.csv").read_text().replace("target 7\n", "target 8\n"))
    one, two = str(tmp_path / "one.csv"), str(tmp_path / "two.csv")
    for path in (one, two):
        (tmp_path / path).write_text(f"source,target\n{path},1\n")
    settings = [
        {},
        {"files": changed},
        {"num_rows": 399},
        {"eval_fraction": 0.3},
        {"source_column": "target", "target_column": "source"},
        {"files": [rows, one]},
        {"files": [one, rows]},
        {"eval_files": [one], "files": [two, rows]},
        {"eval_files": [one, two], "files": [rows]},
    ]
    prints = [load_rows(replace(config, **changes)).fingerprint for changes in settings]
    assert len(set(prints)) == len(settings)
    (tmp_path / "moved.csv").write_bytes((tmp_path / "rows.csv").read_bytes())
    for changes in ({"files": moved, "cache_dir": str(tmp_path / "other")}, {"prefix": "a: ", "max_source_length_tokens": 8}):
        assert load_rows(replace(config, **changes)).fingerprint == prints[0]


def test_second_load_comes_from_the_cache(config, tmp_path, monkeypatch):
    (tmp_path / "rows.csv").write_text("source,target\na,b\nc,\n")
    config = replace(config, eval_fraction=0.0)
    first = load_rows(config)
    monkeypatch.setattr(loading, "write_rows", None)  # called again, it would raise
    (tmp_path / "rows.csv").rename(tmp_path / "renamed.csv")
    second = load_rows(replace(config, files=str(tmp_path / "renamed.csv")))
    assert second.train[:] == first.train[:]
    assert second.remarks == [f"skipped 1 of 2 rows of {tmp_path / 'renamed.csv'} with an empty target (row 2)"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"files": None}, "data.source csv is a kind of file, not a dataset"),
        ({"source": "some/rows"}, "data.files is given, but data.source some/rows reads no files"),
        ({"source_column": "target"}, "data.source_column and data.target_column are both target: name two columns"),
        ({"eval_fraction": 1.0}, "all rows are held out, none is left to train on: lower data.eval_fraction"),
        ({"eval_files": "{here}/broken.csv"}, "broken.csv, line 3002: "),
        ({"eval_files": "{here}/empty.csv"}, "none of the 1 rows can be used: skipped 1 of 1 rows of {here}/empty.csv with"),
        ({"eval_files": "{here}/rows.csv"}, "none of the 400 rows can be used: "),
    ],
)
def test_rows_and_settings_that_leave_nothing_are_refused_and_nothing_is_cached(config, tmp_path, settings, sentence):
    (tmp_path / "broken.csv").write_text("source,target\n" + "a,b\n" * 3000 + "a,b,c\n")
    (tmp_path / "empty.csv").write_text("source,target\na,\n")
    settings = {key: value.format(here=tmp_path) if isinstance(value, str) else value for key, value in settings.items()}
    assert sentence.format(here=tmp_path) in refusal(load_rows, replace(config, **settings))
    assert not list((tmp_path / "cache").glob("rows/*"))


def test_fingerprints_of_rows_are_those_of_this_version_of_the_reader(tmp_path, monkeypatch):
    """A tokenizer that is trained on the rows is kept under them, so a run begun before could not go on with others. Raise
    `READER_VERSION` before these change."""
    monkeypatch.chdir(tmp_path)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "one"}]
    Path("a.csv").write_text("source,target,id\n" + "".join(f"text {i},t {i},{i}\n" for i in range(20)))
    rows = [{"messages": chat, "tools": [{"name": "add"}], "id": i} for i in range(3)]
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("own.py").write_text(
        'def load(config):\n    yield {"prompt": "a", "completion": "b"}\ndef identify(config): return "1"\n'
    )
    Path("a.txt").write_text("one\n\ntwo\n")
    settings = {"cache_dir": "c", "eval_fraction": 0.0}
    prints = [load_rows(DataConfig(source="csv", files="a.csv", **settings)).fingerprint]
    prints += [load_rows(LLMDataConfig(files="a.txt", **settings)).fingerprint]
    prints += [load_rows(LLMDataConfig(source="jsonl", files="a.jsonl", **settings)).fingerprint]
    prints += [load_rows(LLMDataConfig(source="own.py:load", **settings)).fingerprint]
    assert [fingerprint[:12] for fingerprint in prints] == ["308584b697f8", "43379670f534", "c9a4bc18b2e9", "6f9b10a734f2"]
