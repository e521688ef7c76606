"""Commands: `compare`, `preview`, `generate`, the notebook, the script for SLURM; and `shardtune` of the wheel in an environment
of its own, away from the checkout, which makes a project there and trains in it."""

import json
import os
import shutil
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.launch import REPOSITORY, TIMEOUT_S, launch, launch_logged, run_on_ranks
from tests.support.model_folders import make_rows, save_jsonl
from tests.support.previews import call_preview
from tests.support.python_in_card import python_in_card, texts_of_python
from tests.support.rank import SERVER_ENVIRONMENT
from tests.support.workbench import FP32, Workbench, call_toolkit, leave_launch, output_of
from toolkit.files.json_lines import load_json_lines
from toolkit.tools.compare import runs
from toolkit.tools.generate import generate as command
from toolkit.tools.generate.model import Generator
from toolkit.tools.preview.preview import collect


def test_compare_shows_one_preset_that_trains_and_one_that_cannot(tmp_path, monkeypatch, capsys):
    """Its runs are forks; `tests/unit/tools/test_preset_runs.py` has the launcher, and what is printed."""
    monkeypatch.setattr(runs, "launch", launch_logged)
    monkeypatch.chdir(REPOSITORY)
    code = call_toolkit(
        *("compare", "--presets", "fsdp2_cpu,fsdp2_size_wrap:fsdp_offload_params=true"),
        *("--use-cpu", "--num-processes", "2", "--steps", "6", "--warmup-steps", "2", "--output", tmp_path / "compared"),
        *("--", REPOSITORY / "recipes/mnist.py", "--config", REPOSITORY / "recipes/configs/mnist_digits.yaml"),
    )
    assert code == 1, capsys.readouterr()
    failed, ran = json.loads((tmp_path / "compared" / "comparison.json").read_text())["presets"]
    reason = "no repeated block found in Sequential: name one in fsdp_transformer_layer_cls_to_wrap"
    assert failed["failure"].startswith(reason) and ran["failure"] is None
    assert ran["figures"]["num_timed_steps"] == 4 and ran["figures"]["unit"] == "rows/s"
    assert all(ran["figures"][name] > 0 for name in ("loop_s", "speed", "peak_memory_gib", "save_waits_s", "save_stands_s"))
    assert 0 <= ran["figures"]["evaluation"]["accuracy"] <= 100
    assert (tmp_path / "compared" / "comparison.png").is_file()


def test_preview_and_the_run_share_a_cache_and_take_the_same_rows(bench):
    changes = {"data__prefix": "preview: ", "log_row_ids": True, "eval__generate": False}
    assert call_preview(bench.flags("run", **changes)) == 0
    tokenized = token_files(bench)
    assert tokenized
    # The run on two processes.
    bench.run("run", **changes)
    assert token_files(bench) == tokenized
    # The config that the run has saved gives the same view, and its first step is the one that was shown.
    saved = bench.runs / "run" / "config.yaml"
    assert call_preview(["--config", str(saved)]) == 0 and token_files(bench) == tokenized
    found = collect(bench.flags("run", **changes), REPOSITORY / "accelerate_configs" / "fsdp2_cpu.yaml", None, 0, None)
    assert found.step is not None and found.step.plan.world_size == 2
    for rank in range(2):
        logged = [line for line in load_json_lines(bench.runs / "run" / f"rows-{rank:05d}.jsonl") if line["step"] == 1]
        shown = [sorted(pack.row_ids) for pack in found.step.packs if pack.rank == rank]
        assert sorted(row for line in logged for row in line["row_ids"]) == sorted(row for rows in shown for row in rows)


def token_files(bench: Workbench) -> dict[Path, int]:
    """The files of tokenized rows in the cache, with what changes where one is written again."""
    return {path: path.stat().st_ino for path in (bench.data / "cache").glob("*/train.arrow")}


