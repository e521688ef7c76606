"""What ranks read of a model's files is what transformers loads, bit for bit, and under FSDP2 no rank reads the whole model.

The other side is transformers' own loading of the full model, on each rank.
"""

import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from tests.support.adapter_models import adapted, export_adapter, randomize
from tests.support.launch import GPU_PRESET_OVERRIDES_ON_CPU, run_on_ranks
from tests.support.model_folders import build_model_folders, save_resized
from tests.support.quantized.models import FP8_SIZES, save_fp8_model, save_mxfp4_model
from tests.support.refusals import refusal
from tests.support.workbench import FP32, as_flags
from toolkit.checkpoint.load import find_weights
from toolkit.config.load import load_config
from toolkit.config.schema import LLMConfig, SummarizationConfig
from toolkit.distributed.comm import rank
from toolkit.launch.accelerator import build_accelerator, frozen_dtype
from toolkit.models import tensor_reader, weights
from toolkit.models.safetensors_index import ShardedReadUnsupported
from toolkit.objectives import objective_of
from toolkit.parallel import wrap as sharding
from toolkit.parallel.gather import unsharded_parameters
from toolkit.training import model as stages
from toolkit.training.setup import Run

QUANTIZED = Path(__file__).parents[1] / "support" / "quantized"
SMALL_PIECE_BYTES = 1024
"""So that tensors of these models are read in several pieces."""
LORA = {"adapter.method": "lora", "adapter.rank": 2}
NEW_TOKENS = {"model.add_tokens": ["<|im_start|>", "<|im_end|>", "</s>"]}
"""Two new ones, and one that the tokenizers have."""
CASES = {
    **{family: (family, {}) for family in ("t5", "bart", "gpt2", "mixtral", "granitemoe", "deepseek_v3", "mxfp4", "bnb_plain")},
    "several-files-in-bf16": ("several_files", {}),
    "tied-weight-stored-twice": ("tied_twice", {}),
    "tied-weights-that-differ": ("tied_differing", {}),
    "tensors-that-no-model-takes": ("with_others", {}),
    "frozen-part": ("t5", {"model.freeze": [r"encoder\..*", r".*norm.*"], "model.frozen_dtype": "bfloat16"}),
    "other-weights": ("t5", {"model.init_from": "{other_t5}"}),
    "fp8-as-other-weights": ("plain_of_fp8", {"model.init_from": "{fp8}"}),
    "new-tokens-after-other-weights": ("small_t5", NEW_TOKENS | {"model.init_from": "{grown_t5}"}),
    "new-tokens-flan-t5-lora": ("small_flan_t5_of_the_hub", NEW_TOKENS | LORA),
    "new-tokens-bart": ("small_bart", NEW_TOKENS),
    "llama-dora": ("several_files", LORA | {"adapter.method": "dora", "adapter.modules_to_save": ["lm_head"]}),
    "gptj-lora-in-bf16": ("gptj", LORA | {"model.frozen_dtype": "bfloat16"}),  # its positions are computed in fp32
    **{f"{kind}-lora": (kind, LORA | {"model.frozen_dtype": "bfloat16"}) for kind in ("fp8", "bnb_nested")},
    "existing-adapter": ("llama_tied", LORA | {"adapter.name_or_path": "{adapter}"}),
}
COMPARED = ("parameters", "buffers", "placed", "aliases", "frozen_hashes", "others")
HYBRID_CASES = ("t5", "several-files-in-bf16", "llama-dora")
REFUSED = {
    "missing": (
        "without_tensor", {}, "the weights of model.name_or_path {folder} lack 1 of the model's parameters (model.norm.weight, …)"
    ),
    "other-names": (
        "wrapped", {},
        "…), which would stay random, and have 20 others (module.model.embed_tokens.weight, module.model.layers.0.input_"
        "layernorm.weight, module.model.layers.0.mlp.down_proj.weight, …): give complete weights, or model.from_scratch true; if "
        "only names differ, save it without what wraps it (DDP, torch.compile, an adapter, a larger model)",
    ),
    "shape": (
        "other_shape", {},
        "the weights of model.name_or_path {folder} have model.norm.weight of shape (31,), but its config.json makes it (32,)",
    ),
    "frozen-new-tokens": (
        "small_t5", NEW_TOKENS | {"model.freeze": ["shared.*"]},
        "model.freeze freezes the embedding, where the rows of model.add_tokens are to train: leave it out",
    ),
    "adapted-head-with-new-tokens": (
        "small_llama", NEW_TOKENS | LORA | {"adapter.target_modules": ["q_proj", "lm_head"]},
        "the adapter does not fit {folder}: trainable_token_indices cannot be applied to modules of type",
    ),
    "init-from-another-model": (
        "llama_tied", {"model.init_from": "{without_tensor}"}, "model.init_from {without_tensor} does not fit {folder}: it lacks"
    ),
}  # fmt: skip
"""Model folder, flags, and the beginning or a part of the sentence."""
BASES = ("t5", "flan_t5", "bart", "llama", "llama_tied", "gpt2", "mixtral", "granitemoe", "deepseek_v3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("models")
    return run_on_ranks(build_folders, preset="single", overrides=FP32, args=(parent,))[0]


def build_folders(parent: Path) -> dict[str, Path]:
    """The families' models, and some whose files are made in other ways; on one process."""
    folders = build_model_folders(parent, BASES)

    def change(name: str, base: str, edit: Callable) -> None:
        folders[name] = shutil.copytree(folders[base], parent / name)
        tensors = load_file(folders[name] / "model.safetensors")
        edit(tensors)
        save_file(tensors, folders[name] / "model.safetensors", metadata={"format": "pt"})

    def tie_to(tensors: dict[str, torch.Tensor], difference: float) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + difference

    change("tied_twice", "llama_tied", lambda tensors: tie_to(tensors, 0))
    change("tied_differing", "llama_tied", lambda tensors: tie_to(tensors, 1))
    # Its head is its own, and its config says so; transformers 5 builds it tied, and unties it for such files.
    shared = "shared.weight"
    change("flan_t5_of_the_hub", "flan_t5", lambda tensors: tensors.update({
        "lm_head.weight": tensors[shared] + 1, "decoder.embed_tokens.weight": tensors[shared].clone()
    }))  # fmt: skip
    change("without_bias", "bart", lambda tensors: tensors.pop("final_logits_bias"))
    change("without_tensor", "llama_tied", lambda tensors: tensors.pop("model.norm.weight"))
    change("other_shape", "llama_tied", lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}))
    change(
        "wrapped", "llama_tied", lambda tensors: [tensors.update({f"module.{name}": tensors.pop(name)}) for name in [*tensors]]
    )
    # Biases, a layer beyond the last, another head; the last is a buffer of older versions, which transformers ignores.
    others = {f"model.layers.{layer}.self_attn.q_proj.bias": torch.ones(32) for layer in (0, 1)}
    others |= {name: torch.ones(2) for name in ("model.layers.2.mlp.up_proj.weight", "score.weight")}
    others["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    change("with_others", "llama", lambda tensors: tensors.update(others))
    change("other_t5", "t5", lambda tensors: [tensor.mul_(2) for tensor in tensors.values()])
    # As many rows as tokens: new ones make it grow.
    for name in ("t5", "flan_t5_of_the_hub", "bart", "llama", "llama_tied"):
        folders[f"small_{name}"] = save_resized(folders[name], parent / f"small_{name}")
    folders["grown_t5"] = save_resized(folders["other_t5"], parent / "grown_t5", 2)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 8, "vocab_size": 256}
    folders["gptj"] = parent / "gptj"
    transformers.GPTJForCausalLM(transformers.GPTJConfig(**sizes)).save_pretrained(folders["gptj"])
    llama = transformers.AutoModelForCausalLM.from_pretrained(folders["llama"], dtype=torch.bfloat16)
    folders["several_files"] = shutil.copytree(folders["llama"], parent / "several_files")
    (folders["several_files"] / "model.safetensors").unlink()
    llama.save_pretrained(folders["several_files"], max_shard_size="20kB")
    assert len(list(folders["several_files"].glob("*.safetensors"))) > 2
    folders["mxfp4"] = save_mxfp4_model(parent / "mxfp4")
    with patch.dict("tests.support.adapter_models.BASES", {"llama_tied": (transformers.LlamaForCausalLM, None)}):
        model = adapted(folders["llama_tied"], "llama_tied", rank=2)
    randomize(model)
    folders["adapter"] = export_adapter(parent / "adapter", model)
    folders |= {kind: QUANTIZED / kind for kind in ("bnb_nested", "bnb_plain")} | {"fp8": save_fp8_model(parent / "fp8")}
    qwen3 = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**FP8_SIZES))
    folders["plain_of_fp8"] = parent / "plain_of_fp8"
    qwen3.save_pretrained(folders["plain_of_fp8"])
    return folders


