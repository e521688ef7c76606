"""Rows from a Python file of the user's: the file runs on one process of a node, and the run trains, evaluates and resumes."""

from __future__ import annotations

from pathlib import Path

from tests.recipes.test_resume import rows_by_step
from tests.support.workbench import Workbench

T5_ROWS = """
import os
from pathlib import Path

def load_rows(config):
    with (Path(__file__).parent / "ranks").open("a") as ranks:
        ranks.write(os.environ["RANK"])
    for i in range(40):
        yield {"source": f"alpha {i:b} beta", "target": f"beta {i:b}", "split": "eval" if i % 8 == 0 else "train"}
"""


def test_t5_trains_on_rows_of_ones_own_and_resumes_where_the_file_has_moved(workbench: Workbench, tmp_path: Path) -> None:
    (tmp_path / "my_rows.py").write_text(T5_ROWS)
    own = {"data__source": f"{tmp_path}/my_rows.py:load_rows", "data__files": None, "data__cache_dir": tmp_path / "cache"}
    workbench.run("run", log_row_ids=True, **own, checkpoint__every_steps=2, train__max_steps=2, eval__num_rows=None)
    assert workbench.lines("run", "eval")[-1]["num_rows"] == 5
    assert {row for rows in rows_by_step(workbench.runs / "run").values() for row in rows}.isdisjoint(range(0, 40, 8))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "my_rows.py").rename(tmp_path / "elsewhere/my_rows.py")
    own["data__source"] = f"{tmp_path}/elsewhere/my_rows.py:load_rows"
    printed = workbench.run("run", log_row_ids=True, **own, checkpoint__every_steps=2, train__max_steps=4, eval__num_rows=None)
    assert "after step 2" in printed
    calls = [(tmp_path / folder / "ranks").read_text() for folder in (".", "elsewhere")]
    assert calls == ["00", "0"]  # hashed and read, then hashed; never on rank 1
