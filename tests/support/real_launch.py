"""The real `accelerate launch`, for tests that are about it: its agent, signals, restarts, the command as a user types it."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.launch import REPOSITORY, TIMEOUT_S, write_accelerate_yaml
from tests.support.rank import SERVER_ENVIRONMENT
from toolkit.tools.forks import take_signals


def accelerate_launch(
    script: Path | str,
    argv: Sequence[Path | str],
    *,
    folder: Path,
    preset: str = "fsdp2_cpu",
    overrides: dict | None = None,
    flags: Sequence[str] = (),
    env: dict[str, str] | None = None,
    within: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """Start it and return at once; `stdout` has what the launcher and its ranks print, on stderr too.

    Args:
        folder: takes the preset's YAML, into which `overrides` are merged.
        flags: of the launcher.
        within: the command that runs it.
    """
    accelerate_yaml, _ = write_accelerate_yaml(Path(tempfile.mkdtemp(dir=folder)), preset, overrides)
    command = [*within, sys.executable, "-m", "accelerate.commands.launch", "--config_file", accelerate_yaml, *flags]
    environment = os.environ | SERVER_ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY)} | (env or {})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "preexec_fn": take_signals}
    return subprocess.Popen([*command, script, *argv], cwd=REPOSITORY, env=environment, **pipes)


def finish(launcher: subprocess.Popen[str], timeout_s: float = TIMEOUT_S) -> str:
    """What the launcher and its ranks have printed when they end; one that hangs is stopped, and its ranks with it."""
    try:
        return launcher.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        launcher.send_signal(signal.SIGTERM)
        return "HANGS\n" + launcher.communicate()[0]