@pytest.fixture(scope="module")
def found(folders) -> list[dict[str, Any]]:
    return run_on_ranks(load_all, preset="fsdp2_cpu", num_processes=3, args=(folders,))


def load_all(folders: dict[str, Path]) -> dict[str, Any]:
    found = load_both_ways(folders, tuple(CASES))
    accelerator = Accelerator()
    found["computed"] = load(accelerator, folders, "without_bias", {})
    return found | {case: refusal(load, accelerator, folders, name, flags) for case, (name, flags, _) in REFUSED.items()}


def load_both_ways(folders: dict[str, Path], cases: tuple[str, ...]) -> dict[str, dict]:
    """What was read in slices, and what differs from what transformers loads in full."""
    accelerator = build_accelerator()
    in_full = patch.object(weights, "match_files", side_effect=ShardedReadUnsupported("a test asks for it"))
    found = {}
    for case in cases:
        name, flags = CASES[case]
        with patch.object(tensor_reader, "PIECE_BYTES", SMALL_PIECE_BYTES):
            read = load(accelerator, folders, name, flags)
        with in_full:
            full = load(accelerator, folders, name, flags)
        found[case] = {what: read[what] for what in ("printed", "reads", "num_parameters", "others")}
        found[case]["differing"] = {what: differing(read[what], full[what]) for what in COMPARED}
        found[case]["num_compared"] = {what: len(full[what]) for what in COMPARED}
    return found


