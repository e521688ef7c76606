"""README's commands run in their order, in a folder with what a clone has and nothing else: on the CPU, and small.

The lines are those of its code blocks, then those of its table of commands, with what it asks the reader to fill in. Changed is
only what makes them fit: a tiny model in the place of one of the Hub, two CPU processes in the place of GPUs, two steps where a
line names their number and else one epoch, a few rows and words in evaluations. What `make` would train for minutes, to an export
that a later line reads, takes two steps on other rows.
"""

import csv
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.recipes.test_presets import build_chat_models
from tests.support.launch import GPU_PRESET_OVERRIDES_ON_CPU, REPOSITORY, start_on_ranks
from tests.support.model_folders import build_model_folders, make_rows, save_jsonl
from tests.support.workbench import FP32, leave_launch, save_rows
from toolkit.files.json_lines import load_json_lines

IN_A_CLONE = (
    "Makefile", "README.md", "constraints.txt", "pyproject.toml", "accelerate_configs", "benchmarks", "docs", "recipes", "tests",
    "toolkit",
)  # fmt: skip
FEW_EVALUATED = ("--eval.num_rows=4", "--eval.max_new_tokens=4")
ROWS_OF_DEMOS = {"t5_functions": "rows.jsonl", "llm_stdlib": "texts.jsonl"}
"""In the place of what `make` reads: to parse all that is installed takes a minute."""
FILLED_IN = {
    "RUN.yaml": "runs/rehearsal/config.yaml",
    "FILE.yaml": "accelerate_configs/fsdp2_cpu.yaml",
    "RUN_FOLDER": "runs/rehearsal",
}
"""What a reader writes for the placeholders of the table."""
RUN_ELSEWHERE = ("train", "generate", "compare", "plan", "verify")
"""Rows of the table that the blocks have too, or that take long and have tests of their own; `test_docs.py` parses them all."""
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
"""What a reader types."""


