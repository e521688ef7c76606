"""The run config: YAML and flags, what is refused and in which words, and what is written back."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from mnist_config import MnistConfig

from tests.support.launch import REPOSITORY
from tests.support.refusals import refusal
from toolkit.config.load import dotted_keys, load_config, save_config
from toolkit.config.messages import known_keys
from toolkit.config.schema import OptimConfig, SummarizationConfig
from toolkit.config.validate import check_evaluation_rows, check_num_steps
from toolkit.optimizers import with_defaults

REQUIRED = ["--model.name_or_path", "folder", "--data.source", "not/read", "--train.max_steps", "20"]


WRONG_FLAG = """
import runpy, sys
sys.argv = ["t5.py", "--optim.lrr", "3"]
try:
    runpy.run_path("recipes/t5.py", run_name="__main__")
except SystemExit as end:
    print(end.code, sorted({"torch", "transformers", "datasets", "accelerate"} & set(sys.modules)))
"""


def load(*flags: str) -> SummarizationConfig:
    return load_config(SummarizationConfig, [*REQUIRED, *flags])


def refused(*flags: str) -> str:
    sentence = refusal(load, *flags)
    assert "typing." not in sentence and "<class" not in sentence, sentence
    return sentence


def test_flags_win_over_the_yaml_wherever_they_stand_and_later_files_over_earlier_ones(tmp_path):
    earlier = write(tmp_path, "log_every_steps: 3\noptim: {gamma: 0.5}\n", "earlier.yaml")
    path = write(tmp_path, "optim: {lr: 3e-4, schedule: cosine}\nmodel:\n  freeze: [a, b]\nlog_every_steps: 5\n")
    files, flags = ["--config", str(earlier), "--config", str(path)], ["--optim.lr", "0.5", "--model.freeze", "[c]"]
    expected = with_defaults(OptimConfig(lr=0.5, schedule="cosine", gamma=0.5))
    for config in (load(*flags, *files), load(*files, *flags)):
        assert (config.optim, config.log_every_steps, config.model.freeze) == (expected, 5, ["c"])


LIST_FLAGS = {
    "--data.source=csv --data.files a --data.files b": ("data.files", ["a", "b"]),
    "--data.source=csv --data.files '[a, b]'": ("data.files", ["a", "b"]),
    "--data.source=csv --data.files=a --data.files=2024 '--data.files=ü😀: c'": ("data.files", ["a", "2024", "ü😀: c"]),
    "--model.freeze [a-c].* --model.freeze=d": ("model.freeze", ["[a-c].*", "d"]),
    "--model.freeze []": ("model.freeze", []),
    "--adapter.target_modules=all-linear": ("adapter.target_modules", "all-linear"),
    "--tracking.log_with=[wandb] --tracking.log_with=[]": ("tracking.log_with", []),  # as verify overrides a run's
    "--data.source=csv --data.files=a --data.files=null --data.files=b": ("data.files", ["b"]),
    "--optim.lr=0.5 --optim.lr=0.25": ("optim.lr", 0.25),
    **{f"--data.csv_delimiter '{text}'": ("data.csv_delimiter", text) for text in (";", "|", r"\t", ":")},  # as it is typed
}


@pytest.mark.parametrize("flags", LIST_FLAGS)
def test_a_flag_given_again_adds_to_a_list_and_wins_over_the_yaml(tmp_path, flags):
    path = write(tmp_path, "model: {freeze: [z]}\ndata: {files: [x, y], eval_files: z}\nadapter: {target_modules: [z]}\n")
    given = flags if "data.files" in flags else f"{flags} --data.files=null --data.eval_files=null"
    key, value = LIST_FLAGS[flags]
    assert dotted_keys(load(*shlex.split(given), f"--config={path}"))[key] == value


def test_a_saved_config_gives_the_same_config_of_plain_values(tmp_path):
    """Restricted types of jsonargparse are subclasses, which YAML, JSON and a comparison by type would trip over."""
    config = load(
        "--model.freeze", r"['encoder\..*', 'shared\..*']", "--data.files", "[a.csv, b.csv]", "--data.prefix", "summarize: ",
        "--optim.lr", "1e-7", "--optim.max_grad_norm", "null", "--profile.steps", "[2, 3]", "--run.name", "2024",
        "--model.revision", "null", "--tracking.project_name", "Zürich", "--train.seed=7", "--model.dropout=0.0",
    )  # fmt: skip
    flat = dotted_keys(config)
    assert list(flat) == list(known_keys(SummarizationConfig)[0])
    assert (flat["optim.lr"], flat["train.seed"], flat["model.dropout"], flat["run.name"]) == (1e-7, 7, 0.0, "2024")
    values = [*flat.values(), *(config.profile.steps or [])]
    assert all(type(value) in (int, float, str, bool, list, type(None)) for value in values)
    assert config.model.freeze == [r"encoder\..*", r"shared\..*"]
    save_config(config, tmp_path / "config.yaml")
    assert load_config(SummarizationConfig, ["--config", str(tmp_path / "config.yaml")]) == config
    assert yaml.safe_load((tmp_path / "config.yaml").read_text(encoding="utf-8"))["tracking"]["project_name"] == "Zürich"


@pytest.mark.parametrize("config_class", [SummarizationConfig, MnistConfig])
def test_help_documents_every_key(config_class, capsys):
    with pytest.raises(SystemExit) as end:
        load_config(config_class, ["--help"], description="A recipe.\n\nstart it\nor so\n")
    assert end.value.code == 0
    start, _, options = capsys.readouterr().out.partition("options:")
    assert start == "usage: start it\n       or so\n\nA recipe.\n\n"
    for key in known_keys(config_class)[0]:
        # The flag, its metavariable (from Python 3.13 on, once for both flags of a list), and then words before jsonargparse's
        # own "(type: ...".
        documented = re.search(rf"^  --{re.escape(key)},? [^\n]*?\s+([A-Z`][^(]*)\(", options, re.MULTILINE)
        assert documented and len(documented[1].split()) >= 2, f"{key} has no docstring"


def test_a_wrong_flag_is_reported_before_the_heavy_packages_load():
    done = subprocess.run(
        [sys.executable, "-c", WRONG_FLAG], cwd=REPOSITORY, env={"PYTHONPATH": "."}, capture_output=True, text=True, timeout=600
    )
    assert done.stdout == "2 []\n", done.stderr
    assert done.stderr == "error: unknown flag --optim.lrr: did you mean --optim.lr?\n"


WRONG_TYPES = {
    "optim.lr=fast": "a number above 0",
    "optim.weight_decay=-0.1": "a number of 0 or more",
    "train.seed=-1": "a whole number of 0 or more",
    "train.global_batch_size_rows=1.5": "a whole number of 1 or more",
    "train.max_steps=many": "a whole number of 0 or more or null",
    "train.num_epochs=0": "a number above 0 or null",
    "eval.every_epochs=.inf": "a number above 0 or null",
    "optim.warmup_ratio=1": "a number of 0 or more and below 1",
    "optim.schedule=cosin": "linear, cosine, constant or step",
    "eval.generate=perhaps": "true or false",
    "data.eval_fraction=1.1": "a number from 0 to 1",
    "model.dropout=half": "a number from 0 to 1 or null",
    "model.freeze={a: b}": "a list as in ['a', 'b']",
    "profile.steps=[0, 1]": "a list as in [10, 12] or null",
}


@pytest.mark.parametrize("given", WRONG_TYPES)
def test_a_wrong_type_names_key_value_place_and_what_is_allowed(tmp_path, given):
    (key, _, value), allowed = given.partition("="), WRONG_TYPES[given]
    good = write(tmp_path, "optim: {lr: 0.5}\n", "good.yaml")
    for flags in ([f"--{key}={value}", f"--config={good}"], [f"--config={good}", f"--{key}={value}"]):
        assert refused(*flags) == f"--{key} is {value}: give {allowed}"
    section, _, name = key.partition(".")
    path = write(tmp_path, f"log_every_steps: 3\n{section}:\n  # why\n  {name}: {value}\n")
    assert refused(f"--config={path}", "--optim.beta1=0.1") == f"{path}, line 4: {key} is {value}: write {allowed}"


BROKEN_FILES = {
    "optmi:\n  lr: 3\n": ", line 1: unknown key optmi: did you mean optim?",
    "optim:\n  lrr: 3\n  betta1: 0\nrunn:\n  name: a\n": (
        ", line 2: unknown key optim.lrr: did you mean optim.lr?; line 3: unknown key optim.betta1: did you mean "
        "optim.beta1?; line 4: unknown key runn: did you mean run?"
    ),
    "checkpoint.evry_steps: 3": ", line 1: unknown key checkpoint.evry_steps: did you mean checkpoint.every_steps?",
    "optim:\n  lr: 1\n  zzz: 3\n": ", line 3: unknown key optim.zzz; known are optim.name, optim.lr, optim.beta1, ",
    "": " holds no keys and values: write them as in `log_every_steps: 10`",
    "optim:\n": ", line 1: optim is empty: indent its keys under it, such as optim.name, or leave it out",
    "optim: {lr: 1}\ntrain: [a]\n": ", line 2: train is [a]: indent its keys under it, such as train.global_batch_size_rows, or ",
    "optim:\n  lr: 1\n  gamma: 1\n  lr: 2\n": ", line 4: optim.lr was given before, on line 2: keep one of them",
    "run: {}\noptim:\n  lr: 1\nrun:\n  name: a\n": ", line 4: run was given before, on line 1: keep one of them",
    "optim:\n  lr: 1\noptim.lr: 2\n": ", line 3: optim.lr was given before, on line 2: keep one of them",
    "model:\n  freeze: null\n": ", line 2: model.freeze is null: write a list as in ['a', 'b']",
    "log_every_steps: !!int abc\n": ": broken YAML (invalid literal for int() with base 10: 'abc'): write `key: value`, indented",
    "data:\n  files: [a.csv,\n    !env DATA]\n": ", line 3: broken YAML (could not determine a constructor for the tag '!env'): ",
    "optim:\n  lr: [1\nrun: x\n": ", line 3: broken YAML (",
    "data:\n  eval_files: {news: a, mail: b, news: c}\n": ", line 2: data.eval_files has news twice: keep one of them",
    "data:\n  eval_files: {news: {a: b}}\n": (
        ", line 2: data.eval_files is {news: {a: b}}: write names as in {news: a.csv, mail: [b.csv, c.csv]}, "
    ),
    "run:\n  name: 2024\n": ", line 2: run.name is 2024: write text, in quotes if it looks like a number",
    b"a: 1\nb: \xff\n": ", line 2: not valid UTF-8 (invalid start byte): convert the file",
    b"\x00\x01": ": broken YAML (unacceptable character #x0000: ",
}


@pytest.mark.parametrize("text", BROKEN_FILES)
def test_a_broken_file_is_reported_with_the_line(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert refused(f"--config={path}").startswith(f"{path}{BROKEN_FILES[text]}")


NO_MUON = "it gathers every weight in full, and cannot skip an update on the device"
REFUSED_FLAGS = {
    "--train.num_epochs=1": "give train.max_steps or train.num_epochs, one of them: both are given",
    "--train.max_steps=null": "give train.max_steps or train.num_epochs, one of them: neither is given",
    "--profile.steps=[3]": "profile.steps is [3]: give the first and the last step, as in [10, 12]",
    "--profile.steps=[4,3]": "profile.steps is [4, 3]: give the first and the last step, as in [10, 12]",
    "--profile.steps=[4,21]": "profile.steps is [4, 21], but the run has only 20 steps: end the window by then",
    "--optim.warmup_steps=20": "optim.warmup_steps is 20, but the run has only 20 steps: warm up for fewer",
    "--data.source=csv": "data.source csv needs data.files",
    "--eval.early_stopping_patience=2": (
        "eval.early_stopping_patience is 2, but only the end is evaluated: set eval.every_steps or eval.every_epochs too"
    ),
    "--eval.every_steps=5 --eval.every_epochs=0.5": "eval.every_steps is 5 and eval.every_epochs is 0.5: give one of them",
    "--optim.warmup_steps=5 --optim.warmup_ratio=0.1": "optim.warmup_steps is 5 and optim.warmup_ratio is 0.1: give one of them",
    "--export.weights=best": "export.weights best needs checkpoint.keep_best of 1 or more",
    "--model.trained_dtype=bfloat16_stochastic": (
        "model.trained_dtype is bfloat16_stochastic, but torch's AdamW rounds to nearest, where small updates are lost: take "
        "optim.name adamw_8bit, or leave it out"
    ),
    "--optim.skip_beyond_sigmas=6 --optim.skip_window_steps=1": (
        "optim.skip_window_steps is 1, and one step has no standard deviation: give 2 or more, as in 100"
    ),
    "--run.name=a/b": "run.name 'a/b' is not a plain folder name: take one without slashes",
    # What is not a flag, or lacks its value.
    "--optim.lr": "--optim.lr has no value: give one, as in --optim.lr VALUE",
    "--config": "--config has no value: give one, as in --config VALUE",
    "--config=/": "--config / cannot be read (Is a directory): check the path",
    "--config=missing.yaml": "--config missing.yaml cannot be read (No such file or directory): check the path",
    "--data.files a.csv b.csv": "unexpected argument b.csv: ",
    "--data 3": "--data takes a section as a whole",
    "--optim adamw_8bit": "--optim is adamw_8bit: write optim.name: adamw_8bit, as in --optim.name VALUE",
    "--optim muon": f"--optim is muon: {NO_MUON}, as in --optim.name VALUE",
    "--optim.name muon": f"--optim.name is muon ({NO_MUON}): give adamw, adamw_8bit, adafactor or lion",
    "--optim.state_dtype bfloat16": (
        "unknown flag --optim.state_dtype: moments in bf16 are not the same on another number of ranks; write optim.name: "
    ),
    "--optim mine": "--optim is mine: optim.name names the optimizer, as in --optim.name VALUE",
    "--optim '{lrr: 3}'": "unknown key optim.lrr: did you mean optim.lr?",
    # Typos, and keys that are like no other.
    "--optim.lrr=3": "unknown flag --optim.lrr: did you mean --optim.lr?",
    "--lr=3": "unknown flag --lr: did you mean --optim.lr?",
    "--train.batch_size_rows=3": "unknown flag --train.batch_size_rows: did you mean --eval.batch_size_rows?",
    "--log_every=3": "unknown flag --log_every: did you mean --log_every_steps?",
    "--train.global_batch_size=3": "unknown flag --train.global_batch_size: did you mean --train.global_batch_size_rows?",
    "--optim.zzz=3": "unknown flag --optim.zzz; known are --optim.name, --optim.lr, --optim.beta1, ",
    "--zzz=3": "unknown flag --zzz; known are --model, --data, ",
}


@pytest.mark.parametrize("flags", REFUSED_FLAGS)
def test_flags_that_are_none_or_do_not_go_together(flags):
    assert refused(*shlex.split(flags)).startswith(REFUSED_FLAGS[flags])


def test_missing_keys_are_named():
    expected = "missing in the run config: model.name_or_path (give it in "
    assert refusal(load_config, SummarizationConfig, []).startswith(expected)


def test_what_needs_steps_or_held_out_rows_is_refused_once_they_are_counted():
    config = load("--train.max_steps=null", "--train.num_epochs=2", "--optim.warmup_steps=5", "--profile.steps=[6, 8]")
    check_num_steps(config, 8)
    assert refusal(check_num_steps, config, 7).startswith("profile.steps")
    assert refusal(check_num_steps, config, 5).startswith("optim.warmup_steps")
    needs_rows = {
        "export.weights best": load("--export.weights=best", "--checkpoint.keep_best=1"),
        "eval.early_stopping_patience": load("--eval.early_stopping_patience=2", "--eval.every_epochs=1"),
    }
    check_evaluation_rows(load(), 0)
    for name, config in needs_rows.items():
        check_evaluation_rows(config, 1)
        expected = f"{name} needs held-out rows, but there are none: raise data.eval_fraction, or give data.eval_files"
        assert refusal(check_evaluation_rows, config, 0) == expected


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("in_yaml", "flag", "expected"),
    [
        ("train: {num_epochs: 3}", "--train.max_steps=7", {"train.max_steps": 7, "train.num_epochs": None}),
        ("train: {max_steps: 7}", "--train.num_epochs=2.5", {"train.max_steps": None, "train.num_epochs": 2.5}),
        ("eval: {every_steps: 7}", "--eval.every_epochs=0.5", {"eval.every_steps": None, "eval.every_epochs": 0.5}),
        ("eval: {every_epochs: 0.5}", "--eval.every_steps=null", {"eval.every_steps": None, "eval.every_epochs": 0.5}),
        (
            "checkpoint: {every_epochs: 1}",
            "--checkpoint.every_steps=7",
            {"checkpoint.every_steps": 7, "checkpoint.every_epochs": None},
        ),
        ("optim: {warmup_steps: 7}", "--optim.warmup_ratio=0.1", {"optim.warmup_steps": 0, "optim.warmup_ratio": 0.1}),
        ("optim: {warmup_ratio: 0.1}", "--optim.warmup_steps=0", {"optim.warmup_steps": 0, "optim.warmup_ratio": 0.1}),
    ],
)
def test_one_of_two_keys_as_a_flag_wins_over_the_other_in_the_yaml(tmp_path, in_yaml, flag, expected):
    required = REQUIRED[:4] if in_yaml.startswith("train") else REQUIRED  # without --train.max_steps
    found = dotted_keys(load_config(SummarizationConfig, [f"--config={write(tmp_path, in_yaml)}", *required, flag]))
    assert {key: found[key] for key in expected} == expected
