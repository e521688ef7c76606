"""`compare`, `preview`, the notebook, the script for SLURM. `train` starts a run in `test_wheel.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import REPOSITORY, TIMEOUT_S, launch_logged, run_on_ranks
from tests.support.previews import call_preview
from tests.support.rank import SERVER_ENVIRONMENT
from tests.support.workbench import Workbench, call_toolkit, leave_launch, output_of
from toolkit.files.json_lines import load_json_lines
from toolkit.tools.compare import runs
from toolkit.tools.preview.preview import collect

ENVIRONMENT = os.environ | SERVER_ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY)}


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
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), ENVIRONMENT["PATH"]])
    environment = ENVIRONMENT | {f"SLURM_{name}": value for name, value in job.items()} | {"PATH": path}
    command = ["bash", str(REPOSITORY / "docs/launch/slurm.sbatch"), str(tmp_path / "recipe.py"), "--config", "RUN.yaml"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    places = "first 24711 accelerate_configs/fsdp2_hsdp.yaml --config RUN.yaml"
    assert done.stdout.splitlines() == [f"{rank} 2 0 1 {places}" for rank in (0, 1)], done.stderr
    found = (tmp_path / "calls").read_text() if (tmp_path / "calls").exists() else ""
    assert (done.returncode, found) == (exit_code, calls)
