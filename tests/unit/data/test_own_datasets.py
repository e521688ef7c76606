"""Datasets given by Python code: what is refused, and the files that stand for them."""

from pathlib import Path

import datasets

from tests.support.refusals import refusal
from tests.support.rows import load_rows
from toolkit import load_config
from toolkit.data.sources.own_function import check_datasets, save_datasets

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
