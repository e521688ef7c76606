"""What surrounds a run: modes of files, control characters in rows and in names."""

from __future__ import annotations

import json
import os
import re
import stat
from functools import partial
from typing import Any

import pytest

from tests.faults.harness import attempt_with, run_with
from tests.support.model_folders import make_rows, save_jsonl
from tests.support.workbench import Workbench, new_bench

CHANGES: dict[str, Any] = {"train__max_steps": 2, "log_row_ids": True}
TITLE = "\x1b]0;owned\x07"
"""A terminal that prints it has another title."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """The runs of this file; `whole` has rows that would set the terminal's title, and the umask of people who share files."""
    bench = new_bench(tmp_path_factory, "surroundings")
    rows = [{name: f"{TITLE}{text}" for name, text in row.items()} for row in make_rows(60)]
    changes = CHANGES | {"data__files": save_jsonl(bench.runs / "rows.jsonl", rows)}
    result = attempt_with(bench, "whole", partial(os.umask, 0o002), **changes, exports=True)
    assert result.returncodes == [0, 0], result.stderr[-6000:]
    (bench.runs / "printed.txt").write_text(result.stdout + result.stderr)
    return bench


def test_every_file_has_the_mode_of_the_umask(bench: Workbench) -> None:
    files = [path for path in (bench.runs / "whole").rglob("*") if path.is_file()]
    assert {"rng-00001.safetensors", "__1_0.distcp", "model.safetensors", "metrics.jsonl", ".lock"} <= {p.name for p in files}
    assert {path.name: oct(mode) for path in files if (mode := stat.S_IMODE(path.stat().st_mode)) != 0o664} == {}


def test_text_of_rows_does_not_reach_the_terminal_as_it_is(bench: Workbench) -> None:
    printed = (bench.runs / "printed.txt").read_text()
    assert f"  reference: {ascii(TITLE)[1:-1]}" in printed and f"  text:      {ascii(TITLE)[1:-1]}" in printed
    assert not re.findall(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", printed)


def test_names_of_files_and_columns_are_one_line_and_can_be_written(bench: Workbench) -> None:
    """A name of bytes that are not UTF-8, a column that is half a character, breaks that would make a line of their own."""
    name = f"caf\udce9\nerror: no\u202e{TITLE}|[x](javascript:1)<img src=x>"
    column, unread = f"te\nerror: no{TITLE}`<b>", "\ud800\nerror: no"
    rows = [{column: row["source"], "target": row["target"], unread: "x"} for row in make_rows(60)]
    (data := bench.runs / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = CHANGES | {"data__files": data, "data__source_column": column}
    printed = run_with(bench, "names", **changes, exports=True)
    shown = ascii(name)[1:-1].replace("'", "\\'")
    assert f"{shown}.jsonl: read as a source with its target, from 'te\\nerror: no" in printed
    assert "; not read: '\\ud800\\nerror: no'" in printed
    card, page = ((bench.runs / "names" / name).read_text() for name in ("export/README.md", "report.html"))
    hostile = re.compile(r"^error: no|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202e\ud800-\udfff]", re.MULTILINE)
    assert not hostile.search(printed) and not hostile.search(card)
    assert "<img" not in card and r"\[x\](javascript" in card and "<img src=x>" not in page
    # The same command goes on from there: the names that it has written are the names that it reads.
    assert "nothing left to train" in run_with(bench, "names", **changes)
