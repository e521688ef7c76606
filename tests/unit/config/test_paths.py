"""Relative paths of a run YAML: where they lead, what is refused, and that a run's own config leads there from anywhere."""

from pathlib import Path

import pytest
import yaml
from mnist_config import MnistConfig, check_mnist_config

from tests.support.refusals import refusal
from toolkit.config.load import dotted_keys, load_config, save_config
from toolkit.config.schema import LLMConfig, SummarizationConfig
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
    entries = "[{source: corpus}, {source: jsonl, files: one.csv}, {source: ./text}]"
    named = "{news: one.csv, mail: [one.csv, gone.csv]}"
    data = f"data: {{mix: {entries}, chat_template: '{{% a %}}', eval_files: {named}}}"
    (project / "llm.yaml").write_text(f"model: {{name_or_path: Qwen/Qwen2.5-7B}}\n{data}\ntrain: {{max_steps: 3}}\n")
    monkeypatch.chdir(project.parent / "elsewhere")
    config = load_config(LLMConfig, [f"--config={project / 'llm.yaml'}"])
    assert (config.model.name_or_path, config.data.chat_template) == ("Qwen/Qwen2.5-7B", "{% a %}")
    found = [(entry.source, entry.files) for entry in config.data.mix]
    assert found == [("corpus", None), ("jsonl", "../project/one.csv"), ("../project/text", None)]
    assert config.data.eval_files == {"news": "../project/one.csv", "mail": ["../project/one.csv", "gone.csv"]}
    (project / "mnist.yaml").write_text("data: {source: idx, folder: rows}\ntrain: {max_steps: 3}\n")
    images = load_config(MnistConfig, [f"--config={project / 'mnist.yaml'}"], check=check_mnist_config)
    assert images.data.folder == "../project/rows"


def test_a_file_of_ones_own_rows_is_a_path(project, monkeypatch):
    (project / "my_rows.py").touch()
    mix = "[{source: 'my_rows.py:one'}, {source: 'no_rows.py:two'}, {source: 'user/data.py'}]"
    (project / "t5.yaml").write_text("model: {name_or_path: m}\ndata: {source: 'my_rows.py:one'}\ntrain: {max_steps: 3}\n")
    (project / "llm.yaml").write_text(f"model: {{name_or_path: m}}\ndata: {{mix: {mix}}}\ntrain: {{max_steps: 3}}\n")
    elsewhere = project.parent / "elsewhere"
    monkeypatch.chdir(elsewhere)
    config = load_config(SummarizationConfig, [f"--config={project / 't5.yaml'}"])
    assert config.data.source == "../project/my_rows.py:one"
    save_config(config, project / "runs" / "run" / "config.yaml")
    saved = load_config(SummarizationConfig, [f"--config={project / 'runs' / 'run' / 'config.yaml'}"])
    assert saved.data.source == "../project/my_rows.py:one"
    entries = load_config(LLMConfig, [f"--config={project / 'llm.yaml'}"]).data.mix
    assert [entry.source for entry in entries] == ["../project/my_rows.py:one", "no_rows.py:two", "user/data.py"]
    (elsewhere / "my_rows.py").touch()
    with pytest.raises(UserError, match=r"t5.yaml, line 2: data.source my_rows.py is in the working directory \("):
        load_config(SummarizationConfig, [f"--config={project / 't5.yaml'}"])
    by_flag = load_config(SummarizationConfig, [f"--config={project / 't5.yaml'}", "--data.source=my_rows.py:one"])
    assert by_flag.data.source == "my_rows.py:one"


def test_a_saved_config_leads_to_the_same_from_anywhere(project, monkeypatch):
    run = project / "runs" / "run"
    save_config(load_config(SummarizationConfig, ["--config=run.yaml"]), run / "config.yaml")
    written = yaml.safe_load((run / "config.yaml").read_text())
    assert (written["model"]["name_or_path"], written["data"]["files"]) == (
        "../../models/base",
        ["../../rows/*.csv", "../../one.csv"],
    )
    assert paths(run / "config.yaml") == PATHS
    monkeypatch.chdir(run)
    assert paths("config.yaml")["model.name_or_path"] == "../../models/base"
    moved = project.rename(project.parent / "moved")
    monkeypatch.chdir(moved.parent / "elsewhere")
    assert paths(moved / "runs" / "run" / "config.yaml")["model.init_from"] == "../moved/old"
