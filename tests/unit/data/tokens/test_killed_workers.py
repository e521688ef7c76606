"""Processes that tokenize or collate are killed, or have a long folder of temporary files."""

import os
import re
import signal
import subprocess
import sys

import pytest
from datasets import Dataset

from toolkit.data.tokens import prepare
from toolkit.errors import UserError


def tokenize(batch: dict[str, list]) -> dict[str, list]:
    if 3 in batch["row_id"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"row_id": batch["row_id"], "length": [len(text) for text in batch["source"]]}


def test_a_killed_worker_is_one_sentence(monkeypatch):
    monkeypatch.setattr(prepare, "_ROWS_WORTH_SEVERAL_PROCESSES", 1)
    rows = Dataset.from_dict({"row_id": list(range(4)), "source": ["a"] * 4})
    with pytest.raises(UserError, match="one of the 2 processes that tokenize the train rows was killed"):
        list(prepare.tokenize_rows(rows, tokenize, "train", 2))


SCRIPT = """
import os, signal, sys, time
import datasets
from toolkit.data import batch_plan, collate
from toolkit.data.tokens import prepare
from toolkit.errors import as_user_error

if __name__ == "__main__":
    prepare._ROWS_WORTH_SEVERAL_PROCESSES = 1
    rows = datasets.Dataset.from_dict({"input_ids": [[5, 6]] * 8, "labels": [[-100, 6]] * 8})
    print(sum(map(len, prepare.tokenize_rows(rows, lambda rows: {"length": [1] * 8}, "train", 2))))

    class Killed(collate.CausalCollator):
        def collate(self, packs, *, is_dummy=False):
            if packs[0][0]["input_ids"] == [0]:
                time.sleep(1)  # the batch before is on its way
                os.kill(os.getpid(), signal.SIGKILL)
            return super().collate(packs, is_dummy=is_dummy)

    rows = datasets.concatenate_datasets([rows, datasets.Dataset.from_dict({"input_ids": [[0]], "labels": [[0]]})])
    keys = [batch_plan.MicroBatch(1, number, False, ((row,),), False) for number, row in enumerate((0, 8))]
    try:
        for _, batch in collate.load_micro_batches(rows, keys, Killed(0), num_workers=1, pin_memory=False):
            print(batch["input_ids"].tolist())
    except RuntimeError as error:
        print(as_user_error(error))
"""


def test_workers_need_no_short_folder_of_temporary_files_and_a_lost_one_is_a_sentence(tmp_path):
    """Paths of sockets have at most 107 bytes, and those of workers stood in TMPDIR: a rank waited for one that could not."""
    folder, script = tmp_path / ("long" * 25), tmp_path / "script.py"
    folder.mkdir()
    script.write_text(SCRIPT)
    command = [sys.executable, str(script)]
    environment = os.environ | {"TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    *printed, said = ended.stdout.splitlines()
    assert printed == ["8", "[[5, 6]]"], ended.stderr
    assert re.sub("is killed by signal: Killed|exited unexpectedly", "ended", said) == (
        "a process that collates batches ended: free memory, where the system ends processes because it runs out, or set "
        "data.num_loader_workers 0, and start the same command again"
    )
