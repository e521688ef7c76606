"""Shard units on models as they are, without processes; where parameters are gathered; which Linears train in float8.
Weights in bf16 for a forward and its backward: the numbers of a model in bf16, gradients in fp32, and few launches."""

import copy
import functools
import re
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from accelerate.utils import DynamoBackend
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.utils._python_dispatch import TorchDispatchMode

from tests.families.kinds import kind_on_meta, tiny_config
from tests.support.adapter_models import with_adapter
from tests.support.refusals import refusal
from tests.support.seq2seq_families import build_model
from tests.support.tiny_models import build_causal
from toolkit.config.schema import AdapterConfig
from toolkit.models.tensor_reader import copy_on_meta
from toolkit.parallel import float8
from toolkit.parallel.compute_copies import ComputeCopies, cast_inputs, mixes_dtypes, run_within
from toolkit.parallel.gather import unsharded_parameters
from toolkit.parallel.units import build_units, check_ties, find_blocks, find_ends, find_towers, repeated_blocks
from toolkit.parallel.wrap import check_wrap
from toolkit.tools.plan.trace import fake_ranks


def fsdp_plugin(class_names: list[str] | None = None, min_num_params: int | None = None) -> SimpleNamespace:
    """FSDP2's, which wraps by size if there is one."""
    policy = transformer_auto_wrap_policy if min_num_params is None else size_based_auto_wrap_policy
    named = {"transformer_cls_names_to_wrap": class_names, "min_num_params": min_num_params}
    return SimpleNamespace(auto_wrap_policy=policy, fsdp_version=2, **named)


def test_blocks_come_from_the_model_where_the_yaml_names_none_and_are_inferred_else():
    t5 = build_model("t5")
    for classes in (t5._no_split_modules, []):
        t5._no_split_modules = classes
        blocks = find_blocks(fsdp_plugin(), t5)
        assert sorted(blocks) == [f"{side}.block.{i}" for side in ("decoder", "encoder") for i in range(2)]


def test_layers_that_share_weights_with_each_other_are_no_units_but_the_blocks_inside_them_are():
    model = kind_on_meta("zamba2")
    blocks = find_blocks(fsdp_plugin(), model)
    check_ties(model, build_units(model, blocks))
    hybrid = [kind == "hybrid" for kind in model.config.layers_block_type]
    assert list(blocks) == [f"model.layers.{place}{'.mamba_decoder' * is_hybrid}" for place, is_hybrid in enumerate(hybrid)]
    assert sum(hybrid) > 1


A_UNIT = "and lm_head would be gathered once for each chunk of a rank's loss, of which ranks have different numbers: name"


@pytest.mark.parametrize(
    ("family", "class_names", "expected"),
    [
        ("t5", ["T6Block"], r"names T6Block, which is not in T5ForConditionalGeneration; .* T5Block"),
        ("llama", ["LlamaDecoderLayer", "Linear"], f"names Linear, {A_UNIT}"),
        ("llama", ["LlamaDecoderLayer", "LlamaForCausalLM"], "names LlamaForCausalLM, which is the full model"),
        ("flan_t5", ["T5Block", "Linear"], A_UNIT),
        # What lies in the backbone is called alike on every rank.
        ("llama", ["LlamaAttention", "LlamaMLP", "Embedding"], 5),
        ("flan_t5", ["T5Block", "T5LayerNorm"], 6),
    ],
)
def test_classes_are_taken_whose_units_every_rank_calls_alike(family, class_names, expected):
    plugin, model = fsdp_plugin(class_names), (build_causal if family == "llama" else build_model)(family)
    if isinstance(expected, int):
        assert len(find_blocks(plugin, model)) == expected
    else:
        assert re.search(expected, refusal(find_blocks, plugin, model))


