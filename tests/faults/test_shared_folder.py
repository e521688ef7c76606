"""A run folder that not every node can use is refused at the start, not by a broken checkpoint later.

Two ranks stand for two nodes: each has a working directory of its own, and `run.output_dir` is a relative path.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.recipes.bad_input import FLAGS, ROWS, Case, check, fill, write
from tests.support.launch import TIMEOUT_S, launch, run_on_ranks
from tests.support.workbench import RECIPE
from toolkit.config.data import DataConfig
from toolkit.config.schema import ModelConfig, RunConfig, SummarizationConfig
from toolkit.errors import UserError

NOBODY = 65534
SCRIPT = f"""
import os, runpy
os.chdir(f"node{{os.environ['RANK']}}")
runpy.run_path({str(RECIPE)!r}, run_name="__main__")
"""


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`node0` and `node1`, each with a run folder `runs/run`, in the working directory of a test."""
    for node in ("node0", "node1"):
        (tmp_path / node / "runs/run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def unwritable() -> Iterator[Path]:
    """A folder that a user without rights can find, but not write to."""
    folder = Path(tempfile.mkdtemp(prefix="unwritable-"))
    folder.chmod(0o555)
    yield folder
    shutil.rmtree(folder)


def test_a_folder_on_each_nodes_own_disk_is_refused(nodes: Path) -> None:
    """The folder is there on both, and so would be every folder of a checkpoint, each with a half of it."""
    write(nodes, {"script.py": SCRIPT, "rows.jsonl": ROWS})
    flags = f"{FLAGS['t5']} --model.from_scratch true".replace("{here}/runs", "runs")
    argv = [fill(flag, nodes) for flag in flags.split()]
    result = launch(nodes / "script.py", argv, preset="fsdp2_cpu", timeout_s=TIMEOUT_S)
    host = socket.gethostname()
    sentence = (
        f"run.output_dir runs: what {host} writes into runs/run is not there in {{here}}/node1/runs/run on {host}: name a folder "
        "on a file system that all nodes share"
    )
    check(nodes, Case(sentence=sentence), result)
    for node in ("node0", "node1"):
        assert list((nodes / node / "runs/run").iterdir()) == []


def test_a_file_that_shows_late_is_waited_for(nodes: Path) -> None:
    """As on a network file system that answers from its cache."""
    shutil.rmtree(nodes / "node1/runs")
    assert run_on_ranks(open_late, preset="fsdp2_cpu", timeout_s=TIMEOUT_S) == ["runs/run"] * 2
    assert list((nodes / "node0/runs/run").iterdir()) == []


def test_a_folder_without_rights_is_refused_on_every_rank(unwritable: Path) -> None:
    why = "cannot be written (Permission denied): name a folder that you can write to"
    sentence = f"run.output_dir {unwritable}: {unwritable}/run {why}"
    assert run_on_ranks(open_as_nobody, preset="fsdp2_cpu", args=(str(unwritable),), timeout_s=TIMEOUT_S) == [sentence] * 2
    (unwritable / "run").mkdir()
    (unwritable / "run").chmod(0o555)
    assert run_on_ranks(open_as_nobody, preset="fsdp2_cpu", args=(str(unwritable),), timeout_s=TIMEOUT_S) == [sentence] * 2


def open_late() -> str:
    """On a rank: open the run's folder, which rank 1 sees after a while."""
    from toolkit.distributed.comm import gather_objects, rank
    from toolkit.launch.accelerator import build_accelerator
    from toolkit.launch.run_folder import open_run_folder

    os.chdir(f"node{os.environ['RANK']}")
    build_accelerator()
    gather_objects(None)
    if rank() == 1:
        threading.Timer(1.0, lambda: Path("runs").symlink_to("../node0/runs")).start()
    return str(open_run_folder(config("runs")))


def open_as_nobody(output_dir: str) -> str:
    """On a rank: the sentence for a user without rights."""
    from toolkit.launch.accelerator import build_accelerator
    from toolkit.launch.run_folder import open_run_folder

    build_accelerator()
    user = os.geteuid()
    if user == 0:  # who may write everywhere
        os.seteuid(NOBODY)
    try:
        open_run_folder(config(output_dir))
    except UserError as error:
        return str(error)
    finally:
        os.seteuid(user)
    return "no error"


def config(output_dir: str) -> SummarizationConfig:
    run = RunConfig(output_dir=output_dir, name="run")
    return SummarizationConfig(model=ModelConfig(name_or_path="model"), data=DataConfig(source="not/read"), run=run)
