"""Folders and hub datasets as `data.source`, without a network: which files a split is made of, and how they are read."""

import json
from pathlib import Path

import datasets
import pytest

from tests.support.refusals import refusal
from tests.support.rows import load_llm, load_t5, write
from toolkit.data.rows.load import TextRows


def write_readme(*lines: str) -> None:
    write("data/README.md", "\n".join(["---", "configs:", *lines, "---", ""]))


def load(source: str = "data", **settings) -> TextRows:
    return load_llm(source=source, **settings)


def texts(source: str = "data", **settings) -> list[str]:
    return load(source, **settings).train["text"][:]


def refused(source: str = "data", **settings) -> str:
    return refusal(load, source, **settings)


def test_a_folder_of_save_to_disk_is_read_by_its_splits():
    dataset = datasets.Dataset.from_dict({"text": ["one", "two", "three"]})
    dataset.save_to_disk("data", num_shards=2)
    datasets.load_from_disk("data").map(lambda row: {"text": row["text"].upper()})
    assert list(Path("data").glob("cache-*.arrow"))
    assert texts() == ["one", "two", "three"]
    assert load().readings[0] == "data: split train is data-00000-of-00002.arrow, data-00001-of-00002.arrow, by save_to_disk"
    datasets.DatasetDict(train=dataset, test=dataset.select([2, 0])).save_to_disk("both")
    assert texts("both", hub_split="test") == ["three", "one"]
    assert load("both", hub_eval_split="test").evaluation["text"][:] == ["three", "one"]
    assert refused("both", hub_split="dev") == (
        "data.source both has no split dev, but train and test: set data.hub_split to one of them"
    )
    Path("both/train/state.json").write_text('{"_data_files": [{"filename": "../../secret.csv"}]}')
    assert refused("both").startswith("data.source both holds a link out of it or names a file there, ")


def test_the_files_of_a_split_and_those_left_out_are_named():
    for name in ("train-1.jsonl", "train-0.json", "test-0.jsonl", "more.jsonl", ".hidden.jsonl", "notes.txt"):
        write(f"data/{name}", json.dumps({"text": name}))
    assert texts() == ["train-0.json", "train-1.jsonl"]
    left_out = "; left out: more.jsonl, notes.txt, test-0.jsonl (split test), .hidden.jsonl"
    assert load().readings[0] == f"data: split train is train-0.json, train-1.jsonl{left_out}"
    of_test = load(hub_split="test").readings[0]
    assert of_test.startswith("data: split test is test-0.jsonl; left out: more.jsonl, notes.txt, train-0")
    for name in ("a\x1b]0;.csv", ".b\nc"):
        write(f"escaped/{name}")
    assert load("escaped").readings[0] == r"escaped: split train is a\x1b]0;.csv; left out: .b\nc"
    write("states/state.json", '[{"text": "Ohio"}]')  # no folder of save_to_disk
    assert texts("states") == ["Ohio"]


def test_notes_are_not_taken_for_rows_beside_tables():
    for name in ("rows.jsonl", "LICENSE.txt", "NOTES.txt"):
        write(f"data/{name}", '{"text": "a"}\n')
    assert refused() == "data.source data holds LICENSE.txt, NOTES.txt and rows.jsonl: name files in data.files"
    Path("data/NOTES.txt").unlink()
    assert load().readings[0] == "data: split train is rows.jsonl; left out: LICENSE.txt"


@pytest.mark.parametrize("said", ["dataset_info: [1]", "configs: [1]", "configs: [{config_name: a, data_dir: 5}]", "x: ["])
def test_a_readme_of_another_form_is_one_sentence(said):
    write("data/rows.csv")
    write("data/README.md", f"---\n{said}\n---\n")
    assert refused().startswith("data.source data (subset None, split train) could not be loaded: ")


def test_an_unknown_split_is_refused_with_the_files_of_the_others():
    write("data/test-notes.jsonl", '{"text": "a"}\n')
    sentence = (
        "data.source data has no split {}, but test (test-notes.jsonl), by its README, else by the names of "
        "files and folders: set data.hub_split or data.hub_eval_split, or name files in data.files"
    )
    assert refused() == sentence.format("train")
    assert refused(hub_split="test[:1]") == sentence.format("test[:1]")


def test_rows_are_read_as_those_of_files():
    write("data/a.csv", 'text;n\n"NA";1\nnull;2\n007;3\n')
    assert texts(csv_delimiter=";") == ["007"]
    write("lines/a.jsonl", '{"text": "a", "n": 1}\n{"text": "b", "n": "x"}\n')
    assert texts("lines") == ["a", "b"]
    first = load("lines").fingerprint
    Path("lines").rename("moved")
    assert load("moved").fingerprint == first == load("", files="moved/a.jsonl").fingerprint