def test_units_that_part_a_weight_or_lie_in_a_recomputed_block_are_refused_before_weights_load():
    def check(model, plugin, checkpointing) -> None:
        state = SimpleNamespace(fsdp_plugin=plugin, dynamo_plugin=SimpleNamespace(backend=DynamoBackend.NO))
        kind = SimpleNamespace(value="FSDP")
        accelerator = SimpleNamespace(distributed_type=kind, state=state, mixed_precision="bf16")
        check_wrap(accelerator, copy_on_meta(model), checkpointing)

    sentence = "model.embed_tokens.weight and lm_head.weight are one tied weight, but lie in different"
    classes = ["LlamaDecoderLayer", "Embedding"]
    assert sentence in refusal(check, build_causal("llama", tie_word_embeddings=True), fsdp_plugin(classes), "none")
    model, plugin = build_model("t5"), fsdp_plugin(min_num_params=2000)
    check(model, plugin, "full")
    sentence = "train.activation_checkpointing is selective, but encoder.block.0.layer.0.SelfAttention is a shard unit inside"
    assert refusal(check, model, plugin, "selective").startswith(sentence)


@pytest.mark.parametrize("min_num_params", [1, 2000, 4000, 6000, 8000, 20000])
def test_size_based_wrap_keeps_tied_weights_in_the_root(min_num_params):
    """The embedding alone has 8192 parameters, and the encoder with it more than any size here."""
    model, plugin = build_model("t5"), fsdp_plugin(min_num_params=min_num_params)
    blocks = find_blocks(plugin, model)
    assert not {"shared", "lm_head", "encoder", "decoder", "encoder.embed_tokens", "decoder.embed_tokens"} & set(blocks)
    assert not any(isinstance(module, nn.ModuleList) for module in blocks.values())
    units = build_units(model, blocks)
    check_ties(model, units)
    assert "shared.weight" in units[-1].parameter_names
    assert all(unit.num_parameters >= min_num_params for unit in units[:-1])
    assert sum(unit.num_parameters for unit in units) == sum(p.numel() for p in model.parameters())
    assert bool(blocks) == (min_num_params < 20000)
    # An untied head is a unit whatever its size, and stays gathered between forward and backward.
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    assert "lm_head" not in find_blocks(plugin, model)


def test_size_based_wrap_goes_up_to_the_module_that_holds_all_of_a_tied_weight():
    inner = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    inner[0].weight = inner[1].weight
    model = nn.Sequential(inner, nn.Linear(8, 8, bias=False), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))
    blocks = find_blocks(fsdp_plugin(min_num_params=40), model)
    assert list(blocks) == ["0", "1"], "the pair of tied layers, once 64; the layer of 64; neither the list of 40 nor its layers"
    check_ties(model, build_units(model, blocks))


def test_tied_weights_lie_in_the_root_and_untied_embedding_and_head_are_units_of_their_own():
    llama, tied, plugin = build_causal("llama"), build_causal("llama", tie_word_embeddings=True), fsdp_plugin()
    ends = find_ends(llama, blocks := find_blocks(plugin, llama))
    assert list(ends) == ["model.embed_tokens", "lm_head"]
    units = build_units(llama, blocks | ends)
    check_ties(llama, units)
    assert units[-1].parameter_names == ("model.norm.weight",)
    t5 = build_model("t5")
    units = build_units(t5, find_blocks(plugin, t5))
    check_ties(t5, units)
    assert [name for name in units[-1].parameter_names if "embed" in name or "shared" in name] == ["shared.weight"]
    assert find_ends(tied, find_blocks(plugin, tied)) == find_ends(t5, find_blocks(plugin, t5)) == {}
    assert find_ends(llama, {}) == {}, "nothing is wrapped"
    t5.lm_head.weight = nn.Parameter(t5.lm_head.weight.detach().clone())  # as its later versions: the stacks share the embedding
    assert list(find_ends(t5, find_blocks(plugin, t5))) == ["lm_head"]