@dataclass(frozen=True)
class Clone:
    """A folder in which commands are typed, and what stands in for what is not there."""

    folder: Path
    stand_ins: Path
    """Folders `t5` and `llm` of tiny models, the rows of the demos, and the cache."""

    def type(self, line: str) -> None:
        """Do what a shell would do with a line of README; AssertionError with the line and its output if it fails."""
        words = shlex.split(line, comments=True)
        match words:
            case ["make", target]:
                self.make(target)
            case ["source", ".venv/bin/activate"]:
                pass  # the tests run in that environment
            case ["echo" | "for", *_]:
                subprocess.run(["bash", "-ec", line], cwd=self.folder, check=True)
            case ["accelerate", "launch", *rest]:
                self.launch(rest)
            case ["python", "-m", "toolkit", *rest]:
                self.call_toolkit(rest)
            case _:
                pytest.fail(f"no way is known here to run {line}")

    def make(self, target: str) -> None:
        """Those launches of it whose export README names, with two steps each. `make test` has none: it is what runs this."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        command = ["make", "--dry-run", target]
        planned = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=True).stdout
        for line in planned.replace("\\\n", " ").splitlines():
            words = shlex.split(line)
            if words[:2] == [".venv/bin/accelerate", "launch"]:
                demo = Path(words[words.index("--config") + 1]).stem
                if f"runs/{demo}/export" in README:
                    rows = ["--data.source=jsonl", f"--data.files={self.stand_ins / ROWS_OF_DEMOS[demo]}"]
                    self.launch(words[2:], small=[*rows, "--train.max_steps=2", "--optim.warmup_steps=1"])

    def launch(self, words: list[str], small: Sequence[str] = ()) -> None:
        """`accelerate launch`, on CPU processes in fp32.

        Args:
            small: flags that the line's own override.
        """
        place = next(index for index, word in enumerate(words) if word.endswith(".py"))
        option, preset, *others = words[:place]
        assert option == "--config_file" and set(others) <= {"--quiet"}, words
        flags = [*small, f"--data.cache_dir={self.stand_ins / 'cache'}", *words[place + 1 :], *FEW_EVALUATED]
        if not small:
            flags.append("--train.max_steps=2" if "--train.max_steps" in words else "--train.num_epochs=1")
        flags += self.stand_in_for_the_hub(flags[flags.index("--config") + 1], words)
        overrides = GPU_PRESET_OVERRIDES_ON_CPU.get(Path(preset).stem, {}) | FP32
        self.run(run_script, words[place], flags, preset=preset, overrides=overrides)

    def call_toolkit(self, words: list[str]) -> None:
        """`python -m toolkit`; a run that it would start is planned, and its line typed."""
        if words[0] == "train":
            words = [*words, *self.stand_in_for_the_hub(words[1], words), "--dry-run"]
            printed = self.run(run_toolkit, words, env={"CUDA_VISIBLE_DEVICES": ""})
            self.type(printed.splitlines()[-1])
        else:
            self.run(run_toolkit, [*words, *(["--max-new-tokens", "4"] if words[0] == "generate" else [])])

    def stand_in_for_the_hub(self, config: str, words: Sequence[str]) -> list[str]:
        """The flag that names a tiny model, if the line or its run YAML names one of the Hub."""
        named = yaml.safe_load((self.folder / config).read_text())["model"]["name_or_path"]
        if "--model.name_or_path" in words:
            named = words[words.index("--model.name_or_path") + 1]
        kind = Path(config).stem.split("_")[0]
        return [f"--model.name_or_path={self.stand_ins / kind}"] if re.fullmatch(r"[\w-]+/[\w.-]+", named) else []

    def run(self, function: Callable[..., None], *args, preset: str = "accelerate_configs/single_cpu.yaml", **where) -> str:
        """What it prints, called in the folder on the ranks of a preset; they must end with 0."""
        with start_on_ranks(function, preset=self.folder / preset, args=(self.folder, *args), **where) as running:
            done = running.wait()
            assert not any(done.returncodes), f"{args}\n{running.last_words()}"
        return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Clone:
    """In which all blocks have run in their order."""
    made = Clone(tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("stand_ins"))
    for name in IN_A_CLONE:
        (made.folder / name).symlink_to(REPOSITORY / name)
    made.run(build_models, made.stand_ins)
    save_rows(made.stand_ins)
    save_jsonl(made.stand_ins / "texts.jsonl", [{"text": row["source"]} for row in make_rows(60)])
    for line in "".join(BLOCKS).replace("\\\n", " ").splitlines():
        made.type(line)
    return made


def test_the_blocks_write_what_they_say_and_over_no_file_of_the_readers(clone):
    written = {path.name for path in clone.folder.iterdir()} - {*IN_A_CLONE}
    assert written == {"rehearsal_articles.csv", "rehearsal_chats.jsonl", "runs", "summaries.jsonl"}
    articles = list(csv.DictReader((clone.folder / "rehearsal_articles.csv").open()))
    assert len(articles) == 400 and articles[6] == {"article": "A long article about the number 7.", "summary": "About 7"}
    chats, summaries = (load_json_lines(clone.folder / name) for name in ("rehearsal_chats.jsonl", "summaries.jsonl"))
    assert len(chats) == 200 and chats[6]["messages"][1] == {"role": "assistant", "content": "def add(x): return x + 7"}
    assert [summary["row"] for summary in summaries] == list(range(1, 401))
    for run in ("t5_csv", "rehearsal", "my_run", "chat_rehearsal", "llm_chat_lora"):
        assert (clone.folder / "runs" / run / "export" / "README.md").is_file(), run
    assert (clone.folder / "runs/llm_chat_lora/merged/config.json").is_file()


def test_the_rows_of_the_table_run(clone):
    rows = re.findall(r"^\| `(python -m toolkit (\w+)[^`]*)` \|", README, re.MULTILINE)
    assert {job for _, job in rows} > {*RUN_ELSEWHERE}
    for line, job in rows:
        if job not in RUN_ELSEWHERE:
            clone.type(re.sub("|".join(map(re.escape, FILLED_IN)), lambda found: FILLED_IN[found[0]], line))


def test_the_listings_of_a_script_of_ones_own_run(clone):
    """A run YAML and a script of docs/python_api.md, rows and a metric of docs/configuration.md, together."""
    python, configuration = ((REPOSITORY / "docs" / name).read_text() for name in ("python_api.md", "configuration.md"))
    listings = re.findall(r"```(?:python|yaml)\n(.*?)```", python + configuration, re.DOTALL)
    names = {
        "name_or_path: FOLDER": "run.yaml",
        "with exit_on_user_error": "my_run.py",
        "def load_rows": "my_rows.py",
        "(evaluate.Metric)": "my_metric.py",
    }
    (clone.folder / "own").mkdir()
    for words, name in names.items():
        (listing,) = (text for text in listings if words in text)
        (clone.folder / "own" / name).write_text(listing)
    run = yaml.safe_load((clone.folder / "own/run.yaml").read_text())
    run["model"]["name_or_path"] = str(clone.stand_ins / "llm")
    run["data"] = {"source": "my_rows.py:load_rows", "files": "questions.jsonl", "cache_dir": str(clone.stand_ins / "cache")}
    run["train"] |= {"num_epochs": 1, "global_batch_size_rows": 8}
    run |= {"eval": {"metrics": ["./my_metric"], "max_new_tokens": 4}, "run": {"name": "own"}}
    (clone.folder / "own/run.yaml").write_text(yaml.safe_dump(run))
    rows = [{"question": row["source"], "answer": row["target"] if place else ""} for place, row in enumerate(make_rows(24))]
    save_jsonl(clone.folder / "own/questions.jsonl", rows)
    (clone.folder / "own/my_metric").mkdir()
    (clone.folder / "own/my_metric.py").rename(clone.folder / "own/my_metric/my_metric.py")
    with start_on_ranks(run_script, preset="fsdp2_cpu", args=(clone.folder / "own", "my_run.py", [])) as running:
        assert not any(running.wait().returncodes), running.last_words()
    lines = load_json_lines(clone.folder / "own/runs/own/metrics.jsonl")
    assert "my_metric/equal" in [line for line in lines if line["kind"] == "eval"][-1]
    record = json.loads((clone.folder / "own/runs/own/record.json").read_text())
    assert sum(split["num_rows"] for split in record["data"]["splits"]) == 23, "a row without an answer is left out"


def build_models(_: Path, parent: Path) -> None:
    """`t5`, and `llm`: a chat model with a template of its own and positions for long rows."""
    build_model_folders(parent, ("t5",))
    build_chat_models(parent, ("qwen2",), max_position_embeddings=4096)["chat-qwen2"].rename(parent / "llm")


def run_script(folder: Path, script: str, flags: list[str]) -> None:
    os.chdir(folder)
    sys.argv = [script, *flags]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def run_toolkit(folder: Path, words: list[str]) -> None:
    """`python -m toolkit WORDS` in the folder, in a shell without a launcher; of a chat, with one turn."""
    from toolkit.tools.main import main

    leave_launch()
    os.chdir(folder)
    sys.argv, sys.stdin = ["toolkit", *words], io.StringIO("Write a function that adds 4.\n")
    main()
