"""`data.mix` in the run config: a list of sections, from YAML and from a flag, with a sentence for each mistake."""

from __future__ import annotations

import json

import pytest

from tests.support.refusals import refusal
from toolkit.config.data import MixEntry
from toolkit.config.load import dotted_keys, load_config, save_config
from toolkit.config.schema import LLMConfig

BASE = ["--model.name_or_path", "x", "--train.max_steps", "3"]


def test_yaml_and_flags_give_the_same_plain_entries_which_are_saved_and_flattened(tmp_path):
    lines = ["{source: jsonl, files: a.jsonl, weight: 2}", "{files: [b.jsonl, c.txt], name: news}", '{"source": "some/rows"}']
    (tmp_path / "run.yaml").write_text("data:\n  mix:\n" + "".join(f"  - {line}\n" for line in lines))
    config = load_config(LLMConfig, ["--config", str(tmp_path / "run.yaml"), *BASE])
    assert config.data.mix == [
        MixEntry(source="jsonl", files="a.jsonl", weight=2.0),
        MixEntry(files=["b.jsonl", "c.txt"], name="news"),  # read by the endings of its files
        MixEntry(source="some/rows"),
    ]
    assert [type(entry.weight) for entry in config.data.mix] == [float] * 3
    for flags in (
        ["--data.mix", f"[{', '.join(lines)}]"],
        ["--data.mix", lines[0], "--data.mix", lines[1], f"--data.mix=[{lines[2]}]"],
    ):
        assert load_config(LLMConfig, [*flags, *BASE]) == config
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(LLMConfig, ["--config", str(tmp_path / "saved.yaml")]) == config
    entry = {"source": "jsonl", "weight": 2.0, "files": "a.jsonl", "name": None}
    entry |= {"hub_subset": None, "hub_split": "train", "hub_eval_split": None}
    assert json.loads(json.dumps(dotted_keys(config)))["data.mix"][0] == entry


FORM = "is not a list of keys with values: write a list as in [{source: ..., weight: ...}"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("  mix:\n  - source: jsonl\n    file: a", "run.yaml, line 4: unknown key data.mix[0].file: did you mean files?"),
        ("  mix:\n  - {source: a/b}\n  - {source: a/b, z: 1}", "line 4: unknown key data.mix[1].z; known are source, f"),
        ("  mix:\n  - source: some/rows\n    weight: 0", "line 4: data.mix[0].weight is 0: write a number above 0"),
        ("  mix:\n  - weight: 2", "data.mix[0] has no source and no files: give one of them"),
        ("  mix: some/rows", f"line 2: data.mix {FORM}"),
        ("  mix: null", "line 2: data.mix is null: write a list as in [{source"),
        ("  mix: [{source: csv}]", "data.mix[0].source csv needs data.mix[0].files"),
        ("  mix: [{source: a/b}]\n  source: c/d", "data.source is given beside data.mix: move it into an entry of data.mix"),
        ("  mix: []", "give data.files or data.source, or data.mix for several sources: none is given"),
        ("  source: jsonl", "data.source jsonl needs data.files"),
        ('[{"source": "jsonl", "file": "a.jsonl"}]', "--data.mix: unknown key data.mix[0].file: did you mean files?"),
        ('[{"source": "some/rows", "weight": "much"}]', "--data.mix[0].weight is much: write a number above 0"),
        ('[{"weight": 1}]', "data.mix[0] has no source and no files: give one of them"),
        ("some/rows", f"--data.mix {FORM}"),
    ],
)
def test_mistakes_in_the_file_and_in_the_flag_are_reported(tmp_path, given, sentence):
    (tmp_path / "run.yaml").write_text(f"data:\n{given}\n")
    flags = ["--config", str(tmp_path / "run.yaml")] if given.startswith("  ") else ["--data.mix", given]
    assert sentence in refusal(load_config, LLMConfig, [*flags, *BASE])