def test_no_part_of_an_adapter_of_experts_is_a_unit():
    """It reads the parameters of its parts, and does not call these: by size none is one, and none may be named."""
    model = with_adapter(build_causal("mixtral"), AdapterConfig(method="lora", experts=True))
    for size in (1, 2000, 20000):
        blocks = find_blocks(fsdp_plugin(min_num_params=size), model)
        assert any("experts" in name or name.endswith("mlp") for name in blocks) or size == 20000
        assert not [name for name in blocks if ".experts." in name]
    find_blocks(fsdp_plugin(["MixtralDecoderLayer", "MixtralExperts"]), build_causal("mixtral"))  # inside of a layer
    sentence = "names MixtralExperts, which an adapter of experts reads from outside: name"
    assert sentence in refusal(find_blocks, fsdp_plugin(["MixtralExperts"]), model)


def test_towers_that_texts_do_not_call_are_units_of_their_own_and_their_layers_are_no_blocks():
    model = kind_on_meta("qwen3_vl")
    layers = ["model.language_model.layers.0", "model.language_model.layers.1"]
    assert list(repeated_blocks(model)) == layers and list(find_towers(model)) == ["model.visual"]
    for named in ([], ["Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock"]):
        blocks = find_blocks(fsdp_plugin(named), model)
        assert sorted(blocks) == [*layers, "model.visual"]
    assert find_towers(build_causal("llama")) == find_towers(build_model("t5")) == find_towers(nn.Linear(1, 1)) == {}


class Watching(TorchDispatchMode):
    """Keeps what calls of an operation are given first."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.given = name, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.name in str(func):
            self.given.append(args[0])
        return func(*args, **(kwargs or {}))


def test_offloaded_shards_are_gathered_on_the_device():
    """The meta device stands in for a GPU; `plain` shards on the CPU are those that CPU offload keeps there. c10d chooses the
    backend by the device of an all-gather's input."""
    with fake_ranks(2):
        model = torch.nn.Linear(4, 4)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        sharded = SimpleNamespace(model=model, unwrapped=model, accelerator=SimpleNamespace(device=torch.device("meta")))
        with Watching("all_gather_into_tensor") as gathered:
            whole = dict(unsharded_parameters(sharded))
    assert [tensor.device.type for tensor in gathered.given] == ["meta", "meta"]
    found = {name: (tensor.device.type, tuple(tensor.shape)) for name, tensor in whole.items()}
    assert found == {"weight": ("meta", (4, 4)), "bias": ("meta", (4,))}


