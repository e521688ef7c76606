"""Which kernels the runs of `verify` take on a GPU, and what it says of them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.nn.attention import SDPBackend

from toolkit.models.attention import describe_attention
from toolkit.tools.verify.verify import verify
from toolkit.tools.verify.watched_run import take_exact_kernels


@pytest.mark.parametrize(("precision", "is_exact"), [("no", True), ("bf16", False)])
def test_a_run_in_fp32_takes_attention_that_adds_in_a_fixed_order(
    monkeypatch: pytest.MonkeyPatch, precision: str, is_exact: bool
) -> None:
    """`warn_only` leaves the memory-efficient kernel its split backward: two equal runs on a GPU differed in their last bits."""
    monkeypatch.setattr(os, "environ", {"ACCELERATE_MIXED_PRECISION": precision})
    switches = {name: getattr(torch.backends.cuda, f"enable_{name}_sdp") for name in ("flash", "mem_efficient", "cudnn", "math")}
    is_on = {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled") for name in switches}
    query = torch.ones(1, 2, 8, 16)
    assert torch._fused_sdp_choice(query, query, query) == SDPBackend.FLASH_ATTENTION.value
    try:
        take_exact_kernels()
        assert [name for name in switches if is_on[name]()] == (["math"] if is_exact else list(switches))
        assert (torch._fused_sdp_choice(query, query, query) == SDPBackend.MATH.value) == is_exact
        assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        if is_exact:
            model: Any = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa", is_encoder_decoder=True))
            said = describe_attention(model, torch.device("cuda"), torch.float32, packing=False)
            assert said == "sdpa, torch's math kernel"
    finally:
        torch.use_deterministic_algorithms(False)
        for switch in switches.values():
            switch(True)


def test_the_first_line_says_which_kernels_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr("toolkit.tools.verify.verify.launch_all", MagicMock(side_effect=InterruptedError))
    on_gpus = "8 processes on GPUs, fp32 (products in ieee precision, attention by torch's math kernel): 8 runs"
    for use_cpu, said in ((False, on_gpus), (True, "2 processes on the CPU, fp32: 8 runs")):
        with pytest.raises(InterruptedError):
            verify([], use_cpu=use_cpu, output=tmp_path / "output")
        assert said in capsys.readouterr().out
