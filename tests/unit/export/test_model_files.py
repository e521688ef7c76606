"""A model's folder, written one tensor at a time, is byte for byte what `save_pretrained` writes; and it also says what
transformers 4 reads: tests/other_tools/test_transformers4.py reads it with that version."""

import json
import weakref
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from tests.families.kinds import tiny_config
from tests.support.adapter_models import LLAMA_SIZES
from tests.support.model_folders import GROUPED, MIXTURES, SLIDING, T5_SIZES, _build_tokenizer
from tests.support.seq2seq_families import build_model
from tests.support.tiny_models import build_causal
from toolkit.errors import UserError
from toolkit.export.model_files import Cast, ModelFiles
from toolkit.export.old_spelling import spell_config, spell_tokenizer
from toolkit.models.tensor_reader import copy_on_meta

MODELS = {
    **dict.fromkeys(("t5", "bart"), build_model),
    **dict.fromkeys(("llama", "llama_tied", "gpt2", *MIXTURES), build_causal),
    "hrm_text": lambda _: hf.HrmTextForCausalLM(hf.HrmTextConfig(**LLAMA_SIZES)),
}
"""Tied and not, with buffers that are saved (BART), experts that are saved one by one, and weights that are saved fused."""


def build(name: str, dtype: torch.dtype) -> hf.PreTrainedModel:
    """With a NaN, which is compared by its bits."""
    torch.manual_seed(0)
    model: hf.PreTrainedModel = MODELS[name](name).to(dtype).eval()
    next(model.parameters()).data.view(-1)[0] = torch.nan
    return model


def write(folder: Path, model: hf.PreTrainedModel, max_shard_size: str, order: int = 1) -> ModelFiles:
    """As an export does, parameters in any order."""
    folder.mkdir()
    files = ModelFiles(folder, copy_on_meta(model), max_shard_size)
    files.begin()
    for name, parameter in list(model.named_parameters())[::order]:
        files.add(name, parameter)
    files.finish()
    return files


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "max_shard_size"), [(torch.float32, "50KB"), (torch.bfloat16, "5GB")], ids=["fp32", "bf16"])
def test_files_are_those_of_save_pretrained(tmp_path, name, dtype, max_shard_size, capsys):
    model = build(name, dtype)
    model.save_pretrained(tmp_path / "plain", max_shard_size=max_shard_size)
    write(tmp_path / "ours", model, max_shard_size, order=-1)
    plain, ours = ({file.name: file.read_bytes() for file in (tmp_path / side).iterdir()} for side in ("plain", "ours"))
    assert (len(ours) > 4) == (dtype == torch.float32)  # in several files, with an index
    assert ours.keys() == plain.keys()
    assert [file for file in plain if ours[file] != plain[file]] == []
    collected = "GiB, are collected in rank 0's host memory: transformers saves tensors of HrmText"
    assert (collected in capsys.readouterr().out) == (name == "hrm_text"), "only what is saved fused"


