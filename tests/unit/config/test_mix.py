"""`data.mix` in the run config: a list of sections, from YAML and from a flag, with a sentence for each mistake."""

from __future__ import annotations

import json

import pytest

from tests.support.refusals import refusal
from toolkit.config.data import MixEntry
from toolkit.config.load import dotted_keys, load_config, save_config
from toolkit.config.schema import LLMConfig

BASE = ["--model.name_or_path", "x", "--train.max_steps", "3"]


def from_yaml(tmp_path, mix):
    (tmp_path / "run.yaml").write_text(f"data:\n{mix}\n")
    return load_config(LLMConfig, ["--config", str(tmp_path / "run.yaml"), *BASE])


def refuse(argv, *fragments):
    sentence = refusal(load_config, LLMConfig, [*argv, *BASE])
    for fragment in fragments:
        assert fragment in sentence


def test_yaml_and_flag_give_the_same_plain_entries(tmp_path):
    config = from_yaml(tmp_path, "  mix:\n  - {source: jsonl, files: a.jsonl, weight: 2}\n  - source: some/rows")
    assert config.data.mix == [MixEntry(source="jsonl", files="a.jsonl", weight=2.0), MixEntry(source="some/rows")]
    assert [type(entry.weight) for entry in config.data.mix] == [float, float]
    flag = json.dumps([{"source": "jsonl", "files": "a.jsonl", "weight": 2}, {"source": "some/rows"}])
    assert load_config(LLMConfig, ["--data.mix", flag, *BASE]) == config


def test_a_mix_may_be_given_entry_by_entry():
    flags = ["--data.mix", "{source: jsonl, files: a.jsonl, weight: 2}", '--data.mix=[{"source": "some/rows"}]']
    assert load_config(LLMConfig, [*flags, *BASE]).data.mix == [
        MixEntry(source="jsonl", files="a.jsonl", weight=2.0),
        MixEntry(source="some/rows"),
    ]


def test_a_mix_is_saved_read_again_and_flattened(tmp_path):
    config = from_yaml(tmp_path, "  mix:\n  - {source: jsonl, files: [a.jsonl], weight: 0.5}")
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(LLMConfig, ["--config", str(tmp_path / "saved.yaml")]) == config
    entry = {"source": "jsonl", "weight": 0.5, "files": ["a.jsonl"], "name": None}
    entry |= {"hub_subset": None, "hub_split": "train", "hub_eval_split": None}
    assert json.loads(json.dumps(dotted_keys(config)))["data.mix"] == [entry]


@pytest.mark.parametrize(
    ("mix", "fragments"),
    [
        ("  mix:\n  - source: jsonl\n    file: a", ["run.yaml, line 4: unknown key data.mix[0].file: did you mean files?"]),
        (
            "  mix:\n  - {source: some/rows}\n  - {source: some/rows, zzz: 1}",
            ["line 4: unknown key data.mix[1].zzz; known are source, f"],
        ),
        ("  mix:\n  - source: some/rows\n    weight: 0", ["line 4: data.mix[0].weight is 0: write a number above 0"]),
        ("  mix:\n  - weight: 2", ["data.mix[0] has no source and no files: give one of them"]),
        (
            "  mix: some/rows",
            ["line 2: data.mix is not a list of keys with values: write a list as in [{source: ..., weight: ...}"],
        ),
        ("  mix: null", ["line 2: data.mix is null: write a list as in [{source"]),
        ("  mix: [{source: csv}]", ["data.mix[0].source csv needs data.mix[0].files"]),
        (
            "  mix: [{source: some/rows}]\n  source: other/rows",
            ["data.source is given beside data.mix: move it into an entry of data.mix"],
        ),
        ("  mix: []", ["give data.files or data.source, or data.mix for several sources: none is given"]),
        ("  source: jsonl", ["data.source jsonl needs data.files"]),
    ],
)
def test_mistakes_in_the_file_are_reported(tmp_path, mix, fragments):
    (tmp_path / "run.yaml").write_text(f"data:\n{mix}\n")
    refuse(["--config", str(tmp_path / "run.yaml")], *fragments)


@pytest.mark.parametrize(
    ("mix", "fragment"),
    [
        ('[{"source": "jsonl", "file": "a.jsonl"}]', "--data.mix: unknown key data.mix[0].file: did you mean files?"),
        ('[{"source": "some/rows", "weight": "much"}]', "--data.mix[0].weight is much: write a number above 0"),
        ('[{"weight": 1}]', "data.mix[0] has no source and no files: give one of them"),
        ("some/rows", "--data.mix is not a list of keys with values: write a list as in"),
    ],
)
def test_mistakes_in_the_flag_are_reported(mix, fragment):
    refuse(["--data.mix", mix], fragment)
