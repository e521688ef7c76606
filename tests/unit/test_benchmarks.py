"""The ratios of `make bench`, and what a step asks of the host."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import bench
from benchmarks.throughput import host_time
from benchmarks.throughput.comparisons import Against, Comparison
from benchmarks.throughput.host_clock import REST, kernels
from toolkit.tools.plan.trace import fake_ranks


def test_ratios_are_of_speeds_within_a_turn_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def side(rows: float, *seconds: float) -> Any:
        turns = ({"rows": rows, "seconds": second, "loss": 2.0, "tokens": 1.0} for second in seconds)
        return lambda: SimpleNamespace(take_turn=lambda: next(turns), close=lambda: 1.5)

    sides = {"ours": side(8, 99, 1, 2), "peer": side(4, 1, 1, 4), "bare": side(16, 1, 1, 2)}
    against = [Against(ours="ours", beside="peer", goal=1.5), Against(ours="ours", beside="bare", max_overhead=0.03)]
    comparison = Comparison(title="T", about="", unit="rows", sides=sides, against=against)
    monkeypatch.setitem(bench.COMPARISONS, "t5-training", lambda *_, **__: comparison)
    (speed, overhead), section, _ = bench.compare("t5-training", Namespace(small=True, repetitions=2))
    # Rows a second: ours 8 and 4, the peer 4 and 1, the bare loop 16 and 8.
    assert (speed.ratios, speed.is_met) == ([2.0, 4.0], True)
    assert (overhead.ratios, overhead.is_met) == ([1.0, 1.0], False)
    assert "| ours | 6.0 [5.0, 7.0] | 2.000 | 1.50 |" in section


@pytest.mark.parametrize("side", ["single", "fsdp2_full_shard", "fsdp2_shard_grad_op"])
def test_a_step_walks_no_modules_and_its_own_launches_are_few(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk takes the host 0.4 ms in a T5-base, and 4 ms in an adapter of 32 blocks."""
    walks: list[str] = []
    walk = torch.nn.Module.named_modules

    def noted(module: torch.nn.Module, memo: Any = None, *rest: Any, **more: Any) -> Any:
        if memo is None:
            walks.append(type(module).__name__)
        return walk(module, memo, *rest, **more)

    _, flags = host_time.MODELS["flan-t5-base"]
    monkeypatch.setitem(host_time.MODELS, "tiny", (host_time.t5(2), flags))
    with fake_ranks(host_time.NUM_RANKS), kernels() as clock:
        step = host_time.build_step("tiny", side, clock)
        step()
        monkeypatch.setattr(torch.nn.Module, "named_modules", noted)
        clock.restart()
        with clock.counting():
            step()
    assert walks == []
    assert {part: clock.launches[part] for part in ("clipping", "AdamW", REST)} == {
        "clipping": 10 + (side != "single"),  # the all-reduce
        "AdamW": 6,
        REST: 20,
    }
    assert (clock.launches["FSDP"] > 0) == (side != "single")
