"""Relative paths of a run YAML: where they lead, what is refused, and that a run's own config leads there from anywhere. Which
evaluation sets a data section names, names that no figure could have, and `data.mix`: from a YAML and from flags. A config read
from Python: the same keys, values and sentences as on a command line."""

import json
from pathlib import Path

import pytest
import yaml
from mnist_config import MnistConfig, check_mnist_config

import toolkit
from tests.support.refusals import refusal
from toolkit.config.data import LLMDataConfig, MixEntry
from toolkit.config.load import dotted_keys, load_config, save_config
from toolkit.config.schema import LLMConfig, SummarizationConfig
from toolkit.config.validate import check_set_names, list_sets, name_entries
from toolkit.errors import UserError

TEXT = """
model: {name_or_path: models/base, init_from: old}
adapter: {name_or_path: adapter}
data: {source: csv, files: ["rows/*.csv", one.csv], eval_files: held_out.csv, cache_dir: cache}
train: {max_steps: 3}
checkpoint: {resume: auto}
run: {output_dir: runs}
"""
PATHS = {
    "model.name_or_path": "models/base", "model.init_from": "old", "adapter.name_or_path": "adapter",
    "data.files": ["rows/*.csv", "one.csv"], "data.eval_files": "held_out.csv", "data.cache_dir": "cache",
    "checkpoint.resume": "auto", "run.output_dir": "runs",
}  # fmt: skip


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A folder with a run YAML and what it names; the working directory is it, and there is an empty one beside."""
    folder = tmp_path / "project"
    for name in ("models/base", "old", "adapter", "rows", "cache", "runs/run"):
        (folder / name).mkdir(parents=True)
    for name in ("rows/a.csv", "rows/b.csv", "one.csv", "held_out.csv", "auto"):
        (folder / name).touch()
    (folder / "run.yaml").write_text(TEXT)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(folder)
    return folder


def paths(file: str | Path, *flags: str) -> dict:
    keys = dotted_keys(load_config(SummarizationConfig, [f"--config={file}", *flags]))
    return {key: keys[key] for key in PATHS}


def test_paths_are_found_in_the_working_directory_or_beside_the_yaml(project, monkeypatch):
    assert paths("run.yaml") == PATHS
    monkeypatch.chdir(project.parent / "elsewhere")
    beside = {key: f"../project/{value}" for key, value in PATHS.items() if isinstance(value, str)}
    stay = {key: PATHS[key] for key in ("data.cache_dir", "checkpoint.resume", "run.output_dir")}
    expected = {**beside, **stay, "data.files": ["../project/rows/*.csv", "../project/one.csv"]}
    assert paths("../project/run.yaml") == paths(project / "run.yaml") == expected
    (project / "run.yaml").rename("run.yaml")
    monkeypatch.chdir(project)
    assert paths("../elsewhere/run.yaml") == PATHS


@pytest.mark.parametrize(
    ("name", "value"), [("one.csv", "one.csv"), ("rows/c.csv", "rows/*.csv"), ("models/base", "models/base")]
)
def test_what_is_in_both_places_is_refused(project, monkeypatch, name, value):
    other = project.parent / "elsewhere" / name
    other.parent.mkdir(parents=True, exist_ok=True)
    other.touch()
    monkeypatch.chdir(project.parent / "elsewhere")
    sentence = refusal(paths, project / "run.yaml")
    key, line = ("model.name_or_path", 2) if "models" in name else ("data.files", 4)
    there = project / value.replace("*", "a")
    assert sentence == (
        f"{project / 'run.yaml'}, line {line}: {key} {value} is in the working directory ({other}) and beside the run YAML "
        f"({there}): write the full path, or give it as a flag, which is relative to the working directory"
    )
    assert paths(project / "run.yaml", f"--{key}={value}")[key] == value
    other.unlink()
    other.symlink_to(there)  # one and the same
    if "*" not in value:
        found = paths(project / "run.yaml")[key]
        assert value in (found if isinstance(found, list) else [found])


def test_names_that_are_no_paths_stay(project, monkeypatch):
    for name in ("corpus", "text", "{{ messages }}", "Qwen"):
        (project / name).mkdir()
    (project / "my_rows.py").touch()
    of_code = "{source: 'my_rows.py:one'}, {source: 'no_rows.py:two'}, {source: 'user/data.py'}"
    entries = f"[{{source: corpus}}, {{source: jsonl, files: one.csv}}, {{source: ./text}}, {of_code}]"
    named = "{news: one.csv, mail: [one.csv, gone.csv]}"
    data = f"data: {{mix: {entries}, chat_template: '{{% a %}}', eval_files: {named}}}"
    (project / "llm.yaml").write_text(f"model: {{name_or_path: Qwen/Qwen2.5-7B}}\n{data}\ntrain: {{max_steps: 3}}\n")
    monkeypatch.chdir(project.parent / "elsewhere")
    config = load_config(LLMConfig, [f"--config={project / 'llm.yaml'}"])
    assert (config.model.name_or_path, config.data.chat_template) == ("Qwen/Qwen2.5-7B", "{% a %}")
    found = [(entry.source, entry.files) for entry in config.data.mix]
    assert found[:3] == [("corpus", None), ("jsonl", "../project/one.csv"), ("../project/text", None)]
    assert [source for source, _ in found[3:]] == ["../project/my_rows.py:one", "no_rows.py:two", "user/data.py"]
    assert config.data.eval_files == {"news": "../project/one.csv", "mail": ["../project/one.csv", "gone.csv"]}
    (project / "mnist.yaml").write_text("data: {source: idx, folder: rows}\ntrain: {max_steps: 3}\n")
    images = load_config(MnistConfig, [f"--config={project / 'mnist.yaml'}"], check=check_mnist_config)
    assert images.data.folder == "../project/rows"


def test_a_file_of_ones_own_rows_is_a_path(project, monkeypatch):
    (project / "my_rows.py").touch()
    (project / "t5.yaml").write_text("model: {name_or_path: m}\ndata: {source: 'my_rows.py:one'}\ntrain: {max_steps: 3}\n")
    elsewhere = project.parent / "elsewhere"
    monkeypatch.chdir(elsewhere)
    config = load_config(SummarizationConfig, [f"--config={project / 't5.yaml'}"])
    assert config.data.source == "../project/my_rows.py:one"
    save_config(config, project / "runs" / "run" / "config.yaml")
    saved = load_config(SummarizationConfig, [f"--config={project / 'runs' / 'run' / 'config.yaml'}"])
    assert saved.data.source == "../project/my_rows.py:one"
    (elsewhere / "my_rows.py").touch()
    with pytest.raises(UserError, match=r"t5.yaml, line 2: data.source my_rows.py is in the working directory \("):
        load_config(SummarizationConfig, [f"--config={project / 't5.yaml'}"])
    by_flag = load_config(SummarizationConfig, [f"--config={project / 't5.yaml'}", "--data.source=my_rows.py:one"])
    assert by_flag.data.source == "my_rows.py:one"


def test_a_saved_config_leads_to_the_same_from_anywhere(project, monkeypatch):
    run = project / "runs" / "run"
    save_config(load_config(SummarizationConfig, ["--config=run.yaml"]), run / "config.yaml")
    written = yaml.safe_load((run / "config.yaml").read_text())
    assert written["model"]["name_or_path"] == "../../models/base"
    assert written["data"]["files"] == ["../../rows/*.csv", "../../one.csv"]
    assert paths(run / "config.yaml") == PATHS
    monkeypatch.chdir(run)
    assert paths("config.yaml")["model.name_or_path"] == "../../models/base"
    moved = project.rename(project.parent / "moved")
    monkeypatch.chdir(moved.parent / "elsewhere")
    assert paths(moved / "runs" / "run" / "config.yaml")["model.init_from"] == "../moved/old"


NAMED = {"news": ["a.csv", "b.csv"], "mail": "c.csv"}


def test_an_entry_is_named_by_its_name_its_source_or_its_place():
    entries = [MixEntry(source=source) for source in ("rows", "jsonl", "some/chats", "jsonl", "a/my_rows.py:f", "b/my_rows.py:f")]
    entries += [MixEntry(files="a.csv"), MixEntry(files="b.csv", name="mail"), MixEntry(source="mail")]
    names = ["rows", "mix[1]", "chats", "mix[3]", "mix[4]", "mix[5]", "mix[6]", "mail", "mix[8]"]
    assert name_entries(LLMDataConfig(mix=entries)) == list_sets(LLMDataConfig(mix=entries)) == names
    assert name_entries(LLMDataConfig(mix=entries[:1])) == name_entries(LLMDataConfig(source="rows")) == [""]


SPLIT = MixEntry(source="b", hub_eval_split="validation")


@pytest.mark.parametrize(
    ("settings", "sets"),
    [
        ({"mix": [MixEntry(source="rows", name="own")]}, ["own"]),
        ({"mix": [MixEntry(source="a"), MixEntry(source="b")], "eval_files": "rows.csv"}, []),
        ({"mix": [MixEntry(source="a"), SPLIT]}, ["b"]),
        ({"mix": [MixEntry(source="a"), SPLIT], "eval_files": NAMED}, ["news", "mail", "b"]),
        ({"source": "a", "hub_eval_split": "validation"}, []),
        ({"source": "a", "hub_eval_split": "validation", "eval_files": NAMED}, ["news", "mail", "validation"]),
        ({"mix": [MixEntry(source="a/news", hub_eval_split="validation"), SPLIT], "eval_files": "news.csv"}, ["news", "b"]),
        ({"mix": [MixEntry(source="a/news", hub_eval_split="validation"), SPLIT], "eval_files": ["news"]}, ["news", "b"]),
    ],
)
def test_only_entries_with_evaluation_rows_are_sets(settings, sets):
    data = LLMDataConfig(**settings)
    assert list_sets(data) == sets
    check_set_names(data, {"loss"})


UNFIT = ("a/b", "", " ", "a\nb", 2024)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        *(({"eval_files": {name: "a.csv"}}, f"data.eval_files names an evaluation set {name!r}: take a") for name in UNFIT),
        ({"eval_files": {"news": []}}, "data.eval_files has no file under the name news: give one, or leave the name"),
        ({"mix": [MixEntry(source="a", name="loss"), MixEntry(source="b")]}, "data.mix names an evaluation set loss, which is"),
    ],
)
def test_names_that_no_metric_could_have_are_refused(settings, sentence):
    assert refusal(check_set_names, LLMDataConfig(**settings), {"loss"}).startswith(sentence)


OF_MIX = ["--model.name_or_path", "x", "--train.max_steps", "3"]


def test_yaml_and_flags_give_the_same_plain_entries_and_named_files_which_are_saved_and_flattened(tmp_path):
    lines = ["{source: jsonl, files: a.jsonl, weight: 2}", "{files: [b.jsonl, c.txt], name: news}", '{"source": "some/rows"}']
    named = "{news: [a.csv, b.csv], mail: c.csv}"
    (tmp_path / "run.yaml").write_text(f"data:\n  eval_files: {named}\n  mix:\n" + "".join(f"  - {line}\n" for line in lines))
    config = load_config(LLMConfig, ["--config", str(tmp_path / "run.yaml"), *OF_MIX])
    assert config.data.mix == [
        MixEntry(source="jsonl", files="a.jsonl", weight=2.0),
        MixEntry(files=["b.jsonl", "c.txt"], name="news"),  # read by the endings of its files
        MixEntry(source="some/rows"),
    ]
    assert config.data.eval_files == NAMED and list_sets(config.data) == ["news", "mail"]
    assert [type(entry.weight) for entry in config.data.mix] == [float] * 3
    by_name = ["--data.eval_files.news", "[a.csv, b.csv]", "--data.eval_files.mail=c.csv"]
    for flags in (
        ["--data.mix", f"[{', '.join(lines)}]", "--data.eval_files", named],
        ["--data.mix", lines[0], "--data.mix", lines[1], f"--data.mix=[{lines[2]}]", *by_name],
    ):
        assert load_config(LLMConfig, [*flags, *OF_MIX]) == config
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
    assert sentence in refusal(load_config, LLMConfig, [*flags, *OF_MIX])


NEEDED = {"model.name_or_path": "model", "train.max_steps": 2}


def test_values_of_python_are_those_of_flags(tmp_path):
    (tmp_path / "run.yaml").write_text("model: {name_or_path: a}\ntrain: {max_steps: 3}\ndata: {source: csv, files: [x]}\n")
    overrides = {
        "optim.lr": 1e-7, "data.files": ["a.csv", tmp_path / "b.csv"], "eval.generate": False, "optim.max_grad_norm": None,
        "run.name": "7", "run.output_dir": tmp_path, "data.mix": [],
    }  # fmt: skip
    flags = [
        "--optim.lr=1e-7", "--data.files=a.csv", f"--data.files={tmp_path / 'b.csv'}", "--eval.generate=false",
        "--optim.max_grad_norm=null", "--run.name=7", f"--run.output_dir={tmp_path}",
    ]  # fmt: skip
    config = toolkit.load_config("llm", tmp_path / "run.yaml", overrides)
    assert config == load_config(LLMConfig, ["--config", str(tmp_path / "run.yaml"), *flags])
    assert config.run.name == "7" and config.optim.max_grad_norm is None


@pytest.mark.parametrize(
    ("recipe", "config_class", "of_several"),
    [("t5", SummarizationConfig, ""), ("llm", LLMConfig, ", or data.mix for several sources")],
)
def test_the_rows_may_come_later_but_only_in_python_and_other_mistakes_have_the_same_sentences(recipe, config_class, of_several):
    assert not toolkit.load_config(recipe, overrides=NEEDED).data.source
    flags = [f"--{key}={value}" for key, value in NEEDED.items()]
    assert refusal(load_config, config_class, flags) == f"give data.files or data.source{of_several}: none is given"
    in_python = refusal(toolkit.load_config, recipe, overrides=NEEDED | {"data.source": "csv"})
    assert in_python == "data.source csv needs data.files"
    assert refusal(toolkit.load_config, "bert") == "recipe is 'bert': choose one of t5, llm, dpo, dpo_t5"
