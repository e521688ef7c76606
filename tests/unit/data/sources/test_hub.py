"""Hub datasets and local dataset folders, without a network."""

import contextlib

import pytest

from tests.support.refusals import refusal
from toolkit.config.data import DataConfig
from toolkit.data.rows.load import load_rows


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A local folder with a training and a test split in parquet."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    folder = tmp_path / "dataset"
    folder.mkdir()
    train = {
        "article": [f"text {i}" for i in range(40)],
        "summary": [f"t {i}" if i else None for i in range(40)],
        "id": range(40),
    }
    pq.write_table(pa.table(train), folder / "train-0.parquet")
    pq.write_table(pa.table({"article": ["only"], "summary": ["one"], "id": [0]}), folder / "test-0.parquet")
    return {
        "source": str(folder),
        "source_column": "article",
        "target_column": "summary",
        "eval_fraction": 0.0,
        "cache_dir": str(tmp_path / "cache"),
    }


def refuse(config, *fragments, **settings):
    sentence = refusal(load_rows, DataConfig(**{**config, **settings}))
    for fragment in fragments:
        assert fragment in sentence


def test_local_folder_is_read_split_and_reported(config):
    rows = load_rows(DataConfig(**config))
    assert rows.train["prompt"][:] == [f"text {i}" for i in range(1, 40)]
    assert rows.remarks == [f"skipped 1 of 40 rows of {config['source']}/train-0.parquet with an empty target (row 1)"]
    few = load_rows(DataConfig(**{**config, "num_rows": 10, "eval_fraction": 0.5}))
    assert len(few.train) + len(few.evaluation) == 9 and len(few.evaluation)


def test_a_split_of_its_own_is_evaluated(config, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    of_test = {"article": ["only", "text 7", "text 8"], "summary": ["one", "t 7", "other"], "id": range(3)}
    pq.write_table(pa.table(of_test), tmp_path / "dataset" / "test-0.parquet")
    own = {**config, "eval_fraction": 0.5, "hub_eval_split": "test", "num_rows": 10}
    rows = load_rows(DataConfig(**own))
    assert rows.evaluation["prompt"][:] == of_test["article"] and [item.set_name for item in rows.inputs] == ["", ""]
    assert rows.train["prompt"][:] == [f"text {i}" for i in range(1, 10) if i != 7]
    assert "that equal a row of data.hub_eval_split (row 8)" in " ".join(rows.remarks)
    assert "a row of data.hub_eval_split, and something else: 1 of 8" in " ".join(rows.remarks)
    # Beside named files it is a set, and files without names are none.
    (tmp_path / "held_out.csv").write_text("article,summary\nown text,own\n")
    for files, names in (({"mail": "held_out.csv"}, ["mail", "test", ""]), ("held_out.csv", ["", "", ""])):
        with contextlib.chdir(tmp_path):
            rows = load_rows(DataConfig(**own, eval_files=files))
        assert [item.set_name for item in rows.inputs][:2] == names[:2]
        assert rows.evaluation["prompt"][:] == ["own text", *of_test["article"]]
    refuse(config, "has no split dev, but train (train-0.parquet) and test (test-0.parquet)", hub_eval_split="dev")
    files = {"source": "csv", "files": str(tmp_path / "held_out.csv"), "hub_eval_split": "test"}
    refuse(config, "data.hub_eval_split is test, but csv has no splits: leave it out, or name evaluation files in", **files)


def test_what_cannot_be_read_is_one_sentence(config, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    path = tmp_path / "dataset" / "train-0.parquet"
    damaged = {"rows.zip": "not a zip file", "rows.jsonl.xz": "Input format", "rows.tar": "truncated", "rows.h5": "be loaded: "}
    for name in ("empty", *damaged):
        (tmp_path / name).mkdir()
    for name in damaged:
        (tmp_path / name / name).write_bytes(b"PK\x03\x04, and no more")
    refuse(config, "has no column 'source' (its columns: article, summary, id)", source_column=None)
    refuse(config, "row 1, column id: 0 is of type int, not text", source_column="id", target_column="article")
    for source, fragments in {
        str(tmp_path / "empty"): [f"data.source {tmp_path / 'empty'}", "doesn't contain any data files"],
        str(path): [f"data.source {path} is a file: give it in data.files, and leave data.source out"],
        "./no_such_folder": ["data.source ./no_such_folder: there is no such folder"],
        "some/dataset": ["data.source some/dataset is not one of csv", "the hub cannot be reached"],
        "cvs": ["data.source cvs is not one of csv, tsv"],
        **{str(tmp_path / name): [f"{name} (subset None, split train)", reason] for name, reason in damaged.items()},
    }.items():
        refuse(config, *fragments, source=source)
    path.write_bytes(path.read_bytes()[:200])
    refuse(config, f"{path} is not a complete parquet or Arrow file")
