"""transformers 4.57 reads an export as version 5 does: its loss, and its tokens."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.other_tools import read_losses
from tests.other_tools.conftest import TRANSFORMERS_4
from tests.support.model_folders import _build_tokenizer
from tests.support.workbench import new_bench
from toolkit.data.tokens.tokenizer import open_tokenizer

_T5 = {
    "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "d_ff": 64, "d_kv": 8, "d_model": 32, "num_heads": 4,
    "num_layers": 2, "decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06, "relative_attention_num_buckets": 32, "torch_dtype": "float32",
}  # fmt: skip
_T5_1_1 = _T5 | {"num_decoder_layers": 2, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "output_past": True}
_LLAMA = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "hidden_act": "silu", "rms_norm_eps": 1e-05, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": 1, "torch_dtype": "float32", "transformers_version": "4.43.0.dev0",
}  # fmt: skip
_GEMMA = _LLAMA | {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, "hidden_activation": "gelu_pytorch_tanh"}
_HALF = [1.0, 1.1, 1.3, 1.5], [1.08, 1.6, 4.0, 32.0]
CASES = {
    # As their owners publish them, except sizes.
    "google-t5/t5-small": _T5 | {"n_positions": 512, "task_specific_params": {"summarization": {"num_beams": 4}}},
    "google/flan-t5-base": _T5_1_1 | {"n_positions": 512, "bos_token_id": None},
    "google/mt5-small": _T5_1_1 | {"model_type": "mt5", "tokenizer_class": "T5Tokenizer"},
    "facebook/bart-large-cnn": {
        "architectures": ["BartForConditionalGeneration"], "model_type": "bart", "_num_labels": 3, "activation_function": "gelu",
        "bos_token_id": 3, "d_model": 32, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "decoder_layers": 2,
        "decoder_start_token_id": 1, "early_stopping": True, "encoder_attention_heads": 4, "encoder_ffn_dim": 64,
        "encoder_layers": 2, "eos_token_id": 1, "force_bos_token_to_be_generated": True, "forced_bos_token_id": 3,
        "forced_eos_token_id": 1, "is_encoder_decoder": True, "length_penalty": 2.0, "max_length": 142,
        "max_position_embeddings": 128, "min_length": 56, "no_repeat_ngram_size": 3, "normalize_before": False, "num_beams": 4,
        "pad_token_id": 0, "scale_embedding": False, "task_specific_params": {"summarization": {"max_length": 142}},
    },
    "meta-llama/Llama-3.1-8B": _LLAMA | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 500000.0, "tie_word_embeddings": False,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
            "rope_type": "llama3",
        },
    },
    "Qwen/Qwen2.5-0.5B": _LLAMA | {
        "model_type": "qwen2", "rope_theta": 1000000.0, "tie_word_embeddings": True, "use_sliding_window": False,
        "sliding_window": 32768, "max_window_layers": 24,
    },
    "google/gemma-2-2b": _GEMMA | {
        "model_type": "gemma2", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "rope_theta": 10000.0,
    },
    "google/gemma-3-1b-it": _GEMMA | {
        "model_type": "gemma3_text", "rope_theta": 1000000, "rope_local_base_freq": 10000, "sliding_window_pattern": 2,
        "rope_scaling": None, "cache_implementation": "hybrid",
    },
    "microsoft/Phi-3.5-mini-instruct": _LLAMA | {
        "model_type": "phi3", "original_max_position_embeddings": 16, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "rope_scaling": {"long_factor": _HALF[1], "short_factor": _HALF[0], "type": "longrope"},
    },
    "EleutherAI/pythia-70m": {
        "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "bos_token_id": 0, "eos_token_id": 1,
        "hidden_act": "gelu", "hidden_size": 64, "intermediate_size": 64, "layer_norm_eps": 1e-05, "num_attention_heads": 4,
        "max_position_embeddings": 128, "num_hidden_layers": 2, "rotary_emb_base": 50000, "rotary_pct": 0.25,
        "tie_word_embeddings": False, "use_parallel_residual": True, "pad_token_id": 0,
    },
    "stabilityai/stablelm-2-1_6b": _LLAMA | {
        "model_type": "stablelm", "partial_rotary_factor": 0.25, "rope_theta": 50000, "use_qkv_bias": True, "head_dim": 16,
        "hidden_size": 64, "layer_norm_eps": 1e-05, "tie_word_embeddings": False,
    },
    # What they may be beside that.
    "yarn": _LLAMA | {
        "model_type": "qwen3", "head_dim": 8, "rope_theta": 1000000.0, "tie_word_embeddings": False,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "linear, on one of two kinds of layers": _GEMMA | {
        "model_type": "gemma3_text", "rope_theta": 1000000, "rope_local_base_freq": 10000, "sliding_window_pattern": 2,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "dynamic": _LLAMA | {"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "an untied head under a tied flag": _LLAMA | {"model_type": "llama", "rope_theta": 1e6, "tie_word_embeddings": True},
    "an adapter, merged": _LLAMA | {"model_type": "llama", "rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 4.0}},
}  # fmt: skip
UNTIED = ("google/flan-t5-base", "google/mt5-small", "an untied head under a tied flag")


def build(folder: Path, settings: dict, *, is_untied: bool) -> None:
    """A model folder with this `config.json`, random weights and a tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    folder.mkdir(parents=True)
    settings = settings | {"vocab_size": 256}
    (folder / "config.json").write_text(json.dumps(settings))
    config = AutoConfig.from_pretrained(folder)
    auto_class = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto_class.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # so large that a loss tells positions apart
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    if is_untied:
        weights = load_file(folder / "model.safetensors") | {"lm_head.weight": torch.randn(256, 32) * 0.3}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer = build_tokenizer(settings["model_type"])
    tokenizer.add_special_tokens({"extra_special_tokens": [*tokenizer.extra_special_tokens, "<tag>"]})
    tokenizer.save_pretrained(folder)


