"""Ranks that have gradients of different parameters: FSDP2 would add these up, so the run ends, and says which parameters."""

from unittest.mock import patch

import pytest
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from tests.support.launch import start_on_ranks
from tests.support.small_run import run_in_this_process
from tests.support.workbench import FP32
from toolkit.distributed.comm import rank
from toolkit.training import loop

SENTENCE = "some ranks had a gradient of these parameters in a micro-batch where others had none: "
NAMES = "model.layers.0.mlp.gate_proj.weight, model.layers.0.mlp.up_proj.weight"
FIRST, LATER = (1, 0), (2, 1)
"""Step and index of a micro-batch."""


def train_unevenly(argv: list[str], when: tuple[int, int]) -> None:
    """On every rank: train. In one micro-batch, ranks take different ones of two weights of the first MLP, of equal shapes."""
    init, forward, seed_all = LlamaDecoderLayer.__init__, LlamaMLP.forward, loop.seed_all
    here: list[tuple[int, int]] = []

    def note_place(what: str, seed: int, step: int, *place: int) -> None:
        here[:] = [(step, place[-1])]
        seed_all(what, seed, step, *place)

    def build(block, config, layer_idx: int) -> None:
        init(block, config, layer_idx)
        block.mlp.number = layer_idx

    def take_one(mlp, x):
        if here != [when] or mlp.number > 0:
            return forward(mlp, x)
        chosen = mlp.gate_proj if rank() % 2 else mlp.up_proj
        return mlp.down_proj(mlp.act_fn(chosen(x)))

    with (
        patch.object(loop, "seed_all", note_place),
        patch.object(LlamaDecoderLayer, "__init__", build),
        patch.object(LlamaMLP, "forward", take_one),
    ):
        run_in_this_process("llm", argv)


CASES = {"first": (FIRST, None, 0), "later": (LATER, None, 3), "before a checkpoint": (LATER, 1, 2)}
"""Where ranks differ, `checkpoint.every_steps`, and the last step of the run."""


@pytest.mark.parametrize("case", CASES)
def test_the_run_ends_and_names_the_parameters(llm_bench, case):
    """Before the update of a first step, and before any checkpoint; one step late otherwise."""
    bench, (when, every_steps, last_step) = llm_bench, CASES[case]
    changes = {"model__dropout": 0, "data__packing": False, "train__micro_batch_size_rows": 1, "train__max_steps": 5}
    flags = bench.flags(case, eval__generate=False, checkpoint__every_steps=every_steps, **changes)
    with start_on_ranks(train_unevenly, preset="fsdp2_cpu", overrides=FP32, args=(flags, when)) as running:
        assert running.wait().refusal().startswith(f"{SENTENCE}{NAMES}: FSDP2 adds up")
    assert max((line["step"] for line in bench.lines(case, "train")), default=0) == last_step
    saved = [path.name for path in (bench.runs / case / "checkpoints").glob("step-*")]
    assert saved == (["step-00000001"] if every_steps else [])