def load(accelerator, folders: dict[str, Path], name: str, flags: dict) -> dict:
    """Load as a recipe does; returns what a run can see of the model, whole, and what was read to make its shards."""
    is_seq2seq = json.loads((folders[name] / "config.json").read_text()).get("is_encoder_decoder", False)
    always = {
        "model.name_or_path": folders[name], "data.source": "not/read", "train.num_epochs": 1,
        "train.global_batch_size_rows": 3, "train.micro_batch_size_rows": 1,
    }  # fmt: skip
    values = {key: value.format(**folders) if isinstance(value, str) else value for key, value in (always | flags).items()}
    config = load_config(SummarizationConfig if is_seq2seq else LLMConfig, as_flags(values))
    dtype = frozen_dtype(accelerator, config.model.frozen_dtype, has_adapter=config.adapter.method != "none")
    init_from = find_weights(config.model.init_from) if config.model.init_from else None
    run = Run(config, objective_of(config), accelerator, dtype, Path(), {}, None, init_from)
    stages.build_skeleton(run)
    printed, warned = list[str](), list[str]()
    with patch.multiple(stages.logger, info=printed.append, warning=warned.append):
        model, readers = stages.load_model(run)
    complete_identity = stages.begin_identity(run, "", model, readers)
    assert all(parameter.is_meta for parameter in model.parameters())
    reads: list[int] = []
    sharded = sharding.shard_model(accelerator, model, counted(readers, reads))
    named = dict(model.named_parameters(remove_duplicate=False))
    return {
        "parameters": {name: whole.clone() for name, whole in unsharded_parameters(sharded)},
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
        "placed": {name: (str(p.placements), p.requires_grad, str(p.device)) for name, p in named.items()},
        "aliases": {name: sorted(other for other, q in named.items() if q is p) for name, p in named.items()},
        "frozen_hashes": complete_identity().frozen_hashes,
        "others": {
            "config": model.config.to_dict(),
            "model_config_hash": complete_identity().model_config_hash,
            "generation_config": model.generation_config.to_dict(),
            "name": model.name_or_path,
            "training": model.training,
            "warned": [text.partition(str(folders[name]))[2] for text in warned],
        },
        "printed": printed,
        "reads": reads,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def counted(readers: dict, reads: list[int]) -> dict:
    """Readers that note how many elements they are asked for."""

    def read(reader, box: tuple[slice, ...]) -> torch.Tensor:
        part = reader.read(box)
        reads.append(part.numel())
        return part

    return {name: dataclasses.replace(reader, read=partial(read, reader)) for name, reader in readers.items()}


def differing(one: dict, two: dict) -> list[str]:
    return sorted(key for key in one.keys() | two.keys() if key not in one or key not in two or not same(one[key], two[key]))


def same(one, two) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    return bool(one == two)


@pytest.mark.parametrize("case", CASES)
def test_shards_are_what_transformers_loads(found, case):
    for of_rank in found:
        about = of_rank[case]
        assert about["printed"] == []
        assert about["differing"] == dict.fromkeys(COMPARED, [])
        assert about["num_compared"]["parameters"] > 10
        has_frozen = any(kind in case for kind in ("lora", "dora", "frozen", "adapter"))
        assert bool(about["num_compared"]["frozen_hashes"]) == has_frozen
    # No rank reads more than its shards, in small pieces.
    reads, num_parameters = [of_rank[case]["reads"] for of_rank in found], found[0][case]["num_parameters"]
    assert sum(map(sum, reads)) == num_parameters
    assert max(map(sum, reads)) < 0.45 * num_parameters, "of three ranks one has much more than its third"
    assert max(map(max, reads)) <= SMALL_PIECE_BYTES // 4


def test_tensors_that_the_model_does_not_take_are_counted(found):
    (warned,) = found[0]["tensors-that-no-model-takes"]["others"]["warned"]
    assert warned == (
        " also have 4 tensors that the model does not take, so neither trained nor exported: model.layers.*.self_attn.q_proj."
        "bias (2), model.layers.2.mlp.up_proj.weight, score.weight"
    )


def test_replicas_read_the_same_shards(folders):
    overrides = GPU_PRESET_OVERRIDES_ON_CPU["fsdp2_hsdp"]
    found = run_on_ranks(load_both_ways, preset="fsdp2_hsdp", overrides=overrides, args=(folders, HYBRID_CASES))
    for case in HYBRID_CASES:
        num_read = [sum(of_rank[case]["reads"]) for of_rank in found]
        assert num_read[:2] == num_read[2:] and sum(num_read[:2]) == found[0][case]["num_parameters"]
        assert all(of_rank[case]["differing"] == dict.fromkeys(COMPARED, []) for of_rank in found)


def test_a_file_that_one_rank_cannot_read_to_its_end_stops_all(folders):
    sentences = run_on_ranks(lose_files, preset="fsdp2_cpu", num_processes=2, args=(folders,))
    assert sentences[0] == sentences[1]
    for said in sentences[0]:
        assert ".safetensors changed or went away while it was read (Stale file handle)" in said


def lose_files(folders: dict[str, Path]) -> list[str]:
    """On every rank: what is said when rank 1 loses the file behind its header, as shards are read or the base is hashed."""
    accelerator, stale = build_accelerator(), OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    with patch("os.preadv", side_effect=stale if rank() == 1 else os.preadv):
        return [refusal(load, accelerator, folders, *CASES[case]) for case in ("t5", "llama-dora")]


def test_what_cannot_be_read_in_parts_is_loaded_in_full_and_says_why(found, folders):
    reason = "final_logits_bias is in no file, but computed"
    for of_rank in found:
        about = of_rank["computed"]
        assert about["printed"] == [f"every rank loads all of {folders['without_bias']} before it is sharded: {reason}"]
        assert len(about["parameters"]) > 10


@pytest.mark.parametrize("case", REFUSED)
def test_weights_of_another_model_are_refused_on_every_rank(found, folders, case):
    name, _, sentence = REFUSED[case]
    said = {of_rank[case] for of_rank in found}
    assert len(said) == 1 and sentence.format(folder=folders[name], **folders) in said.pop()