@pytest.mark.parametrize(
    ("kind", "auto_class"), [("qwen2_moe", hf.AutoModelForCausalLM), ("kimi_k25", hf.AutoModelForImageTextToText)]
)
def test_a_model_loaded_from_other_names_keeps_them(tmp_path, kind, auto_class):
    """transformers notes at loading which conversions it made, and reverts those. Names of Kimi-K2.5's tower change in groups,
    one to another's: each alone would have been written in another's place."""
    auto_class.from_config(tiny_config(kind)).save_pretrained(tmp_path / "first")
    model = auto_class.from_pretrained(tmp_path / "first")
    model.save_pretrained(tmp_path / "plain")
    write(tmp_path / "ours", model, "5GB")
    weights = [(tmp_path / side / "model.safetensors").read_bytes() for side in ("plain", "ours")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("name", ["llama_tied", "mixtral"])
def test_no_weight_is_kept(tmp_path, name):
    """Rank 0's host memory holds one weight at a time."""
    model = build(name, torch.float32)
    files = ModelFiles(tmp_path, copy_on_meta(model), "5GB")
    files.begin()
    for other, parameter in model.named_parameters():
        gathered = parameter.detach().clone()
        storage = weakref.ref(gathered.untyped_storage())
        files.add(other, gathered)
        del gathered
        assert storage() is None


def test_what_does_not_stand_in_the_files_is_found(tmp_path, monkeypatch):
    model = build("llama", torch.float32)
    # A weight that is never gathered.
    files = ModelFiles(tmp_path, copy_on_meta(model), "5GB")
    files.begin()
    name = "model.layers.1.mlp.up_proj.weight"
    for other, parameter in model.named_parameters():
        if other != name:
            files.add(other, parameter)
    with pytest.raises(RuntimeError, match=f"{name} was not gathered"):
        files.finish()
    # Bytes that a file system loses: the place is another's.
    path, begin = files._places[name]
    files._places[name] = (path, begin - 8)
    with pytest.raises(RuntimeError, match=f"model.safetensors: {name} is not what was trained"):
        files.add(name, model.get_parameter(name))


def test_a_name_that_plain_transformers_does_not_know_or_misses_is_found(tmp_path):
    files, path = write(tmp_path / "folder", build("llama", torch.float32), "5GB"), tmp_path / "folder" / "model.safetensors"
    tensors = load_file(path)
    for lost, sentence in (([], "unexpected keys other"), (["lm_head.weight", "other"], "missing keys lm_head.weight")):
        left = {name: tensor for name, tensor in {**tensors, "other": torch.zeros(1)}.items() if name not in lost}
        save_file(left, path, metadata={"format": "pt"})
        with pytest.raises(RuntimeError, match=sentence):
            files.finish()


def test_what_was_rounded_is_counted_over_all_weights_and_one_beyond_the_range_is_refused():
    cast = Cast({"first": torch.bfloat16, "second": torch.bfloat16, "exact": torch.float32})
    assert cast("first", torch.tensor([1.0, 1.0 + 2**-10])).tolist() == [1.0, 1.0]
    assert cast("second", torch.tensor([0.5 + 2**-12, torch.inf])).tolist() == [0.5, torch.inf]
    assert cast("exact", torch.ones(4)).dtype == torch.float32
    assert cast.describe() == "rounded 25.0 % of 8 weights, each by at most 9.8e-04 (bfloat16 and float32)"
    with pytest.raises(UserError, match=r"^large has weights up to 7e\+04, more than float16 can hold: take bfloat16$"):
        Cast({"large": torch.float16})("large", torch.tensor([1.0, -7e4]))


LINEAR = {"rope_type": "linear", "factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
PHI3 = GROUPED | {"original_max_position_embeddings": 32}
WINDOWS = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": LINEAR | {"rope_theta": 1e4}}
THETA = {"rope_type": "default", "rope_theta": 1e4}
BAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_d_head": 16, "rope_parameters": THETA}
ONE_FLAG = "transformers 4, and tools that read as it does, take one flag for both."
NOT_SCALED = f"Its head is tied and its logits are not scaled: {ONE_FLAG}"
UNTIED = f"Its head is untied and its logits are scaled: {ONE_FLAG}"
NO_SPELLING = "Its rope_parameters have no older spelling: transformers 4, and tools that read as it does, miss them."
SCALED = "CTranslate2 scales its logits as if its head were tied"
# Of the class and its config → what `config.json` says, and how the sentence begins that a reader needs.
CASES = {
    "theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {"rope_theta": 1e6}, ""),
    "scaling": ("Llama", {"rope_parameters": LINEAR | {"rope_theta": 5e5}}, {"rope_theta": 5e5, "rope_scaling": LINEAR}, ""),
    "longrope": (
        "Phi3",
        PHI3 | {"rope_parameters": LONGROPE | {"rope_theta": 1e4, "factor": 4.0}},
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}},
        "",
    ),
    "longrope of another factor": ("Phi3", PHI3 | {"rope_parameters": LONGROPE | {"factor": 3.0}}, {}, NO_SPELLING),
    "an infinity in the file": ("Bamba", BAMBA, {"partial_rotary_factor": 0.5, "rope_theta": 1e4}, ""),
    "windows of their own": ("Gemma3", SLIDING | {"rope_parameters": WINDOWS}, {}, NO_SPELLING),
    "a T5": ("T5", T5_SIZES, {"tie_word_embeddings": True}, ""),
    "a T5 1.1": ("T5", T5_SIZES | {"tie_word_embeddings": False, "untied": True}, {"tie_word_embeddings": False}, SCALED),
    "a T5 1.1 from scratch": ("T5", T5_SIZES | {"tie_word_embeddings": False}, {"tie_word_embeddings": False}, NOT_SCALED),
    "an untied T5": ("T5", T5_SIZES | {"untied": True}, {"tie_word_embeddings": True}, UNTIED),
    "an untied head": ("Llama", {"tie_word_embeddings": True, "untied": True}, {"tie_word_embeddings": False}, ""),
    "a tied head": ("Llama", {"tie_word_embeddings": True}, {"tie_word_embeddings": True}, ""),
}


