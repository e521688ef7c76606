"""Launch a recipe on a tiny model and look at what it leaves behind."""

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.support.launch import REPOSITORY, TIMEOUT_S, LaunchResult, Running, run_on_ranks, start
from tests.support.model_folders import build_model_folders, make_rows, save_jsonl
from tests.support.rank import SERVER_ENVIRONMENT
from tests.support.small_run import run_in_this_process
from toolkit.files.json_lines import load_json_lines

RECIPES = REPOSITORY / "recipes"
RECIPE = RECIPES / "t5.py"
FP32 = {"mixed_precision": "no"}
SMALL = {
    "data.source": "jsonl",
    "data.eval_fraction": 0.1,
    "train.global_batch_size_rows": 8,
    "train.micro_batch_size_rows": 4,
    "train.max_steps": 3,
    "eval.at_start": False,
    "eval.num_rows": 3,
    "eval.max_new_tokens": 4,
    "log_every_steps": 1,
}
"""What a test's run is unless it says otherwise."""
ROWS = {"t5": "rows.jsonl", "llm": "prompts.jsonl"}
"""File of rows of a recipe."""


@dataclass(frozen=True)
class Workbench:
    runs: Path
    models: dict[str, Path]
    data: Path
    recipe: str = "t5"
    rows: str = "rows.jsonl"
    changes: dict = field(default_factory=dict)
    """Of every run here."""

    def flags(self, name: str, model: str | Path | None = None, **changes) -> list[str]:
        """The flags of run `name`; `changes` say `train__max_steps=5` for `--train.max_steps 5`."""
        model = model or {"t5": "t5", "llm": "llama"}[self.recipe]
        values = {
            "model.name_or_path": self.models.get(str(model), model),
            "data.files": self.data / self.rows,
            "data.cache_dir": self.data / "cache",
            "run.output_dir": self.runs,
            "run.name": name,
            **SMALL,
            **{key.replace("__", "."): value for key, value in (self.changes | changes).items()},
        }
        return as_flags(values)

    def start(
        self,
        name: str,
        *,
        preset: str = "fsdp2_cpu",
        overrides: dict | None = None,
        env: dict[str, str] | None = None,
        **changes,
    ) -> Running:
        """Start run `name` in fp32 and return at once; use it in a `with`."""
        where = {"preset": preset, "overrides": FP32 if overrides is None else overrides, "env": env}
        return start(RECIPES / f"{self.recipe}.py", self.flags(name, **changes), **where)

    def attempt(self, name: str, **changes) -> LaunchResult:
        """Run to the end, good or bad."""
        with self.start(name, **changes) as running:
            return running.wait()

    def run(self, name: str, **changes) -> str:
        """Run to a good end; returns what it printed."""
        with self.start(name, **changes) as running:
            result = running.wait()
            assert not any(result.returncodes), running.last_words()
            return result.stdout + result.stderr

    def run_all(self, runs: dict[str, dict], *, preset: str = "fsdp2_cpu", overrides: dict | None = None) -> dict[str, str]:
        """Runs by name with their changes, one after another in one launch, to a good end; returns what each printed."""
        commands = [(self.recipe, self.flags(name, **changes)) for name, changes in runs.items()]
        printed = run_each(commands, preset=preset, overrides=FP32 if overrides is None else overrides)
        return dict(zip(runs, printed, strict=True))

    def lines(self, name: str, kind: str) -> list[dict]:
        """The lines of one kind in a run's metrics.jsonl; the last one may be torn while the run goes on."""
        path = self.runs / name / "metrics.jsonl"
        whole = load_json_lines(path, skip_torn_end=True) if path.exists() else []
        return [figures for figures in whole if figures["kind"] == kind]

    def checkpoints(self, name: str) -> list[str]:
        return sorted(path.name for path in (self.runs / name / "checkpoints").iterdir())

    def checkpoint(self, name: str, step: int) -> Path:
        """Folder of a run's checkpoint, whether it is there or not."""
        return self.runs / name / "checkpoints" / step_name(step)


def run_each(commands: list[tuple[str, list[str]]], **where) -> list[str]:
    """Recipes with their flags, one after another in one launch, to a good end; returns what each printed."""
    of_ranks = run_on_ranks(_print_each, args=(commands,), **where)
    return list(map("".join, zip(*of_ranks, strict=True)))


def _print_each(commands: list[tuple[str, list[str]]]) -> list[str]:
    """On a rank: the runs, and what each printed."""
    printed = []
    for recipe, argv in commands:
        with output_of() as said:
            run_in_this_process(recipe, argv)
        printed.append(said[0])
    return printed


