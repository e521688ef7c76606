"""The launcher of the tests: exit codes, outputs, killed ranks, timeouts, and the same environment as the real launcher's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support import launch as launcher
from tests.support.launch import GPU_CHECKS, GPU_PRESET_OVERRIDES_ON_CPU, REPOSITORY, launch, run_on_ranks, start

PRESETS = sorted((REPOSITORY / "accelerate_configs").glob("*.yaml"))

REPORT_SCRIPT = """
import json, os, sys
import helper_beside_the_script
from toolkit.launch.accelerate_yaml import find_accelerate_yaml
names = [name for name in os.environ if name.split("_")[0] in ("ACCELERATE", "FSDP", "RANK", "LOCAL", "WORLD", "MASTER", "OMP")]
report = {"environment": {name: os.environ[name] for name in names}, "argv": sys.argv[1:], "main": __name__,
          "yaml": str(find_accelerate_yaml())}
with open(os.path.join(sys.argv[1], os.environ.get("RANK", "0") + ".json"), "w") as file:
    json.dump(report, file)
"""

IGNORES_TERM = """
import os, signal, sys, time
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(sys.argv[1], "w").close()
    time.sleep(60)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
sys.exit(3)
"""


def write(folder: Path, text: str) -> Path:
    (folder / "helper_beside_the_script.py").write_text("")
    script = folder / "script.py"
    script.write_text(text)
    return script


@pytest.mark.parametrize(
    ("text", "code", "stderr"),
    [
        ("print('done')", 0, ""),
        ("import sys; sys.exit('one sentence')", 1, "one sentence\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("import atexit, sys; atexit.register(lambda: print('at the end', file=sys.stderr))", 0, "at the end\n"),
    ],
)
def test_exit_code_and_stderr_are_those_of_a_process(tmp_path: Path, text: str, code: int, stderr: str) -> None:
    result = launch(write(tmp_path, text), [], preset="single", timeout_s=120)
    assert result.returncodes == [code]
    assert stderr in result.stderr


def test_environment_is_that_of_accelerate_launch(tmp_path: Path) -> None:
    """Against the real launcher, which also proves that the YAML is found from its command line."""
    script = write(tmp_path, REPORT_SCRIPT)
    preset = REPOSITORY / "accelerate_configs" / "fsdp2_cpu.yaml"
    reports = []
    for way in ("real", "forked"):
        (tmp_path / way).mkdir()
        argv = [str(tmp_path / way), "--config_file=mine.yaml"]
        if way == "real":
            command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", preset.name, str(script), *argv]
            environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
            subprocess.run(command, cwd=preset.parent, env=environment, check=True, timeout=200)
        else:
            assert launch(script, argv, preset="fsdp2_cpu", timeout_s=120).returncodes == [0, 0]
        reports.append([json.loads((tmp_path / way / f"{rank}.json").read_text()) for rank in range(2)])
    for real, forked in zip(*reports, strict=True):
        assert real.pop("yaml") == str(preset)
        assert forked.pop("yaml").endswith("fsdp2_cpu.yaml")
        assert real["argv"].pop(0) != forked["argv"].pop(0)
        assert real["environment"].pop("MASTER_PORT") != forked["environment"].pop("MASTER_PORT")
        assert real == forked


def test_a_killed_rank_takes_the_others_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "PEER_GRACE_S", 0.2)
    with start(write(tmp_path, "import time\nprint('up')\ntime.sleep(60)"), [], preset="ddp_cpu") as running:
        running.wait_for_output("up", times=2, timeout_s=120)
        os.kill(running.pids[1], signal.SIGKILL)
        assert running.wait(120).returncodes == [-signal.SIGTERM, -signal.SIGKILL]


def test_a_rank_that_ignores_term_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "PEER_GRACE_S", 0.2)
    monkeypatch.setattr(launcher, "TERM_TO_KILL_S", 0.2)
    script = write(tmp_path, IGNORES_TERM)
    assert launch(script, [str(tmp_path / "ready")], preset="ddp_cpu", timeout_s=120).returncodes == [-9, 3]


def test_a_timeout_names_itself_shows_the_output_and_leaves_no_process(tmp_path: Path) -> None:
    script = write(tmp_path, "import time\nprint('got this far')\ntime.sleep(60)")
    expected = pytest.raises(AssertionError, match="(?s)not finished after 1.*got this far")
    with start(script, [], preset="ddp_cpu") as running, expected:
        running.wait(1)
    for pid in running.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_variable_that_was_read_at_import_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="HF_HOME='/elsewhere' comes too late"):
        launch(write(tmp_path, ""), [], preset="single", env={"HF_HOME": "/elsewhere"})


def what_is_imported(names: list[str]) -> list[bool]:
    return [name in sys.modules for name in names]


def test_preload_took_every_library() -> None:
    """A misspelt or vanished module is skipped silently by the server, and each rank would pay for its import."""
    assert run_on_ranks(what_is_imported, preset="single", args=(launcher.PRELOADED,), timeout_s=120) == [
        [True] * len(launcher.PRELOADED)
    ]


def fail_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise KeyError("lost")


def test_an_exception_is_raised_again_with_the_ranks_traceback() -> None:
    with pytest.raises(KeyError, match="lost") as raised:
        run_on_ranks(fail_on_rank_1, preset="ddp_cpu", timeout_s=120)
    assert "error-1" in raised.value.__notes__[0] and "in fail_on_rank_1" in raised.value.__notes__[0]


def test_every_gpu_preset_has_its_overrides_for_cpu() -> None:
    gpu = [path.stem for path in PRESETS if path.stem != "single" and not yaml.safe_load(path.read_text())["use_cpu"]]
    assert sorted([*GPU_PRESET_OVERRIDES_ON_CPU, *GPU_CHECKS]) == gpu
