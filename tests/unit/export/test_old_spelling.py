"""An export also says what transformers 4 reads; tests/other_tools/test_transformers4.py reads it with that version."""

import json

import pytest
import torch
import transformers as hf

from tests.families.kinds import tiny_config
from tests.support.model_folders import GROUPED, SLIDING, T5_SIZES, _build_tokenizer
from toolkit.export.old_spelling import spell_config, spell_tokenizer

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


def test_a_tokenizer_has_the_names_of_version_4(tmp_path):
    tokenizer = _build_tokenizer(("<pad>", "</s>"))
    tokenizer.add_special_tokens({"extra_special_tokens": ["<tag>"]})
    tokenizer.save_pretrained(tmp_path)
    assert spell_tokenizer(tmp_path, tokenizer) == []
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast" and "extra_special_tokens" not in written
    read = hf.AutoTokenizer.from_pretrained(tmp_path)
    assert written["additional_special_tokens"] == read.extra_special_tokens == ["<tag>"]
    assert read("alpha <tag> beta")["input_ids"] == tokenizer("alpha <tag> beta")["input_ids"]


def test_a_tokenizer_that_version_5_reads_as_its_models_usual_one_has_names_of_version_4_and_a_remark(tmp_path):
    hf.Qwen2Config().save_pretrained(tmp_path)
    (tokenizer := _build_tokenizer(("<pad>", "</s>"))).save_pretrained(tmp_path)
    sentence = "AutoTokenizer of transformers 5 reads its tokenizer as Qwen2Tokenizer, which splits texts otherwise: "
    assert spell_tokenizer(tmp_path, tokenizer) == [f"{sentence}take PreTrainedTokenizerFast."]
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert hf.PreTrainedTokenizerFast.from_pretrained(tmp_path)("alpha")["input_ids"] == tokenizer("alpha")["input_ids"]