@contextlib.contextmanager
def output_of() -> Iterator[list[str]]:
    """A list that has, at the end, what this process has written to stdout and stderr meanwhile."""
    said: list[str] = []
    with tempfile.TemporaryFile("w+") as file:
        kept = [os.dup(number) for number in (1, 2)]
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            yield said
        finally:
            for number, stream in zip((1, 2), kept, strict=True):
                os.dup2(stream, number)
                os.close(stream)
            file.seek(0)
            said.append(file.read())
            print(said[0])  # for the message, should the test fail


def run_without_toolkit(script: str, folders: list[Path], cwd: Path) -> dict:
    """What a script leaves in `found`, which plain libraries find in folders of runs; `runs` has them as paths."""
    whole = f"import json, pathlib, sys\nfound = {{}}\nruns = [pathlib.Path(name) for name in sys.argv[1:]]\n{script}"
    whole += "\nassert 'toolkit' not in sys.modules\nprint(json.dumps(found))\n"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | SERVER_ENVIRONMENT
    command = [sys.executable, "-c", whole, *map(str, folders)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return found


RELOAD = """
import transformers
from peft import PeftModel
from safetensors.torch import load_file

for run in runs:
    check = load_file(run / "export_check.safetensors")
    logits = check.pop("logits")
    kind = "AutoModelForSeq2SeqLM" if "decoder_input_ids" in check else "AutoModelForCausalLM"
    load, export = getattr(transformers, kind).from_pretrained, run / "export"
    about, tokenizer = found.setdefault(run.name, {}), transformers.AutoTokenizer.from_pretrained(export)

    def difference(model):
        return ((model.eval()(**check, use_cache=False).logits - logits).abs().max() / logits.abs().max()).item()

    if (export / "adapter_config.json").is_file():
        base = json.loads((export / "adapter_config.json").read_text())["base_model_name_or_path"]
        if "quantization_config" not in (pathlib.Path(base) / "config.json").read_text():
            model = load(base)
            if model.get_input_embeddings().weight.shape[0] < len(tokenizer):
                model.resize_token_embeddings(len(tokenizer))
            about["base"] = difference(model)
            about["export"] = difference(PeftModel.from_pretrained(model, export))
        about["merged"] = difference(load(run / "merged"))
    else:
        model, loading = load(export, output_loading_info=True)
        assert not any(loading.values()), loading
        about["export"] = difference(model)
        inputs = tokenizer("alpha beta", return_tensors="pt").input_ids
        generated = model.generate(input_ids=inputs, max_new_tokens=3, pad_token_id=0)
        assert generated.shape[1] > (1 if model.config.is_encoder_decoder else inputs.shape[1])
"""
"""Of each run: how far the logits of its export, merged model and base are from the trained model's, by plain libraries."""


def call_toolkit(*words: object) -> int:
    """The exit status of `python -m toolkit WORDS`, in this process."""
    from toolkit.tools.main import main

    with patch.object(sys, "argv", ["toolkit", *map(str, words)]):
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def leave_launch() -> None:
    """From here on, this rank is a process that no launcher has started."""
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "TOOLKIT_"))]:
        del os.environ[name]


def as_flags(values: dict) -> list[str]:
    """`--key=value` of dotted keys, values as the recipes read them."""
    return [f"--{key}={value if isinstance(value, str | Path) else json.dumps(value)}" for key, value in values.items()]


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def new_bench(factory: pytest.TempPathFactory, name: str, recipe: str = "t5") -> Workbench:
    """A place for the runs of one file of tests, with a tiny model of each family, and 60 rows for either recipe."""
    models, data = _inputs(factory.getbasetemp())
    return Workbench(factory.mktemp(name), models, data=data, recipe=recipe, rows=ROWS[recipe])


@functools.cache
def _inputs(parent: Path) -> tuple[dict[str, Path], Path]:
    """The model folders, by family, and a folder with the rows, made once a test run."""
    folder = parent / "inputs"
    folder.mkdir()
    models = run_on_ranks(build_model_folders, preset="single", overrides=FP32, args=(folder,))[0]
    save_rows(folder)
    return models, folder


def save_rows(folder: Path) -> None:
    """`rows.jsonl` with 60 rows to summarize, `prompts.jsonl` with the same as prompts and completions."""
    rows = make_rows(60)
    save_jsonl(folder / ROWS["t5"], rows)
    save_jsonl(folder / ROWS["llm"], [{"prompt": row["source"], "completion": " " + row["target"]} for row in rows])