def test_a_readme_chooses_subsets_and_splits():
    for name in ("a", "b", "c"):
        write(f"data/parts/{name}.csv", f"text\n{name}\n")
    write_readme(
        "- config_name: small",
        "  data_files: [{split: train, path: parts/a.csv}, {split: test, path: parts/b.*}]",
        "- {config_name: all, default: true, data_files: ./parts/*.csv}",
    )
    assert texts() == ["a", "b", "c"]
    assert texts(hub_subset="small") == ["a"] and texts(hub_subset="small", hub_split="test") == ["b"]
    assert "subset none" in refused(hub_subset="none") and "BuilderConfig 'none' not found" in refused(hub_subset="none")
    write_readme("- config_name: default", "  data_files: none.csv")
    assert refused().endswith(f" could not be loaded: Unable to find '{Path.cwd()}/data/none.csv'")
    # What only `datasets` can read is read by it.
    write("data/a.csv", "text;n\na;1\n")
    write_readme("- config_name: default", "  data_files: a.csv", '  sep: ";"')
    assert texts() == ["a"]
    assert load().readings == [
        "data: split train is a.csv; left out: parts/a.csv, parts/b.csv, parts/c.csv",
        "data: read as text, from text; not read: n",
    ]


ARTICLES = {"source": "./dataset", "source_column": "article", "target_column": "summary"}


@pytest.fixture
def articles() -> None:
    """A dataset with 40 training rows, of which the first has no target, and three rows of a split `test`."""
    Path("dataset").mkdir()
    train = [{"article": f"text {i}", "summary": f"t {i}" if i else None, "id": i} for i in range(40)]
    test = [train[7], train[8] | {"summary": "other"}, {"article": "only", "summary": "one", "id": 0}]
    for split, rows in (("train", train), ("test", test)):
        datasets.Dataset.from_list(rows).to_parquet(f"dataset/{split}-0.parquet")


def test_a_split_of_its_own_is_evaluated(articles):
    own = {**ARTICLES, "eval_fraction": 0.5, "hub_eval_split": "test", "num_rows": 10}
    rows = load_t5(**own)
    of_test = ["text 7", "text 8", "only"]
    assert rows.evaluation["prompt"][:] == of_test and [item.set_name for item in rows.inputs] == ["", ""]
    assert rows.train["prompt"][:] == [f"text {i}" for i in range(1, 10) if i != 7]
    assert "that equal a row of data.hub_eval_split (row 8)" in " ".join(rows.remarks)
    assert "a row of data.hub_eval_split, and something else: 1 of 8" in " ".join(rows.remarks)
    # Beside named files it is a set, and files without names are none.
    write("held_out.csv", "article,summary\nown text,own\n")
    for files, names in (({"mail": "held_out.csv"}, ["mail", "test"]), ("held_out.csv", ["", ""])):
        rows = load_t5(**own, eval_files=files)
        assert [item.set_name for item in rows.inputs][:2] == names
        assert rows.evaluation["prompt"][:] == ["own text", *of_test]


NO_DATASET = "not one of csv, tsv, json, jsonl, parquet, arrow, txt, not a local folder and not in the local cache, and the hub"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"hub_eval_split": "dev"}, "./dataset has no split dev, but train (train-0.parquet) and test (test-0.parquet)"),
        ({"source": "csv", "files": "a.csv", "hub_eval_split": "b"}, "data.hub_eval_split is b, but csv has no splits: leave it"),
        ({"source_column": None}, "has no column 'source' (its columns: article, summary, id)"),
        ({"source_column": "id", "target_column": "article"}, "row 1, column id: 0 is of type int, not text"),
        ({"source": "./empty"}, "data.source ./empty (subset None, split train) could not be loaded: "),
        ({"source": "./dataset/train-0.parquet"}, "data.source ./dataset/train-0.parquet is a file: give it in data.files, and"),
        ({"source": "./no_such_folder"}, "data.source ./no_such_folder: there is no such folder"),
        ({"source": "some/dataset"}, f"data.source some/dataset is {NO_DATASET} cannot be reached: check the name"),
        ({"source": "./zip"}, "data.source ./zip (subset None, split train) could not be loaded: File is not a zip file"),
        ({"source": "./cut"}, "cut/train-0.parquet is not a complete parquet or Arrow file"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(settings, sentence, articles):
    Path("empty").mkdir()
    write("zip/rows.zip", "PK\x03\x04, and no more")
    Path("cut").mkdir()
    Path("cut/train-0.parquet").write_bytes(Path("dataset/train-0.parquet").read_bytes()[:200])
    assert sentence in refusal(load_t5, **ARTICLES | settings)
