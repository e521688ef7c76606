"""What is done to each block of a model: its activations computed again with the same dropout, its forward compiled."""

from collections import Counter

import numpy as np
import pytest
import torch
import transformers
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.test_invariants import COMPILED
from tests.families.kinds import tiny_config
from tests.support.adapter_models import with_adapter
from tests.support.launch import GPU_PRESET_OVERRIDES_ON_CPU, run_on_ranks
from tests.support.model_folders import CAUSAL_FAMILIES
from tests.support.small_run import T5_CONFIG, whole_gradients
from tests.support.workbench import FP32
from toolkit.config.schema import AdapterConfig
from toolkit.data.collate import CausalCollator, SummarizationCollator
from toolkit.distributed.comm import rank
from toolkit.distributed.rng import seed_all
from toolkit.launch.accelerator import build_accelerator
from toolkit.models.patches import chunked_loss
from toolkit.models.patches.chunked_loss import summed_loss
from toolkit.objectives.model_checks import check_causal_model
from toolkit.parallel.gather import evaluation_model, generation_ready
from toolkit.parallel.wrap import shard_model
from toolkit.training.run import release

FAMILIES = ("gpt2", "t5", "llama-lora")


@pytest.mark.parametrize(
    ("preset", "overrides", "families"),
    [
        ("fsdp2_cpu", {}, FAMILIES),
        ("single_cpu", {}, FAMILIES),
        ("ddp_cpu", {}, FAMILIES),
        ("fsdp1_full_shard", GPU_PRESET_OVERRIDES_ON_CPU["fsdp1_full_shard"], ["t5"]),
    ],
)
def test_checkpointing_keeps_gradients_with_dropout(preset, overrides, families):
    modes = [(0, "none"), (1, "none"), (0, "full"), (0, "selective")]
    steps = [(family, *mode) for family in families for mode in modes]
    taken = run_on_ranks(step_each, preset=preset, overrides=FP32 | overrides, args=(steps,))[0]
    for family in families:
        plain, other, *recomputed = (taken[family, *mode] for mode in modes)
        for checkpointed in recomputed:
            assert plain["loss"] == checkpointed["loss"]
            assert plain["gradients"].keys() == checkpointed["gradients"].keys() and len(plain["gradients"]) > 4
            for name, gradient in plain["gradients"].items():
                assert np.array_equal(gradient, checkpointed["gradients"][name]), (family, name)
        differ = [name for name, gradient in plain["gradients"].items() if (other["gradients"][name] != gradient).any()]
        assert differ, "no dropout"
        # Each of the blocks runs a second time in the backward; selective computes no product again, but all dropout.
        full, selective = recomputed
        assert full["num_attentions"] == selective["num_attentions"] == 2 * plain["num_attentions"] > 0
        assert plain["num_products"] == selective["num_products"] < full["num_products"]
        assert plain["num_masks"] == 0 < full["num_masks"] == selective["num_masks"]
        assert (plain["frames_in_generation"], plain["num_compiled_frames"]) == (0, 0)


def test_blocks_are_compiled_and_nothing_else():
    case = ("gpt2", 0, "none")
    compiled = run_on_ranks(step_each, preset="fsdp2_cpu", overrides=FP32 | COMPILED, args=([case],))[0][case]
    assert compiled["num_compiled_frames"] > 0
    assert compiled["frames_in_generation"] == 0, "its recompilations would use up the limit that training shares"


def step_each(cases: list[tuple[str, int, str]]) -> dict[tuple[str, int, str], dict]:
    """On every rank, by family, seed and `train.activation_checkpointing`; each with an accelerator of its own, which keeps the
    blocks of the first model that it wraps."""
    found = {}
    for case in cases:
        found[case] = forward_and_backward(build_accelerator(), *case)
        release()
    return found