def test_the_notebook_runs_offline_and_its_model_learns(tmp_path):
    """Its cells in order, in one process without a launcher."""
    notebook = json.loads((REPOSITORY / "docs" / "examples" / "python_api.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells), "the notebook is kept without outputs"
    checks = "assert losses[-1][1] < 0.6 * losses[0][1] and result.metrics['first_digit'] > 30, (losses, result)\n"
    checks += "assert text == row['prompt'] + row['completion'] and result.metrics['exact_match'] > 90, (text, row, result)"
    script = "\n\n".join(["".join(cell["source"]) for cell in cells] + [checks])
    [printed] = run_on_ranks(run_without_launcher, preset="single_cpu", args=(script, tmp_path))
    assert "Creating parquet" not in printed, "a library's progress bar"
    assert "data        train-" in printed, "data given in Python has a name"
    assert "yours trains, which holds all logits of a micro-batch; cross-entropy evaluates" in printed


def run_without_launcher(script: str, folder: Path) -> str:
    """What it prints, run in the folder by a process that no launcher has started."""
    leave_launch()
    os.chdir(folder)
    with output_of() as printed:
        exec(compile(script, "notebook", "exec"), {"__name__": "__main__"})
    return printed[0]


@pytest.mark.parametrize(("exit_code", "calls"), [(75, "requeue 4711\n"), (0, ""), (2, "")])
def test_a_job_of_slurm_starts_every_rank_and_only_one_that_was_stopped_goes_back_into_the_queue(tmp_path, exit_code, calls):
    """With stand-ins for its commands, and for the recipe; under SLURM itself it is `tests/slurm/test_slurm.py`."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TOOLKIT_ACCELERATE_YAML")
    (tmp_path / "recipe.py").write_text(
        f"import os, sys\nprint(*map(os.environ.get, {names}), *sys.argv[1:], flush=True)\nsys.exit({exit_code})\n"
    )
    tasks = 'for i in 0 1; do SLURM_PROCID=$i SLURM_LOCALID=0 "${@:4}" || code=$?; done; exit ${code:-0}'
    hosts = f'[ "$1" = show ] && printf "first\\nsecond\\n" || echo "$@" >> {tmp_path}/calls'
    for name, text in {"srun": tasks, "scontrol": hosts}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = {"JOB_ID": "4711", "JOB_NODELIST": "nodes", "NTASKS": "2", "NTASKS_PER_NODE": "1", "CPUS_PER_TASK": "1"}
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | SERVER_ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY), "PATH": path}
    environment |= {f"SLURM_{name}": value for name, value in job.items()}
    command = ["bash", str(REPOSITORY / "docs/launch/slurm.sbatch"), str(tmp_path / "recipe.py"), "--config", "RUN.yaml"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    places = "first 24711 accelerate_configs/fsdp2_hsdp.yaml --config RUN.yaml"
    assert done.stdout.splitlines() == [f"{rank} 2 0 1 {places}" for rank in (0, 1)], done.stderr
    found = (tmp_path / "calls").read_text() if (tmp_path / "calls").exists() else ""
    assert (done.returncode, found) == (exit_code, calls)


# --- What the evaluation predicted, for any batch size and number of processes.

CHATML = REPOSITORY / "recipes" / "chat_templates" / "chatml_generation.jinja"
GENERATES = {"eval__max_new_tokens": 6, "eval__num_beams": 2, "eval__no_repeat_ngram_size": 2}


def texts(output: Path) -> list[str]:
    lines = load_json_lines(output)
    assert [line["row"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["prediction"] for line in lines]


def test_summaries_are_those_of_the_evaluation(workbench, tmp_path):
    rows = load_json_lines(workbench.data / "rows.jsonl")
    held_out = save_jsonl(tmp_path / "held_out.jsonl", rows[:7])
    options = {"data__prefix": "sum: ", "data__max_source_length_tokens": 16, "eval__num_rows": None, "eval__batch_size_rows": 4}
    printed_by_run = workbench.run("run", data__eval_files=held_out, **options, **GENERATES)
    run = tmp_path / "run"
    expected = [line["prediction"] for line in load_json_lines(run / "predictions-3.jsonl")]
    assert len(expected) == 7 and len(set(expected)) > 1

    # One process, batches of other sizes; the labels beside the sources are not read.
    for size in (1, 5):
        output = tmp_path / f"{size}.jsonl"
        assert call_toolkit("generate", run, "--file", held_out, "--output", output, "--batch-size-rows", size) == 0
        assert texts(output) == expected
    # Two processes.
    output = tmp_path / "two.jsonl"
    words = ["generate", run, "--file", held_out, "--output", output]
    result = launch(REPOSITORY / "toolkit" / "__main__.py", list(map(str, words)), preset="ddp_cpu", overrides=FP32)
    assert result.returncodes == [0, 0], result.stderr[-3000:]
    assert texts(output) == expected

    # A finished output is not overwritten.
    assert call_toolkit("generate", run, "--file", held_out, "--output", output) == 2

    # The Python that the card and the run's end show does the same with plain transformers.
    lines = python_in_card(run / "export")
    assert lines.replace("folder, texts = '.'", f"folder, texts = '{run}/export'") in printed_by_run
    assert texts_of_python(lines, run / "export", [row["source"] for row in rows[:7]]) == expected


@pytest.mark.parametrize("form", ["chat", "prompt"])
def test_answers_are_those_of_the_evaluation(llm_workbench, tmp_path, monkeypatch, capsys, form):
    rows = pairs = load_json_lines(llm_workbench.data / "prompts.jsonl")
    if form == "chat":
        roles = ("user", "prompt"), ("assistant", "completion")
        rows = [{"messages": [{"role": role, "content": pair[side].strip()} for role, side in roles]} for pair in pairs]
    train, held_out = save_jsonl(tmp_path / "train.jsonl", rows[7:]), save_jsonl(tmp_path / "held_out.jsonl", rows[:7])
    options = {"data__max_length_tokens": 256, "eval__num_rows": None, "eval__batch_size_rows": 4, "data__chat_template": CHATML}
    if form == "prompt":
        options |= {"adapter__method": "lora", "adapter__rank": 4, "optim__lr": 1e-2}
    printed_by_run = llm_workbench.run("run", data__files=train, data__eval_files=held_out, **options, **GENERATES)
    run = tmp_path / "run"
    plain = ("--plain",) if form == "prompt" else ()
    use = " ".join(["--file FILE.csv --output OUT.jsonl", *plain])
    assert f"use it: python -m toolkit generate {run}/export {use}\n" in printed_by_run
    flags = ("--batch-size-rows", 3, *plain)
    assert call_toolkit("generate", run, "--file", held_out, "--output", tmp_path / "out.jsonl", *flags) == 0
    expected = [line["prediction"] for line in load_json_lines(run / "predictions-3.jsonl")]
    assert [text.strip() for text in texts(tmp_path / "out.jsonl")] == [text.strip() for text in expected]
    prompts = [pair["prompt"].strip() if form == "chat" else pair["prompt"] for pair in pairs[:7]]
    assert texts_of_python(python_in_card(run / "export"), run / "export", prompts) == expected
    # From the command line, only the answer is on stdout.
    capsys.readouterr()
    assert call_toolkit("generate", run, "--text", "hello\n", "--max-new-tokens", 2) == 0
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 1 and "max_new_tokens 2, num_beams 2" in printed.err
    # A reader that has seen enough ends it: the first batch of three is generated, the others are not.
    generated: list[int] = []
    generate = Generator.generate
    monkeypatch.setattr(Generator, "generate", lambda self, rows: generated.append(len(rows)) or generate(self, rows))
    monkeypatch.setattr(command, "BATCHES_AT_ONCE", 1)
    reading, writing = os.pipe()
    os.close(reading)
    with monkeypatch.context() as within, os.fdopen(writing, "w") as closed_pipe:
        within.setattr(sys, "stdout", closed_pipe)
        assert call_toolkit("generate", run, "--file", held_out, "--batch-size-rows", 3, "--max-new-tokens", 1) == 0
    assert generated == [3]


# --- The wheel.

SHORT = [
    "--train.max_steps", "2", "--eval.every_steps", "2", "--eval.num_rows", "4", "--optim.warmup_steps", "0",
    "--eval.max_new_tokens", "4",
    "--data.source", "jsonl", "--data.files", "rows.jsonl", "--data.eval_fraction", "0.2",
    "--train.global_batch_size_rows", "8", "--train.micro_batch_size_rows", "8", "--log_every_steps", "1",
]  # fmt: skip
"""On a few rows: reading the functions of everything installed takes longer than all the rest."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*build, str(REPOSITORY)], check=True)
    (built,) = folder.glob("shardtune-*.whl")
    return built


def test_the_source_distribution_builds_the_same_wheel(wheel, tmp_path):
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)], cwd=REPOSITORY, check=True)
    (source,) = tmp_path.glob("shardtune-*.tar.gz")
    shutil.unpack_archive(source, tmp_path, filter="data")
    built = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(built, cwd=source.with_name(source.name.removesuffix(".tar.gz")), check=True)
    of_source, of_checkout = (zipfile.ZipFile(path) for path in (tmp_path / wheel.name, wheel))
    for name in of_checkout.namelist():
        assert name.endswith("RECORD") or of_source.read(name) == of_checkout.read(name), name


