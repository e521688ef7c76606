"""The memory plan of adapters on a mixture of experts, and the GPUs that its run YAML names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.launch import REPOSITORY
from tests.support.model_folders import MIXTURES
from toolkit.tools.plan.peak import OPTIMIZER, estimate_peak, trace_rank
from toolkit.tools.plan.plan import USABLE_SHARE
from toolkit.tools.plan.strategy import load_strategy
from toolkit.tools.plan.subject import build_subject
from toolkit.tools.plan.trace import GRADIENTS, SHARDED_PARAMETERS, fake_ranks

CONFIG = REPOSITORY / "recipes" / "configs" / "llm_moe_lora.yaml"


def test_the_moe_config_fits_the_gpus_that_it_names_and_no_smaller_ones() -> None:
    header = CONFIG.read_text()
    (preset, num), (gpus, gib) = (
        re.search(pattern, header).groups()  # type: ignore[union-attr]
        for pattern in (r"--config_file (\S+) --num_processes (\d+)", r"# Hardware: +(\d+) GPUs with (\d+) GiB")
    )
    assert num == gpus
    strategy = load_strategy(REPOSITORY / preset, int(num), float(gib))
    model = str(REPOSITORY / "tests" / "support" / "model_configs" / "Qwen" / "Qwen3-30B-A3B")
    subject = build_subject(model, strategy, [f"--config={CONFIG}"], None)
    assert 30e9 < sum(p.numel() for p in subject.skeleton.parameters() if not p.requires_grad) < 31e9
    with fake_ranks(int(num)):
        peak = estimate_peak(subject, strategy, subject.config.train.micro_batch_size_rows)
    smaller = {24: 16, 40: 24}[int(gib)]
    assert smaller * USABLE_SHARE * 2**30 < peak <= int(gib) * USABLE_SHARE * 2**30


@pytest.mark.parametrize("num_processes", [2, 4])
def test_ranks_share_the_adapters_of_experts(tmp_path: Path, num_processes: int) -> None:
    """Of 6 experts of 2 layers; 4 ranks cut each by rows."""
    settings = MIXTURES["qwen3_moe"][1] | {"hidden_size": 256, "moe_intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(settings | {"model_type": "qwen3_moe", "vocab_size": 256}))
    strategy = load_strategy(REPOSITORY / "accelerate_configs" / "fsdp2_full_shard.yaml", num_processes, 80.0)
    flags = ["--adapter.method=lora", "--adapter.rank=8", "--adapter.experts=true", "--adapter.target_modules=[]"]
    flags += ["--data.max_length_tokens=64", "--data.packing=false"]
    subject = build_subject(str(tmp_path), strategy, flags, None)
    with fake_ranks(num_processes):
        trace, _ = trace_rank(subject, strategy, subject.skeleton, 1)
    hidden, inner = settings["hidden_size"], settings["moe_intermediate_size"]
    share = 2 * 6 * 8 * ((hidden + 2 * inner) + (inner + hidden)) * 4 / num_processes
    at_the_end = trace.peaks[-1]
    assert (at_the_end[GRADIENTS], at_the_end[OPTIMIZER]) == pytest.approx((share, 2 * share), rel=0.02)
    frozen = sum(p.nbytes for p in subject.skeleton.parameters() if not p.requires_grad)
    assert at_the_end[SHARDED_PARAMETERS] == pytest.approx(share + frozen / num_processes, rel=0.1)