class Calls(TorchDispatchMode):
    """Counts operations by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.name().split("::")[1].split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def forward_and_backward(accelerator, family: str, seed: int, checkpointing) -> dict:
    """Of a tiny model with dropout 0.5: loss, gradients, how often an attention ran, the backward's products of linear layers and
    dropout masks, how many frames were compiled."""
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    if family == "t5":
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5_CONFIG | {"dropout_rate": 0.5}))
    elif family == "gpt2":
        rates = {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=256, **CAUSAL_FAMILIES["gpt2"][1], **rates))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, **CAUSAL_FAMILIES["llama"][1]))
        model = with_adapter(model, AdapterConfig(method="lora", dropout=0.5, target_modules=["q_proj", "v_proj", "down_proj"]))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    attentions = [module for name, module in model.named_modules() if name.endswith(("attn", "Attention"))]
    sharded = shard_model(accelerator, model, checkpointing=checkpointing)
    with torch.no_grad(), evaluation_model(sharded, "never") as (whole, in_step), generation_ready(sharded, whole):
        prompts = torch.full((1, 3), 5)
        whole.generate(input_ids=prompts, max_new_tokens=2, pad_token_id=0, synced_gpus=in_step)
    frames_in_generation = torch._dynamo.utils.counters["frames"]["ok"]
    calls: list[int] = []
    for attention in attentions:
        attention.register_forward_pre_hook(lambda *_: calls.append(1))
    ids = torch.randint(3, 200, (2, 12), generator=torch.Generator().manual_seed(rank())).tolist()
    rows = [{"input_ids": row, "labels": row[:5] if family == "t5" else [-100, *row[1:]]} for row in ids]
    collator = SummarizationCollator(0, 0) if family == "t5" else CausalCollator(0)
    sharded.model.train()
    seed_all("dropout", seed, rank())
    loss = summed_loss(sharded.model, collator.collate([[row] for row in rows]))[0]
    with Calls() as seen:
        loss.backward()
    return {
        "loss": loss.item(),
        "gradients": whole_gradients(sharded.model),
        "num_products": seen.counts["mm"] + seen.counts["addmm"],
        "num_masks": seen.counts["bernoulli_"] + seen.counts["native_dropout"],
        "num_attentions": len(calls),
        "frames_in_generation": frames_in_generation,
        "num_compiled_frames": torch._dynamo.utils.counters["frames"]["ok"],
    }


def test_each_block_gathers_the_next_one_encoder_first():
    chain = ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]
    for forward, backward in run_on_ranks(report_prefetch, preset="fsdp2_cpu")[0]:
        assert forward == dict(zip(["", *chain], [*([name] for name in chain), []], strict=True))
        assert backward == {"": ["decoder.block.1"], **dict(zip(chain, [[""], *([name] for name in chain)], strict=False))}


def report_prefetch() -> list[list[dict[str, list[str]]]]:
    """On every rank: names of what each unit of a T5 gathers ahead, in the forward and in the backward; with its encoder before
    its decoder, and after it."""
    accelerator, found = build_accelerator(), []
    for decoder_first in (False, True):
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5_CONFIG))
        if decoder_first:
            model._modules["encoder"] = model._modules.pop("encoder")
        shard_model(accelerator, model)
        states = {name: module._get_fsdp_state() for name, module in model.named_modules() if isinstance(module, FSDPModule)}
        names = {id(state): name for name, state in states.items()}
        found.append(
            [
                {name: [names[id(other)] for other in getattr(state, ahead)] for name, state in states.items()}
                for ahead in ("_states_to_forward_prefetch", "_states_to_backward_prefetch")
            ]
        )
    return found


@pytest.mark.parametrize(("adapter", "has_images"), [("none", False), ("lora", False), ("none", True)])
def test_untied_embedding_and_head_are_gathered_only_where_they_are_used(adapter, has_images):
    """The root holds the norm alone. The ranks have different numbers of chunks, and gather equally often all the same. A tower
    for images is never gathered."""
    reports = run_on_ranks(report_gathers, preset="fsdp2_cpu", overrides=FP32, args=(adapter, has_images))
    ends, blocks = ["model.embed_tokens", "lm_head"], ["model.layers.0", "model.layers.1"]
    forward = ["", ends[0], *blocks, ends[1]]
    backward = [*blocks[::-1], *(ends[:1] if adapter == "none" else [])]  # a frozen embedding has no backward
    for for_checks, gathered, held, _ in reports:
        assert for_checks == forward, "three forwards of the checks gather once"
        assert gathered == [*forward, *backward]
        assert held == {"forward": [], "backward": []}
    assert reports[0][3] != reports[1][3]


def report_gathers(adapter: str, has_images: bool) -> tuple[list[str], list[str], dict[str, list[str]], int]:
    """On every rank: the units that the checks of the model gather, in order; those that one micro-batch gathers after them;
    which of embedding and head are held where the first block's forward ends and where its backward begins; and the number of the
    loss's chunks."""
    chunked_loss.MAX_LOGITS_AT_ONCE = 4 * 256
    accelerator = build_accelerator()
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, **CAUSAL_FAMILIES["llama"][1]))
    if has_images:
        model = transformers.AutoModelForImageTextToText.from_config(tiny_config("qwen3_vl"))
        model.model.visual.requires_grad_(False)
    if adapter == "lora":
        model = with_adapter(model, AdapterConfig(method="lora", target_modules=["q_proj"]))
    sharded = shard_model(accelerator, model)
    units = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    groups = {name.replace("language_model.", ""): module._get_fsdp_state()._fsdp_param_group for name, module in units}
    assert ("model.visual" in groups) is has_images
    gathered, held, chunks = [], {}, []
    gather, head_forward = _fsdp_param_group.foreach_all_gather, model.lm_head.forward

    def see_gather(parameters, *args, **kwargs):
        gathered.append(next(name for name, group in groups.items() if group.fsdp_params is parameters))
        return gather(parameters, *args, **kwargs)

    def see_head(*args, **kwargs):
        chunks.extend([] if "within" in kwargs else [1])
        return head_forward(*args, **kwargs)

    def see_held(when: str) -> None:
        held[when] = [name for name in ("model.embed_tokens", "lm_head") if groups[name].is_unsharded]

    def after_first_block(block, args, hidden_BTD) -> None:
        see_held("forward")
        hidden_BTD.register_hook(lambda _: see_held("backward"))

    _fsdp_param_group.foreach_all_gather, model.lm_head.forward = see_gather, see_head
    check_causal_model(sharded, CausalCollator(0), packing=False)
    for_checks, gathered = gathered, []
    model.get_decoder().layers[0].register_forward_hook(after_first_block)
    chunks.clear()
    ids = torch.arange(3, 11 + 8 * rank()).tolist()
    batch = CausalCollator(0).collate([[{"input_ids": ids, "labels": [-100, *ids[1:]]}]])
    summed_loss(sharded.model, batch)[0].backward()
    return for_checks, gathered, held, len(chunks)