@pytest.fixture(scope="module")
def bin_folder(wheel, tmp_path_factory) -> Path:
    """Of an environment with the wheel and the libraries of this one, but not this checkout: `.pth` files are not followed."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True)
    (packages,) = folder.glob("lib/python3.*/site-packages")
    (packages / "libraries.pth").write_text("\n".join(site.getsitepackages()))
    return folder / "bin"


@pytest.fixture
def run(bin_folder, tmp_path, monkeypatch):
    """A function that runs a command of that environment."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the other core has tests of its own

    def run_command(*words: str, cwd: Path = tmp_path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([bin_folder / words[0], *words[1:]], cwd=cwd, capture_output=True, text=True)

    return run_command


def test_the_wheel_has_every_recipe_and_preset(wheel):
    tracked = subprocess.run(
        ["git", "ls-files", "recipes", "accelerate_configs"], cwd=REPOSITORY, check=True, capture_output=True, text=True
    ).stdout.split()
    assert {f"toolkit/project/{name}" for name in tracked} <= {*zipfile.ZipFile(wheel).namelist()}


def test_a_project_trains_away_from_the_checkout(run, tmp_path):
    assert str(REPOSITORY) not in run("python", "-c", "import toolkit; print(toolkit.__file__)").stdout
    made = run("shardtune", "init", "project")
    assert made.returncode == 0, made.stderr
    project = tmp_path / "project"
    assert not [*project.glob("recipes/**/llm*"), *project.glob("recipes/**/mnist*")]
    save_jsonl(project / "rows.jsonl", make_rows(40))
    words = ["recipes/configs/t5_functions.yaml", "--preset", "single_cpu", *SHORT]
    trained = run("shardtune", "train", *words, cwd=project)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    start = "accelerate launch --config_file accelerate_configs/single_cpu.yaml --quiet recipes/t5.py"
    assert start in trained.stdout, trained.stdout
    lines = load_json_lines(project / "runs/t5_functions/metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2]
    text = run("shardtune", "generate", "runs/t5_functions", "--text", "def add(a, b): return a + b", cwd=project)
    assert text.returncode == 0, text.stderr


@pytest.mark.parametrize("name", ["toolkit/__init__.py", "toolkit.py"])
def test_an_import_that_another_toolkit_hides_is_said(run, tmp_path, name):
    assert run("shardtune", "init", ".").returncode == 0
    file = tmp_path / "recipes" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    ended = run("shardtune", "train", "recipes/configs/t5_functions.yaml", "--dry-run")
    sentence = f"error: {file} hides the installed toolkit from a recipe in {file.parents[name.count('/')]}: rename it\n"
    assert (ended.returncode, ended.stderr) == (2, sentence)


def test_what_comes_with_the_toolkit_is_listed(run):
    listed = run("shardtune", "ls").stdout
    for name in ("t5: Fine-tune an encoder-decoder", "llm_functions: The embedded LoRA job", "fsdp2_cpu: What it shards:"):
        assert f"\n  {name}" in listed, listed
