"""wandb, offline: its files have each figure of `metrics.jsonl` once, under one id; a key is not written; failures."""

import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.support.workbench import Workbench
from tests.trackers.checks import Points, check_failure_in_mid_run, check_points, check_refused, run_two

KEY = "planted4711" * 4  # as long as a real one
BLOCK_BYTES, RECORD_HEADER_BYTES, FILE_HEADER_BYTES = 32768, 7, 7


@pytest.fixture(scope="module")
def logged(bench) -> Workbench:
    with patch.dict(os.environ, {"WANDB_API_KEY": KEY}):
        run_two(bench, "wandb")
    return bench


def load_records(path: Path) -> list:
    """The protocol buffers of a `.wandb` file: LevelDB's log format, whose records are cut at blocks."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, parts, records = path.read_bytes(), FILE_HEADER_BYTES, b"", []
    assert content.startswith(b":W&B")
    while position + RECORD_HEADER_BYTES <= len(content):
        if (left := BLOCK_BYTES - position % BLOCK_BYTES) < RECORD_HEADER_BYTES:
            position += left
            continue
        num_bytes, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        position += RECORD_HEADER_BYTES
        parts += content[position : position + num_bytes]
        position += num_bytes
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(Record.FromString(parts))
            parts = b""
    return records


def load(run_folder: Path) -> tuple[Points, list]:
    """The figures, and the descriptions of wandb's run by each start, in order."""
    points: Points = {}
    runs = []
    for path in sorted(run_folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for record in load_records(path):
            if record.HasField("run"):
                runs.append(record.run)
            if record.HasField("history"):
                items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                for name, value in items.items():
                    if not name.startswith("_"):
                        points.setdefault(name, []).append((items.get("_step", record.history.step.num), value))
    return points, runs


def test_every_loss_is_there_once_and_two_runs_are_two(logged):
    found = {name: load(logged.runs / name) for name in ("one", "killed")}
    for name, (points, runs) in found.items():
        check_points(logged, name, points)
        assert {(run.project, run.display_name) for run in runs} == {("shelf", name)}
        assert len({run.run_id for run in runs}) == 1
    assert found["one"][1][0].run_id != found["killed"][1][0].run_id


def test_a_key_is_not_written_or_printed(logged):
    files = [path for path in logged.runs.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files) and any(path.name == "report.html" for path in files)
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


def test_without_a_login_it_is_one_sentence_on_all_ranks(bench):
    with patch.dict(os.environ, {"WANDB_MODE": "online"}):
        why = check_refused(bench, "wandb")
    assert why.startswith("no API key is configured): run `wandb login`, or set WANDB_MODE=offline, or ")
    assert not (bench.runs / "refused" / "config.yaml").exists()


def kill_the_service() -> None:
    """wandb's own process, which writes its files."""
    import psutil

    for process in psutil.Process().children(recursive=True):
        if "wandb-core" in process.name():
            process.kill()
            process.wait()


def test_a_failure_in_mid_run_is_one_warning(bench):
    warning = check_failure_in_mid_run(bench, "wandb", kill_the_service)
    assert warning.startswith(("wandb failed at step ", "wandb could not be closed ("))
