"""`accelerate launch` on one of two machines: what the page on process groups says about how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.real_launch import accelerate_launch, finish


@pytest.mark.parametrize(
    ("machine_rank", "sentence"),
    [(0, "DistStoreError: Timed out after"), (1, "DistNetworkError: The client socket has timed out")],
)
def test_a_launcher_that_is_alone_ends_by_its_own_timeout(tmp_path: Path, machine_rank: int, sentence: str) -> None:
    here = {"use_cpu": True, "num_processes": 2, "main_process_ip": "127.0.0.1", "main_process_port": free_port()}
    (tmp_path / "script.py").write_text("print('a rank has started')")
    overrides, flags = here | {"machine_rank": machine_rank}, ["--rdzv_conf", "timeout=3"]
    launcher = accelerate_launch(
        tmp_path / "script.py", [], folder=tmp_path, preset="fsdp2_multi_node", overrides=overrides, flags=flags
    )
    printed = finish(launcher)
    assert launcher.returncode != 0 and "a rank has started" not in printed
    assert sentence in printed, printed[-3000:]
