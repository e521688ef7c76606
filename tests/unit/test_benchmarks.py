"""The ratios of `make bench`, and what a step asks of the host."""

import pytest
import torch

from benchmarks.throughput import host_time
from benchmarks.throughput.host_clock import REST, kernels
from toolkit.tools.plan.trace import fake_ranks


@pytest.mark.parametrize("side", ["single", "fsdp2_full_shard", "fsdp2_shard_grad_op"])
def test_a_step_walks_no_modules_and_its_own_launches_are_few(side, monkeypatch):
    """A walk takes the host 0.4 ms in a T5-base, and 4 ms in an adapter of 32 blocks."""
    walks: list[str] = []
    walk = torch.nn.Module.named_modules

    def noted(module: torch.nn.Module, memo=None, *rest, **more):
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
        REST: 20 + 5 * (side == "single"),  # a copy for each block, and one for the rest
    }
    assert (clock.launches["FSDP"] > 0) == (side != "single")