@pytest.mark.parametrize("name", CASES)
def test_a_config_says_both_and_version_5_reads_the_same(tmp_path, name):
    kind, settings, says, sentence = CASES[name]
    is_t5 = kind == "T5"
    config_class = getattr(hf, f"{kind}{'Text' * (kind == 'Gemma3')}Config")
    model_class = getattr(hf, f"{kind}{'ForConditionalGeneration' if is_t5 else 'ForCausalLM'}")
    settings = ({} if is_t5 else GROUPED) | settings
    is_untied = settings.pop("untied", False)
    model = model_class(config_class(vocab_size=64, **settings)).eval()
    if is_untied:
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
        model.all_tied_weights_keys.clear()
    model.save_pretrained(tmp_path)
    before = json.loads((tmp_path / "config.json").read_text())
    found = spell_config(tmp_path, model)
    written = json.loads((tmp_path / "config.json").read_text())
    assert {key: written.get(key) for key in says} == says and written["torch_dtype"] == written["dtype"] == "float32"
    assert [remark.startswith(sentence) for remark in found] == [True] * bool(sentence), found
    if sentence == NO_SPELLING:
        assert {key for key in written if "rope" in key} == {key for key in before if "rope" in key}
    ids_BT = torch.tensor([[5, 9, 33, 2, 41, 17, 8]])
    inputs = {"input_ids": ids_BT, "use_cache": False} | ({"decoder_input_ids": ids_BT} if is_t5 else {})
    with torch.no_grad():
        assert torch.equal(model_class.from_pretrained(tmp_path).eval()(**inputs).logits, model(**inputs).logits)


def test_a_config_that_refuses_its_old_spelling_keeps_its_own(tmp_path):
    """Gemma 4's full attention has proportional positions."""
    model = hf.AutoModelForCausalLM.from_config(tiny_config("gemma4_text"))
    model.save_pretrained(tmp_path)
    assert any(remark.startswith(NO_SPELLING) for remark in spell_config(tmp_path, model))
    assert hf.AutoConfig.from_pretrained(tmp_path).rope_parameters == model.config.rope_parameters


def test_a_tokenizer_has_the_names_of_version_4_and_a_remark_where_version_5_reads_another(tmp_path):
    tokenizer = _build_tokenizer(("<pad>", "</s>"))
    tokenizer.add_special_tokens({"extra_special_tokens": ["<tag>"]})
    tokenizer.save_pretrained(tmp_path)
    assert spell_tokenizer(tmp_path, tokenizer) == []
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast" and "extra_special_tokens" not in written
    read = hf.AutoTokenizer.from_pretrained(tmp_path)
    assert written["additional_special_tokens"] == read.extra_special_tokens == ["<tag>"]
    assert read("alpha <tag> beta")["input_ids"] == tokenizer("alpha <tag> beta")["input_ids"]
    # Version 5 reads this one as its model's usual one.
    hf.Qwen2Config().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    sentence = "AutoTokenizer of transformers 5 reads its tokenizer as Qwen2Tokenizer, which splits texts otherwise: "
    assert spell_tokenizer(tmp_path, tokenizer) == [f"{sentence}take PreTrainedTokenizerFast."]
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert hf.PreTrainedTokenizerFast.from_pretrained(tmp_path)("alpha")["input_ids"] == tokenizer("alpha")["input_ids"]
