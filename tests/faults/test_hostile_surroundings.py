"""What surrounds a run: modes of files, control characters in rows and in names."""

from __future__ import annotations

import json
import os
import re
import stat
from functools import partial

import pytest

from tests.faults.harness import run_with
from tests.support.model_folders import make_rows
from tests.support.workbench import new_bench

TITLE = "\x1b]0;owned\x07"
"""A terminal that prints it has another title."""


def test_files_have_the_mode_of_the_umask_and_texts_and_names_are_printed_escaped(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A name of bytes that are not UTF-8, a column that is half a character, breaks that would make a line of their own; and the
    umask of people who share files."""
    bench = new_bench(tmp_path_factory, "surroundings")
    name = f"caf\udce9\nerror: no\u202e{TITLE}|[x](javascript:1)<img src=x>"
    column, unread = f"te\nerror: no{TITLE}`<b>", "\ud800\nerror: no"
    rows = [{column: TITLE + row["source"], "target": TITLE + row["target"], unread: "x"} for row in make_rows(60)]
    (data := bench.runs / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"train__max_steps": 2, "log_row_ids": True, "data__files": data, "data__source_column": column}
    printed = run_with(bench, "names", partial(os.umask, 0o002), **changes, exports=True)
    shown = ascii(name)[1:-1].replace("'", "\\'")
    assert f"{shown}.jsonl: read as a source with its target, from 'te\\nerror: no" in printed
    assert "; not read: '\\ud800\\nerror: no'" in printed
    assert f"  reference: {ascii(TITLE)[1:-1]}" in printed and f"  text:      {ascii(TITLE)[1:-1]}" in printed
    card, page = ((bench.runs / "names" / name).read_text() for name in ("export/README.md", "report.html"))
    hostile = re.compile(r"^error: no|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202e\ud800-\udfff]", re.MULTILINE)
    assert not hostile.search(printed) and not hostile.search(card)
    assert "<img" not in card and r"\[x\](javascript" in card and "<img src=x>" not in page
    files = [path for path in (bench.runs / "names").rglob("*") if path.is_file()]
    assert {"rng-00001.safetensors", "__1_0.distcp", "model.safetensors", "metrics.jsonl", ".lock"} <= {p.name for p in files}
    assert {path.name: oct(mode) for path in files if (mode := stat.S_IMODE(path.stat().st_mode)) != 0o664} == {}
    # The same command goes on from there: the names that it has written are the names that it reads.
    assert "nothing left to train" in run_with(bench, "names", **changes)
