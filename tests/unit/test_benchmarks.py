"""The arithmetic behind the tables of `make bench` and `make bench-growth`."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import bench, growth
from benchmarks.bench import Row, format_quartiles, judge_least, judge_most, losses_at_same_tokens
from benchmarks.throughput import growth_side, host_time
from benchmarks.throughput.comparisons import Against, Comparison
from benchmarks.throughput.host_clock import REST, kernels
from toolkit.tools.plan.trace import fake_ranks


def row(*ratios: float) -> Row:
    return Row(what="", ours="", beside="", ratios=list(ratios))


def test_a_goal_is_met_where_the_median_passes_it_by_the_distance_of_the_quartiles() -> None:
    ratios = (1.0, 1.9, 2.0, 2.25, 9.0)
    assert format_quartiles([*ratios], 2) == "2.00 [1.90, 2.25]"
    assert [judge_least(row(*ratios), goal).is_met for goal in (1.6, 1.7, None)] == [True, False, None]
    assert [judge_most(row(*ratios), goal, "").is_met for goal in (2.4, 2.3)] == [True, False]


def test_losses_are_compared_at_the_tokens_of_the_side_that_saw_fewest() -> None:
    slow = [{"tokens": 10, "loss": 5.0}, {"tokens": 10, "loss": 3.0}]  # their middles are at 5 and 15
    fast = [{"tokens": 20, "loss": 6.0}, {"tokens": 20, "loss": 4.0}]  # at 10 and 30
    assert losses_at_same_tokens({"slow": slow, "fast": fast}) == {"slow": 3.0, "fast": 5.5}


def test_ratios_are_of_speeds_within_a_turn_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Side:
        def __init__(self, rows: float, *seconds: float) -> None:
            self.turns = [{"rows": rows, "seconds": second, "loss": 2.0, "tokens": 1.0} for second in seconds]

        def take_turn(self) -> dict[str, float]:
            return self.turns.pop(0)

        def close(self) -> float:
            return 1.5

    turns = {"ours": (8, 99, 1, 2), "peer": (4, 1, 1, 4), "bare": (16, 1, 1, 2)}
    sides: dict[str, Any] = {name: lambda figures=figures: Side(*figures) for name, figures in turns.items()}
    against = [Against(ours="ours", beside="peer", goal=1.5), Against(ours="ours", beside="bare", max_overhead=0.03)]
    comparison = Comparison(title="T", about="", unit="rows", sides=sides, against=against)
    monkeypatch.setitem(bench.COMPARISONS, "t5-training", lambda *_, **__: comparison)
    (speed, overhead), section, _ = bench.compare("t5-training", Namespace(small=True, repetitions=2))
    # Rows a second: ours 8 and 4, the peer 4 and 1, the bare loop 16 and 8.
    assert (speed.ratios, speed.is_met) == ([2.0, 4.0], True)
    assert (overhead.ratios, overhead.is_met) == ([1.0, 1.0], False)
    assert "| ours | 6.0 [5.0, 7.0] | 2.000 | 1.50 |" in section


def test_a_save_is_compared_without_its_first_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"blocking_s": {"async": [9.0, 1.0, 2.0], "save_state": [1.0, 20.0, 50.0]}, "copy_s": [9.0, 0.5, 0.5]}
    monkeypatch.setattr(bench.save_blocking, "measure", lambda part, options: figures)
    monkeypatch.setattr(bench.save_blocking, "describe_figures", lambda *_: "")
    (of_save_state, of_bound), *_ = bench.measure_saves(Namespace(small=True, repetitions=2))
    assert of_save_state.ratios == [0.05, 0.04] and of_save_state.is_met and of_bound.ratios == [2.0, 4.0]


def test_bytes_are_held_against_those_that_fsdp_must_send(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = SimpleNamespace(_mp_policy=SimpleNamespace(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    units = [SimpleNamespace(name=name, num_parameters=n, num_trainable=t) for name, n, t in (("", 10, 10), ("block", 100, 50))]
    sharded: Any = SimpleNamespace(model=SimpleNamespace(_get_fsdp_state=lambda: policy), units=units)
    monkeypatch.setattr(growth_side, "world_size", lambda: 4)
    # bf16 once for the root and twice for a block, their gradients once in fp32; a rank has a quarter itself.
    assert growth_side.minimum_bytes(sharded) == 0.75 * (10 * 2 + 10 * 4 + 100 * 2 * 2 + 50 * 4)
    figures = {"num_bytes": 3e6, "minimum_bytes": 2e6, "num_parameters": 8e6, "step_s": 1.25, "peak_gib": 0.5, "calls": 7}
    monkeypatch.setattr(growth, "measure", lambda setting: figures)
    assert "| 1 processes | 8.0 | 1.25 | 0.50 | 7 | 3.0 | 1.5000 |" in growth.grow("ranks", 1)


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
