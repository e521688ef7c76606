"""The folder of a run: one that not every node can use is refused; one that is removed under the run is made again; the modes
of its files, and control characters in rows and in names.
"""

import json
import os
import re
import shutil
import socket
import stat
import threading
from functools import partial
from pathlib import Path
from unittest.mock import patch

from tests.faults.harness import run_with
from tests.faults.workers.faulty_recipe import at_step, this_rank
from tests.support.checkpoint_files import found_folder
from tests.support.launch import run_on_ranks
from tests.support.model_folders import make_rows
from toolkit.config.data import DataConfig
from toolkit.config.schema import ModelConfig, RunConfig, SummarizationConfig
from toolkit.errors import UserError

TITLE = "\x1b]0;owned\x07"
"""A terminal that prints it has another title."""


def test_a_folder_that_one_node_does_not_see_is_refused_on_every_rank(tmp_path):
    """It is there on both nodes, and so would be every folder of a checkpoint, each with a half of it. One that cannot be
    written: `tests/recipes/test_bad_input.py`."""
    for node in ("node0", "node1"):
        (tmp_path / node / "runs/run").mkdir(parents=True)
    host = socket.gethostname()
    found = run_on_ranks(open_on_two_nodes, preset="fsdp2_cpu", args=(tmp_path,))
    assert found[0] == found[1] == [
        f"run.output_dir runs: what {host} writes into runs/run is not there in {tmp_path}/node1/runs/run on {host}: name a "
        "folder on a file system that all nodes share",
        "runs/run",
    ]  # fmt: skip
    assert list((tmp_path / "node0/runs/run").iterdir()) == []


def open_on_two_nodes(folder: Path) -> list[str]:
    """On a rank, which stands for a node and has a working directory of its own: what comes of a relative `runs` on each node's
    disk, and of one that rank 1 sees late, as on a network file system that answers from its cache."""
    from toolkit.distributed.comm import gather_objects, rank
    from toolkit.launch import run_folder
    from toolkit.launch.accelerator import build_accelerator

    def attempt() -> str:
        run = RunConfig(output_dir="runs", name="run")
        config = SummarizationConfig(model=ModelConfig(name_or_path="model"), data=DataConfig(source="not/read"), run=run)
        try:
            return str(run_folder.open_run_folder(config))
        except UserError as error:
            return str(error)

    os.chdir(folder / f"node{os.environ['RANK']}")
    build_accelerator()
    with patch.object(run_folder, "PROBE_TIMEOUT_S", 0.5):
        found = [attempt()]
    if rank() == 1:
        shutil.rmtree("runs")
    gather_objects(None)
    if rank() == 1:
        threading.Timer(1.0, lambda: Path("runs").symlink_to("../node0/runs")).start()
    return [*found, attempt()]


def remove_at(step: int, path: Path) -> None:
    """Rank 0 removes it, all at once."""
    if this_rank() == 0:
        at_step(step, lambda: shutil.rmtree(path.rename(path.with_name(f"{path.name}.gone"))))


def test_a_folder_that_is_removed_is_made_again(bench):
    """What was there is lost; the run comes to its end, with every file that a run has."""
    run = bench.runs / "all"
    # Saves that training waits for: beside one, nobody knows which of the next steps' files are there by then.
    settings = {
        "train__max_steps": 6, "checkpoint__every_steps": 2, "checkpoint__keep_last": 9, "checkpoint__async_save": False,
        "eval__every_steps": 2, "eval__at_start": True, "log_row_ids": True,
    }  # fmt: skip
    printed = run_with(bench, "all", partial(remove_at, 4, run), **settings, exports=True)
    said = f"{run}/metrics.jsonl was removed or changed during the run: figures that it no longer has are lost"
    assert printed.count(said) == 1
    steps = [[line["step"] for line in bench.lines("all", kind)] for kind in ("train", "eval", "checkpoint")]
    assert steps == [[4, 5, 6], [4, 6], [4, 6]]
    table = printed.partition("% distinct")[2].partition("\n\n")[0].partition("\n")[2]
    first_words = [line.partition("  ")[0].partition(' "')[0] for line in table.splitlines() if "  " in line]
    assert first_words == ["lead sentence", "constant", "after step 4", "after step 6"] and "generated:" in printed
    assert bench.checkpoints("all") == ["step-00000004", "step-00000006"]
    assert found_folder(run, "auto") == (run / "checkpoints/step-00000006", [])
    for name in ("config.yaml", ".lock", "export/model.safetensors", "curves.png", "memory.json", "rows-00001.jsonl"):
        assert (run / name).exists(), name


def test_files_have_the_mode_of_the_umask_and_texts_and_names_are_printed_escaped(bench):
    """A name of bytes that are not UTF-8, a column that is half a character, breaks that would make a line of their own; and the
    umask of people who share files."""
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
