"""`accelerate launch` on one of two machines: what the page on process groups says about how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.faults.test_restarts import free_port
from tests.support.launch import REPOSITORY


@pytest.mark.parametrize(
    ("machine_rank", "sentence"),
    [(0, "DistStoreError: Timed out after"), (1, "DistNetworkError: The client socket has timed out")],
)
def test_a_launcher_that_is_alone_ends_by_its_own_timeout(tmp_path: Path, machine_rank: int, sentence: str) -> None:
    mapping = yaml.safe_load((REPOSITORY / "accelerate_configs" / "fsdp2_multi_node.yaml").read_text())
    here = {"use_cpu": True, "num_processes": 2, "main_process_ip": "127.0.0.1", "main_process_port": free_port()}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**mapping, **here, "machine_rank": machine_rank}))
    (tmp_path / "script.py").write_text("print('a rank has started')")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", "config.yaml", "--rdzv_conf", "timeout=3"),
            "script.py",
        ],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0 and "a rank has started" not in done.stdout
    assert sentence in done.stderr, done.stderr[-3000:]
