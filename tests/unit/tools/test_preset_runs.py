"""Presets changed to this box, each still a valid accelerate YAML. `compare` around its launches: presets with changes, what
is refused, what fails and lets the rest go on; and the figures of runs as written in metrics.jsonl, their differences and the
table."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from tests.support.launch import GPU_CHECKS, REPOSITORY
from tests.support.model_folders import save_jsonl
from tests.support.refusals import refusal
from tests.support.workbench import call_toolkit
from toolkit.launch.accelerate_yaml import check_accelerate_yaml
from toolkit.tools.compare import runs as comparison
from toolkit.tools.compare.runs import load_preset
from toolkit.tools.compare.table import Outcome, as_json, common_changes, format_comparison, loss_difference, read_figures
from toolkit.tools.preset_runs import adapt_preset, find_preset, launch, reason_of_failure, save_preset

PRESETS = sorted(path.stem for path in (REPOSITORY / "accelerate_configs").glob("*.yaml"))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_run_on_the_cpu_of_one_machine_or_are_refused_there(name, tmp_path):
    path, own = find_preset(name), tmp_path / "folder" / f"{name}.yaml"
    assert path == find_preset(f"{name}.yaml") == find_preset(str(path))
    given = check_accelerate_yaml(path)
    adapted = adapt_preset(given, num_processes=4, use_cpu=True)
    if name in GPU_CHECKS:
        assert re.search("on CPU|on GPUs", refusal(save_preset, adapted, own))
        return
    adapted = check_accelerate_yaml(save_preset(adapted, own))
    assert adapted["use_cpu"] is True and adapted["num_machines"] == 1
    assert adapted.get("num_processes", 1) == (1 if name.startswith("single") else 4)
    changed = {key for key in adapted if adapted[key] != given.get(key)} - {"fsdp_config", "parallelism_config"}
    assert changed <= {"use_cpu", "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port"}


def test_launch_returns_what_the_ranks_exit_with_and_their_sentence(tmp_path):
    script, preset, log = tmp_path / "script.py", tmp_path / "preset.yaml", tmp_path / "log" / "log.txt"
    script.write_text(
        "import sys\nfrom toolkit.errors import UserError, exit_on_user_error\n"
        "with exit_on_user_error():\n    raise UserError(f'{sys.argv[1]} is wrong: write another')\n"
    )
    preset.write_text(yaml.safe_dump({"distributed_type": "NO", "num_processes": 1, "use_cpu": True}))
    assert launch(preset, [str(script), "this\u2028one"], log) != 0
    assert reason_of_failure(log) == "this\u2028one is wrong: write another"
    assert log.read_text() == "error: this\u2028one is wrong: write another\n", "the launcher adds to it"
    script.write_text("print('fine')\n")
    assert launch(preset, [str(script)], log) == 0
    script.write_text("raise ZeroDivisionError('by zero')\n")
    assert launch(preset, [str(script)], log) != 0
    assert reason_of_failure(log) == "ZeroDivisionError: by zero"


@pytest.mark.parametrize("launcher", ["preset_runs", "forks"])
def test_ctrl_c_ends_the_rank_too(tmp_path, launcher):
    """Told to this process alone, as a supervisor would: a terminal tells all of them. It was started in the background, where a
    shell has SIGINT ignored, which the launcher and its ranks do not."""
    pid_file = tmp_path / "pid.txt"
    (tmp_path / "waiting.py").write_text(
        f"import os, pathlib, time\npathlib.Path({str(pid_file)!r}).write_text(f'{{os.getpid()}}.')\ntime.sleep(120)\n"
    )
    with start_launcher(tmp_path, launcher, ["-m", "waiting"], 1) as process:
        deadline = time.monotonic() + 200
        while not (pid_file.exists() and pid_file.read_text().endswith(".")):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(200) != 0
    rank = int(pid_file.read_text().rstrip("."))
    assert not psutil.pid_exists(rank) or psutil.Process(rank).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("is_bad", [False, True], ids=["fork", "fork without CUDA"])
def test_a_forked_rank_that_fails_takes_the_others_down(tmp_path, is_bad):
    """Where a library has initialized CUDA at its import, the ranks begin anew."""
    (tmp_path / "failing.py").write_text(
        "import os, sys, time\nprint('rank', os.environ['RANK'], 'torch' in sys.modules, os.environ['ACCELERATE_USE_FSDP'])\n"
        "sys.stdout.flush()\nif os.environ['RANK'] == '1':\n    raise ZeroDivisionError('by zero')\ntime.sleep(120)\n"
    )
    before = f"import torch; torch.cuda._is_in_bad_fork = lambda: {is_bad}; "
    with start_launcher(tmp_path, "forks", ["-m", "failing"], 2, before) as process:
        assert process.wait(200) == 1
    log = (tmp_path / "log.txt").read_text()
    assert {f"rank {rank} {not is_bad} true" for rank in (0, 1)} <= set(log.splitlines())
    assert reason_of_failure(tmp_path / "log.txt") == "ZeroDivisionError: by zero"


def start_launcher(
    folder: Path, launcher: str, command: list[str], num_processes: int, before: str = ""
) -> subprocess.Popen[bytes]:
    """`launch` of a module in `folder` by a process of its own, with SIGINT ignored, which exits with what it returns."""
    preset = {"distributed_type": "NO", "num_processes": 1, "use_cpu": True}
    if num_processes > 1:
        preset = yaml.safe_load(find_preset("fsdp2_cpu").read_text()) | {"num_processes": num_processes}
    (folder / "preset.yaml").write_text(yaml.safe_dump(preset))
    call = f"{before}import sys, signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from pathlib import Path; "
    call += f"from toolkit.tools.{launcher} import launch; "
    call += f"sys.exit(launch(Path({str(folder / 'preset.yaml')!r}), {command!r}, Path({str(folder / 'log.txt')!r})))"
    path = os.pathsep.join(map(str, (REPOSITORY, folder)))
    return subprocess.Popen(
        [sys.executable, "-c", call], cwd=folder, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )


@pytest.fixture
def launched(monkeypatch) -> list[tuple[dict, dict[str, str]]]:
    """Launches that were asked for: the accelerate YAML and the flags. Each writes two steps of figures, FSDP1 fails."""
    seen = []

    def launch(preset: Path, command: list[str], log_path: Path) -> int:
        mapping, flags = yaml.safe_load(preset.read_text()), dict(flag[2:].split("=", 1) for flag in command[1:] if "=" in flag)
        seen.append((mapping, flags))
        if (mapping.get("fsdp_config") or {}).get("fsdp_version") == 1:
            log_path.write_text("some output\nerror: it is wrong: write another\nTraceback of the launcher\n")
            return 1
        figures = {"loss": 2.0, "step_time_s": 0.5, "num_rows": 4, "num_tokens": 4, "peak_memory_gib": 1.0}
        lines = [{"kind": "train", "step": number, **figures} for number in range(1, int(flags["train.max_steps"]) + 1)]
        folder = Path(flags["run.output_dir"], flags["run.name"])
        folder.mkdir()
        save_jsonl(folder / "metrics.jsonl", lines)
        return 0

    monkeypatch.setattr(comparison, "launch", launch)
    return seen


RECIPE = ("--", "recipes/mnist.py", "--data.source=digits")


def run(*arguments: object) -> int:
    """Exit status of the command."""
    return call_toolkit("compare", *arguments, *RECIPE)


def test_presets_run_one_after_the_other_with_flags_of_their_own(tmp_path, launched, capsys):
    output = tmp_path / "new"
    presets = "ddp,fsdp2_size_wrap:fsdp_min_num_params=7+mixed_precision=no"
    assert (
        run("--presets", presets, "--use-cpu", "--num-processes", 2, "--steps", 6, "--warmup-steps", 4, "--output", output) == 0
    )
    (ddp, ddp_flags), (sized, sized_flags) = launched
    assert (ddp["distributed_type"], ddp["use_cpu"], ddp["num_processes"]) == ("MULTI_GPU", True, 2)
    assert (sized["fsdp_config"]["fsdp_min_num_params"], sized["mixed_precision"], ddp["mixed_precision"]) == (7, "no", "bf16")
    own = {"run.output_dir": str(output), "train.num_epochs": "null", "train.max_steps": "6", "log_every_steps": "4"}
    assert ddp_flags == {"data.source": "digits", **own, "run.name": "1-ddp"}
    assert sized_flags["run.name"] == "2-fsdp2_size_wrap"
    printed = capsys.readouterr().out
    assert "1/2 ddp: done" in printed and "2/2 fsdp2_size_wrap:fsdp_min_num_params=7+mixed_precision=no: running" in printed
    assert "mnist.py: 6 steps, timed from step 5 on; loss difference: the largest over the steps, relative to ddp; " in printed
    assert "changed in all presets: num_processes 8 → 2, use_cpu false → true." in printed
    assert (output / "comparison.md").read_text().partition("\n\n")[2].strip() in printed


def test_a_preset_that_fails_gets_its_sentence_and_the_rest_goes_on(tmp_path, launched, capsys, monkeypatch):
    monkeypatch.setattr("toolkit.launch.environment.cpu_has_bf16", lambda: False)
    presets = "fsdp1_full_shard,fsdp2_hsdp,fsdp1_hybrid_shard,fsdp2_cpu"
    assert run("--presets", presets, "--use-cpu", "--num-processes", 2, "--output", tmp_path) == 1
    assert len(launched) == 2, "what cannot run here is not launched"
    printed = capsys.readouterr()
    assert printed.err.count("mixed_precision is bf16, which this CPU emulates") == 1, "of the one that is launched with it"
    rows = [line for line in printed.out.splitlines() if line.startswith("| fsdp")]
    own_changes = "fsdp_sync_module_states true → false; num_processes 8 → 2; use_cpu false → true"
    assert rows[0].endswith(f"| failed: it is wrong: write another; {own_changes} |")
    assert "failed: a mesh of replicas and shards needs an even number of processes, 4 or more, not 2" in rows[1]
    assert "on CPU it silently shards nothing" in rows[2]
    assert "failed" not in rows[3]


def test_a_gpu_preset_without_gpus_says_how_to_run(tmp_path, launched, capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    assert run("--presets", "ddp,fsdp2_cpu", "--output", tmp_path) == 1
    assert "failed: it needs 8 GPUs, but torch sees none here: add --use-cpu" in capsys.readouterr().out
    assert [mapping["num_processes"] for mapping, _ in launched] == [2]
    launched.clear()
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    assert run("--presets", "ddp,fsdp2_hsdp", "--mixed-precision", "no", "--output", tmp_path / "gpus") == 0
    printed = capsys.readouterr().out
    assert [mapping["num_processes"] for mapping, _ in launched] == [4, 4]
    assert "changed in all presets: mixed_precision bf16 → no, num_processes 8 → 4" not in printed
    assert "num_processes 16 → 4" in printed and "dp_shard_size 8 → 2" in printed


@pytest.mark.parametrize(
    ("presets", "options", "rest", "sentence"),
    [
        ("ddp,nosuch", (), RECIPE, "preset nosuch is neither a file nor one of .*fsdp2_full_shard"),
        ("ddp", ("--steps", "5"), RECIPE, "--steps 5 leaves no step to time after --warmup-steps 5: give more"),
        ("ddp", ("--output", "README.md/here"), RECIPE, "--output README.md/here cannot be made .Not a directory."),
        ("ddp", ("--output", "recipes"), RECIPE, "--output recipes exists and is not an empty folder: name a new one"),
        ("ddp:fsdp_ofload=true", (), RECIPE, "--presets ddp:fsdp_ofload=true: unknown key fsdp_config.fsdp_ofload: did you mean"),
        ("fsdp2_cpu:offload", (), RECIPE, "--presets fsdp2_cpu:offload: offload is not a change: write key=value"),
        ("ddp", (), (), "compare needs a recipe after its own options: add -- recipes/t5.py"),
        ("ddp", (), ("--",), "compare needs a recipe after its own options: add -- recipes/t5.py"),
        ("ddp", (), RECIPE[1:2], "unrecognized arguments: recipes/mnist.py: write the recipe and its flags after --"),
    ],
)
def test_what_is_wrong_is_reported_before_anything_runs(launched, capsys, presets, options, rest, sentence):
    assert call_toolkit("compare", "--presets", presets, *options, *rest) == 2
    assert re.search(f"error: {sentence}", capsys.readouterr().err) and not launched


def test_a_preset_is_changed_in_any_of_its_sections():
    changed = load_preset("fsdp2_compile:dynamo_backend=AOT_EAGER+fsdp_reshard_after_forward=false+num_processes=4")
    assert changed["dynamo_config"]["dynamo_backend"] == "AOT_EAGER" and changed["num_processes"] == 4
    assert changed["fsdp_config"]["fsdp_reshard_after_forward"] is False


def step(number: int, loss: float | None, seconds: float, **others) -> dict:
    figures = {"loss": loss, "step_time_s": seconds, "num_rows": 4, "num_tokens": 40, "peak_memory_gib": 1.0 + number / 8}
    return {"kind": "train", "step": number, **figures, **others}


LINES = [
    {"kind": "eval", "step": 0, "loss": 9.0, "rougeL": 1.0},
    *[step(number, 1 / number, 100.0 if number <= 2 else 0.5) for number in range(1, 7)],
    {"kind": "checkpoint", "step": 3, "blocking_s": 0.25, "write_s": 1.0, "num_bytes": 10},
    {"kind": "eval", "step": 6, "loss": 2.5, "token_accuracy": 50.0, "rougeL": 12.5},
    {"kind": "checkpoint", "step": 6, "blocking_s": 0.75, "write_s": 0.5, "num_bytes": 20},
]


def outcome(tmp_path: Path, preset: str, lines: list[dict], *changes: str) -> Outcome:
    return Outcome(preset, 2, "no", list(changes), read_figures(save_jsonl(tmp_path / "metrics.jsonl", lines), 2))


def test_the_first_steps_are_not_timed_and_what_a_run_lacks_is_not_shown(tmp_path):
    figures = read_figures(save_jsonl(tmp_path / "metrics.jsonl", LINES), 2)
    assert (figures.num_timed_steps, figures.num_bytes, list(figures.losses)) == (4, 20, [1, 2, 3, 4, 5, 6])
    assert figures.evaluation == {"loss": 2.5, "token_accuracy": 50.0, "rougeL": 12.5}
    with pytest.raises(ValueError, match="no step after step 6"):
        read_figures(tmp_path / "metrics.jsonl", 6)
    # Rows of one token are counted as rows.
    lines = [step(number, 1.0, 0.5, num_tokens=4) for number in range(1, 5)]
    few = outcome(tmp_path, "ddp", lines)
    assert (few.figures.save_waits_s, few.figures.evaluation) == (None, {})
    head, _, row = format_comparison([few]).splitlines()
    assert "rows/s" in head and "ROUGE" not in head and len(head.split("|")) == len(row.split("|")) == 13


def test_the_loss_difference_is_the_largest_relative_one(tmp_path):
    def figures(*losses: float | None):
        lines = [step(number, loss, 1.0) for number, loss in enumerate(losses, start=1)]
        return read_figures(save_jsonl(tmp_path / "metrics.jsonl", lines), 0)

    assert loss_difference(figures(2.0, 4.0), figures(2.0, 4.0)) == 0
    assert loss_difference(figures(2.002, 4.4), figures(2.0, 4.0)) == pytest.approx(0.1)
    assert loss_difference(figures(2.0, 4.0, 9.0), figures(2.0, 5.0)) == pytest.approx(0.2)
    assert loss_difference(figures(2.0, None), figures(2.0, None)) == 0
    assert loss_difference(figures(2.0, None), figures(2.0, 1.0)) == float("inf")


def test_the_table_names_the_reference_the_failures_and_what_was_changed(tmp_path):
    """A save that training waits for stands when it goes on: 1.25 s and 0.75 s."""
    other = [line | ({"loss": 1.25 * line["loss"]} if line["kind"] == "train" else {}) for line in LINES]
    outcomes = [
        Outcome("hsdp", 2, "no", ["use_cpu false → true"], failure="a mesh | of 3"),
        outcome(tmp_path, "ddp", LINES, "use_cpu false → true", "num_processes 8 → 2"),
        outcome(tmp_path, "fsdp2", other, "use_cpu false → true"),
    ]
    assert common_changes(outcomes) == ["use_cpu false → true"]
    head, rule, *rows = format_comparison(outcomes).splitlines()
    assert [cell.strip() for cell in head.split("|")[1:-1]] == [
        "preset", "ranks", "precision", "loop s", "tokens/s", "peak GiB", "loss difference", "save waits s", "save stands s",
        "held-out loss", "ROUGE-L", "remarks",
    ]  # fmt: skip
    cells = [[cell.strip() for cell in row.replace("\\|", "/").split("|")[1:-1]] for row in rows]
    assert cells == [
        ["hsdp", "2", "no", *"––––––––", "failed: a mesh / of 3"],
        ["ddp", "2", "no", "2.00", "80", "1.75", "reference", "0.500", "1.000", "2.5000", "12.50", "num_processes 8 → 2"],
        ["fsdp2", "2", "no", "2.00", "80", "1.75", "2.5e-01", "0.500", "1.000", "2.5000", "12.50", ""],
    ]
    assert len({row.rindex("|", 0, len(head) - len(" remarks |") + 1) for row in (head, rule, rows[1])}) == 1, "aligned"
    differences = [plain.get("loss_difference") for plain in as_json(outcomes)]
    assert differences == [None, 0.0, pytest.approx(0.25)]
