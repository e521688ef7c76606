"""Presets changed to this box, each still a valid accelerate YAML."""

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
from tests.support.refusals import refusal
from toolkit.launch.accelerate_yaml import check_accelerate_yaml
from toolkit.tools.preset_runs import adapt_preset, find_preset, launch, reason_of_failure, save_preset

PRESETS = sorted(path.stem for path in (REPOSITORY / "accelerate_configs").glob("*.yaml"))
GPU_ONLY = set(GPU_CHECKS)


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in GPU_ONLY])
def test_presets_run_on_the_cpu_of_one_machine(name, tmp_path):
    given = check_accelerate_yaml(find_preset(name))
    adapted = check_accelerate_yaml(
        save_preset(adapt_preset(given, num_processes=4, use_cpu=True), tmp_path / "folder" / f"{name}.yaml")
    )
    assert adapted["use_cpu"] is True and adapted["num_machines"] == 1
    assert adapted.get("num_processes", 1) == (1 if name.startswith("single") else 4)
    changed = {key for key in adapted if adapted[key] != given.get(key)} - {"fsdp_config", "parallelism_config"}
    assert changed <= {"use_cpu", "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port"}


def test_presets_are_found_by_name_and_by_path_and_those_of_gpus_refused_on_a_cpu(tmp_path):
    assert find_preset("ddp") == find_preset("ddp.yaml") == find_preset(str(find_preset("ddp")))
    assert re.match("preset nosuch is neither a file.*fsdp2_full_shard", refusal(find_preset, "nosuch"))
    hybrid = check_accelerate_yaml(find_preset("fsdp2_hsdp"))
    assert "4 or more, not 3" in refusal(adapt_preset, hybrid, num_processes=3, use_cpu=True)
    for name in GPU_ONLY:
        adapted = adapt_preset(check_accelerate_yaml(find_preset(name)), num_processes=2, use_cpu=True)
        assert re.search("on CPU|on GPUs", refusal(save_preset, adapted, tmp_path / f"{name}.yaml"))


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
