"""A rehearsal in bf16, asked for by the launcher's flag: what GPUs compute in, on CPU processes, whose presets take fp32."""

import numpy as np
import pytest

from tests.support.launch import GPU_PRESET_OVERRIDES_ON_CPU, run_on_ranks
from tests.support.quantized.models import save_quantizable_models
from tests.support.workbench import run_each

LORA = {"adapter__method": "lora", "adapter__rank": 8, "optim__lr": 1e-2}
KINDS = {"full": ("t5", {}), "lora": ("llm", LORA), "nf4": ("llm", LORA | {"adapter__base_dtype": "nf4"}), "mixture": ("moe", {})}
"""Model and settings."""
CASES = [*((kind, "fsdp2_cpu") for kind in KINDS), ("full", "ddp_cpu"), ("full", "fsdp2_hsdp")]
"""The others are those of `tests/recipes/test_gpu_parts.py`, on one rank."""


@pytest.fixture(scope="module")
def losses(bench, llm_bench, tmp_path_factory) -> dict[str, list[float]]:
    """Of training and evaluation, by kind, preset and precision; all kinds of a preset share a launch."""
    models = tmp_path_factory.mktemp("bf16-models")
    run_on_ranks(save_quantizable_models, preset="single_cpu", args=(models,))
    found = {}
    for preset in ("single_cpu", *{preset: None for _, preset in CASES}):
        precision = "no" if preset == "single_cpu" else "bf16"
        of_preset = [kind for kind in KINDS if preset == "single_cpu" or (kind, preset) in CASES]
        runs = {f"{kind}-{preset}-{precision}": KINDS[kind] for kind in of_preset}
        commands = []
        for name, (model, settings) in runs.items():
            of = bench if model == "t5" else llm_bench
            commands.append((of.recipe, of.flags(name, models / model, model__dropout=0, eval__generate=False, **settings)))
        overrides = GPU_PRESET_OVERRIDES_ON_CPU.get(preset, {}) | {"mixed_precision": precision}
        run_each(commands, preset=preset, overrides=overrides)
        for name in runs:
            found[name] = [line["loss"] for kind in ("train", "eval") for line in bench.lines(name, kind)]
    return found


@pytest.mark.parametrize(("kind", "preset"), CASES)
def test_a_run_in_bf16_follows_the_one_in_fp32(bench, losses, kind, preset):
    """As closely as 8 bits of a number allow; an equal loss would not have been computed in bf16."""
    of_fp32, of_bf16 = losses[f"{kind}-single_cpu-no"], losses[f"{kind}-{preset}-bf16"]
    assert len(of_bf16) == 4 and all(np.not_equal(of_bf16, of_fp32))
    np.testing.assert_allclose(of_bf16, of_fp32, rtol=2**-6)
    assert list((bench.runs / f"{kind}-{preset}-bf16" / "export").glob("*model.safetensors"))
