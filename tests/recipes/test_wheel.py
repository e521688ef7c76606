"""The wheel in an environment of its own, away from the checkout: `shardtune` makes a project there, and trains in it."""

import shutil
import site
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.launch import REPOSITORY
from tests.support.model_folders import make_rows, save_jsonl
from toolkit.files.json_lines import load_json_lines

Command = Callable[..., "subprocess.CompletedProcess[str]"]
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
def run(bin_folder, tmp_path, monkeypatch) -> Command:
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