def build_tokenizer(model_type: str):
    """Of a class of its own for some, which version 4 may read otherwise than the `tokenizer.json`."""
    from transformers import GemmaTokenizer, LlamaTokenizer, T5Tokenizer

    signs = ["▁", *"abcdefghijklmnopqrstuvwxyzG123,<>/_"]
    vocabulary = {token: place for place, token in enumerate(["<pad>", "</s>", "<unk>", "<s>", "<eos>", "<bos>", *signs])}
    if model_type == "t5":
        pieces = [(token, 0.0 if place < 3 else -5.0) for token, place in vocabulary.items() if place not in (3, 4, 5)]
        return T5Tokenizer(vocab=[*pieces, ("▁alpha", -3.0)], extra_ids=4)
    if model_type == "llama":
        return LlamaTokenizer(vocab=vocabulary, merges=[], pad_token="<pad>", add_eos_token=True)
    if model_type == "gemma2":
        return GemmaTokenizer(vocab=vocabulary, merges=[])
    return _build_tokenizer(("<pad>", "</s>"))


def test_losses_and_tokens_are_those_of_version_5(tmp_path_factory):
    exports: dict[str, Path] = {}
    for recipe in ("t5", "llm"):
        bench = new_bench(tmp_path_factory, f"transformers4_{recipe}", recipe)
        runs, limit = {}, {"llm": {"data__max_length_tokens": 100}}
        for place, (name, settings) in enumerate(CASES.items()):
            if settings.get("is_encoder_decoder", False) != (recipe == "t5"):
                continue
            folder, run = bench.runs / "bases" / str(place), f"run{place}"
            build(folder, settings, is_untied=name in UNTIED)
            runs[run] = {"model__name_or_path": folder, "train__max_steps": 1, "eval__generate": False} | limit.get(recipe, {})
            exports[name] = bench.runs / run / "export"
            if "merged" in name:
                runs[run] |= {"adapter__method": "lora", "export__merge": True}
                exports[name] = bench.runs / run / "merged"
        bench.run_all(runs)
    command = [sys.executable, str(Path(read_losses.__file__)), *map(str, exports.values())]
    environment = os.environ | {"PYTHONPATH": str(TRANSFORMERS_4), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("version").startswith("4.57.")
    ours = {name: read_losses.read(str(folder)) for name, folder in exports.items()}
    theirs = {name: found[str(folder)] for name, folder in exports.items()}
    assert {name: about["loss"] for name, about in theirs.items()} == pytest.approx(
        {name: about["loss"] for name, about in ours.items()}, rel=1e-5
    )
    read = {
        name: open_tokenizer(folder)(read_losses.TEXT)["input_ids"] for name, folder in exports.items()
    }  # a Qwen2's otherwise
    assert {name: about["ids"] for name, about in theirs.items()} == read