NARROW = {"intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}


def test_linears_of_blocks_are_chosen_but_for_the_first_frozen_ones_and_those_of_other_sizes():
    def choose(model, num_shards: int = 2) -> dict:
        return float8.choose_linears(model, repeated_blocks(model), num_shards=num_shards)

    model = build_causal("llama", **NARROW)
    chosen = choose(model)
    assert len(chosen) == 2 * 7 - 1 and "model.layers.0.self_attn.q_proj" not in chosen and "lm_head" not in chosen
    assert all(model.get_submodule(name) is linear for name, linear in chosen.items())
    model.get_submodule("model.layers.0").requires_grad_(False)
    chosen = choose(model)
    assert len(chosen) == 7 and all(name.startswith("model.layers.1.") for name in chosen)
    # 48 rows over 32 ranks, 16 rows of the one key head over 32: neither is shared equally.
    assert sorted(name.rpartition(".")[2] for name in choose(model, 32)) == ["down_proj", "o_proj", "q_proj"]
    said = refusal(choose, build_causal("llama", **NARROW | {"hidden_size": 24}))
    assert "none of the 15 Linears of LlamaForCausalLM can be converted: " in said and "of sizes that 16 divides" in said
    said = refusal(choose, with_adapter(build_causal("llama", **NARROW), AdapterConfig(method="lora")))
    assert said.startswith("mixed_precision is fp8, and an adapter's frozen base ") and "adapter.method none" in said


IDS_BT = torch.tensor([[5, 9, 3, 2, 7, 1]])


def copies_of(model: nn.Module) -> ComputeCopies:
    return ComputeCopies(model, repeated_blocks(model).values(), torch.bfloat16)


def loss_of(model) -> torch.Tensor:
    torch.manual_seed(0)
    return model(input_ids=IDS_BT, use_cache=False).logits.float().square().mean()


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "gpt2"])
def test_loss_and_gradients_are_those_of_a_model_in_bf16(family):
    model = build_causal(family).train()
    assert not mixes_dtypes(copy_on_meta(model), torch.bfloat16)
    in_bf16, again = copy.deepcopy(model), copy.deepcopy(model)
    for parameter in in_bf16.parameters():  # buffers stay, as under FSDP
        parameter.data = parameter.data.to(torch.bfloat16)
    for block in repeated_blocks(in_bf16).values():
        block.register_forward_pre_hook(functools.partial(cast_inputs, torch.bfloat16), with_kwargs=True)
    named = dict(model.named_parameters())
    copies = copies_of(model)
    with copies.held():
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        (loss := loss_of(model)).backward()
    assert all(p is named[name] for name, p in model.named_parameters())
    (expected := loss_of(in_bf16)).backward()
    assert torch.equal(loss, expected)
    for name, parameter in in_bf16.named_parameters():
        assert named[name].grad is not None and named[name].grad.dtype == torch.float32
        assert torch.equal(named[name].grad, parameter.grad.float()), name
    # A forward by itself, one with an error, and one with parts frozen.
    with torch.no_grad():
        assert torch.equal(loss_of(model), expected)
    with pytest.raises((TypeError, ValueError)):
        model(nonsense=1)
    assert all(p is named[name] for name, p in model.named_parameters()) and loss_of(model).dtype == torch.float32
    frozen = [p for name, p in again.named_parameters() if "layers.0" in name or "h.0" in name]
    for parameter in frozen:
        parameter.requires_grad_(False)
    copies_of(again)
    loss_of(again).backward()
    assert sum(p.grad is None for p in again.parameters()) == len(frozen)


def test_a_block_is_one_launch_in_each_direction():
    model = build_causal("llama").train()
    copies = copies_of(model)
    with Watching("_foreach_copy_") as launched, copies.held():
        loss_of(model).backward()
    num_blocks = len(repeated_blocks(model))
    assert len(launched.given) == 2 * (num_blocks + 1)
    assert sum(map(len, launched.given)) == 2 * len(list(model.parameters()))


def test_inputs_of_blocks_are_cast_wherever_they_stand():
    """As FSDP2 does: rotary positions come as a tuple."""
    ids, positions = torch.arange(3), torch.ones(2)
    given = {"position_embeddings": (positions, [positions, ids]), "masks": {"full": positions}, "cache": None}
    (hidden,), inputs = cast_inputs(torch.bfloat16, nn.Identity(), (positions,), given)
    (one, [two, three]), full = inputs["position_embeddings"], inputs["masks"]["full"]
    assert {each.dtype for each in (hidden, one, two, full)} == {torch.bfloat16}
    assert three is ids and inputs["cache"] is None and given["position_embeddings"][0] is positions


def test_a_model_that_mixes_dtypes_in_its_blocks_casts_at_each_product():
    """GPT-1 multiplies scores with a mask in fp32. With a padding token it looks for that, which fails without weights. Nothing
    is searched that is not of transformers."""
    assert not mixes_dtypes(copy_on_meta(nn.Sequential(nn.Linear(2, 2))), torch.bfloat16)
    torch.manual_seed(0)
    model = hf.OpenAIGPTLMHeadModel(tiny_config("openai-gpt")).eval()
    expected = model(input_ids=IDS_BT).logits
    assert mixes_dtypes(copy_on_meta(model), torch.bfloat16)
    plain = copy.deepcopy(model)
    copies_of(plain)
    with pytest.raises(RuntimeError, match="dtype|scalar type"):
        plain(input_ids=IDS_BT)
    run_within(model, functools.partial(torch.autocast, "cpu", torch.bfloat16))
    copies_of(model)
    logits = model(input_ids=IDS_BT).logits
    assert torch.allclose(logits.float(), expected, atol=0.05) and not torch.equal(logits.float(), expected)
    logits.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
