"""`preview` and the run share one cache: what one has tokenized, the other reads; and both take the same rows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import REPOSITORY, TIMEOUT_S
from tests.support.previews import call_preview
from tests.support.workbench import Workbench, new_bench
from toolkit.files.json_lines import load_json_lines
from toolkit.tools.preview.preview import collect


def test_the_run_reads_what_preview_has_tokenized(tmp_path_factory: pytest.TempPathFactory) -> None:
    bench = new_bench(tmp_path_factory, "preview")
    changes: dict[str, Any] = {"data__prefix": "preview: ", "log_row_ids": True}
    # As a program, and its reader stops early, as `head` does.
    command = [sys.executable, "-m", "toolkit", "preview", *bench.flags("run", **changes)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as started:
        assert started.stdout is not None and started.stderr is not None
        lines = [next(started.stdout)]
        while "an encoder-decoder" not in lines[-1]:
            lines.append(next(started.stdout))
        started.stdout.close()
        printed = started.stderr.read()
        assert started.wait(timeout=TIMEOUT_S) == 0 and "Traceback" not in printed and "BrokenPipe" not in printed, printed
    assert ": read as a source with its target" in lines[0]
    # The run on two processes.
    tokenized = token_files(bench)
    assert tokenized
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
    return {path: path.stat().st_ino for path in (bench.data / "cache").rglob("train/*.arrow")}
