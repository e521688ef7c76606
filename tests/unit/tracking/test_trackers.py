"""The end of trackers: ranks leave together. What they are started with is in `test_metrics_log.py`."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

from tests.support.launch import run_on_ranks


def close_slowly(uploaded: str) -> bool:
    """Close a tracker that uploads on rank 0 alone; whether the upload was over when this rank went on."""
    from toolkit.distributed.comm import rank
    from toolkit.launch.accelerator import build_accelerator
    from toolkit.tracking.trackers import close_trackers

    build_accelerator([], "")

    def upload() -> None:
        time.sleep(1)
        Path(uploaded).touch()

    close_trackers(SimpleNamespace(trackers=[SimpleNamespace(finish=upload)] if rank() == 0 else []))
    return Path(uploaded).exists()


def test_no_rank_leaves_before_the_trackers_are_closed(tmp_path: Path) -> None:
    assert run_on_ranks(close_slowly, preset="ddp_cpu", args=(str(tmp_path / "uploaded"),)) == [True, True]
