"""`python -m toolkit compare` as a user types it, with real launches: one preset trains, one cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.launch import REPOSITORY, TIMEOUT_S


def test_presets_side_by_side(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "toolkit", "compare", "--presets", "fsdp2_cpu,fsdp2_size_wrap:fsdp_offload_params=true"),
            *("--use-cpu", "--num-processes", "2", "--steps", "6", "--warmup-steps", "2", "--output", str(tmp_path / "compared")),
            *("--", "recipes/mnist.py", "--config", "recipes/configs/mnist_digits.yaml"),
        ],
        cwd=REPOSITORY,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 1, done.stdout[-4000:] + done.stderr[-4000:]
    assert "Traceback" not in done.stderr
    reason = "no repeated block found in Sequential: name one in fsdp_transformer_layer_cls_to_wrap"
    assert f"1/2 fsdp2_cpu: failed: {reason}" in done.stdout
    plain = json.loads((tmp_path / "compared" / "comparison.json").read_text())
    failed, ran = plain["presets"]
    assert failed["figures"] is None and failed["failure"].startswith(reason)
    assert plain["compared_with"] == "fsdp2_size_wrap:fsdp_offload_params=true" and ran["failure"] is None
    assert ran["figures"]["num_timed_steps"] == 4 and ran["figures"]["unit"] == "rows/s"
    assert all(ran["figures"][name] > 0 for name in ("loop_s", "speed", "peak_memory_gib", "save_waits_s", "save_stands_s"))
    assert 0 <= ran["figures"]["evaluation"]["accuracy"] <= 100
    assert (tmp_path / "compared" / "comparison.png").is_file()
    assert "| fsdp2_size_wrap:fsdp_offload_params=true |" in (tmp_path / "compared" / "comparison.md").read_text()
