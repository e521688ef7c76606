"""The example notebook, run as it stands: its cells in order, in one process without a launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.launch import REPOSITORY

NOTEBOOK = REPOSITORY / "docs" / "examples" / "python_api.ipynb"


def test_the_notebook_runs_offline_and_its_model_learns(tmp_path: Path) -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells), "the notebook is kept without outputs"
    checks = "assert losses[-1][1] < 0.6 * losses[0][1] and result.figures['first_digit'] > 30, (losses, result)\n"
    checks += "assert text == row['prompt'] + row['completion'] and result.figures['exact_match'] > 90, (text, row, result)"
    script = tmp_path / "notebook.py"
    script.write_text("\n\n".join(["".join(cell["source"]) for cell in cells] + [checks]))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
    ran = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-3000:]
    assert "Creating parquet" not in ran.stderr, "a library's progress bar"
    assert "data        train-" in ran.stdout, "data given in Python has a name"
    assert "yours trains, which holds all logits of a micro-batch; cross-entropy evaluates" in ran.stdout
