"""Tiny model folders of the supported families, made offline, and rows to train them on.

Each folder holds what a user's would: config.json, random safetensors weights, a tokenizer, generation_config.json.
"""

import csv
import io
import json
import random
import shutil
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

WORDS = [
    "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu", "nu", "xi", "omicron",
    "pi", "rho", "sigma", "tau",
]  # fmt: skip
T5_SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "pad_token_id": 0, "decoder_start_token_id": 0}
BART_SIZES = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
}  # fmt: skip
BART_TOKENS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2}
TRANSLATION_TOKENS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
PEGASUS_TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}

FAMILIES = {
    "t5": ("T5Config", T5_SIZES | {"feed_forward_proj": "relu", "tie_word_embeddings": True}),
    "flan_t5": ("T5Config", T5_SIZES | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("MT5Config", T5_SIZES | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "umt5": ("UMT5Config", T5_SIZES | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "bart": ("BartConfig", BART_SIZES | BART_TOKENS),
    "pegasus": ("PegasusConfig", BART_SIZES | PEGASUS_TOKENS),
    "longt5": ("LongT5Config", T5_SIZES | {"encoder_attention_type": "local", "local_radius": 7}),
    "m2m_100": ("M2M100Config", BART_SIZES | TRANSLATION_TOKENS),
    "nllb": ("M2M100Config", BART_SIZES | TRANSLATION_TOKENS),
    "mbart": ("MBartConfig", BART_SIZES | TRANSLATION_TOKENS),
    "plbart": ("PLBartConfig", BART_SIZES | TRANSLATION_TOKENS),
}
"""Config class and what it is built with; T5's config is the one of version 1.0, FLAN's that of version 1.1."""
LANGUAGES = {
    "m2m_100": ("en", "fr"),
    "nllb": ("eng_Latn", "fra_Latn"),
    "mbart": ("en_XX", "fr_XX"),
    "plbart": ("python", "en_XX"),
}
"""Source and target language of the translation models, as each tokenizer names them."""

LLAMA_SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
GROUPED = LLAMA_SIZES | {"num_key_value_heads": 2}
SLIDING = GROUPED | {"sliding_window": 8, "head_dim": 8}
GPT2_SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "pad_token_id": 0, "eos_token_id": 1}

CAUSAL_FAMILIES = {
    "llama": ("LlamaConfig", GROUPED | {"tie_word_embeddings": False}),
    "llama_tied": ("LlamaConfig", GROUPED | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", GROUPED | {"head_dim": 8, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", SLIDING),
    "gemma2": ("Gemma2Config", SLIDING | {"query_pre_attn_scalar": 32}),
    "gemma3": ("Gemma3TextConfig", SLIDING | {"query_pre_attn_scalar": 32}),
    "gpt2": ("GPT2Config", GPT2_SIZES),
    "gpt_neox": ("GPTNeoXConfig", LLAMA_SIZES),
    "phi3": ("Phi3Config", GROUPED),
    "olmo2": ("Olmo2Config", GROUPED),
}
"""Tied are llama_tied, qwen3, both Gemmas and GPT-2; the windows are shorter than the rows of the tests."""


BALANCED = {"router_aux_loss_coef": 0.5}
SMALL_EXPERTS = GROUPED | BALANCED | {"num_experts_per_tok": 2, "intermediate_size": 48, "num_hidden_layers": 2}
DEEPSEEK = {
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
MIXTURES = {
    "mixtral": ("MixtralConfig", SMALL_EXPERTS | {"num_local_experts": 4}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        SMALL_EXPERTS | {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 32},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", SMALL_EXPERTS | {"num_experts": 6, "moe_intermediate_size": 24, "head_dim": 8}),
    "olmoe": ("OlmoeConfig", SMALL_EXPERTS | {"num_experts": 2, "num_experts_per_tok": 1}),
    "granitemoe": ("GraniteMoeConfig", SMALL_EXPERTS | {"num_local_experts": 4}),
    "gpt_oss": ("GptOssConfig", SLIDING | BALANCED | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48}),
    "deepseek_v3": ("DeepseekV3Config", SMALL_EXPERTS | DEEPSEEK),
}
"""Mixtures of experts, whose numbers of experts some numbers of ranks do not divide."""


def build_model_folders(parent: Path, families: Collection[str] = (*FAMILIES, *CAUSAL_FAMILIES), **more) -> dict[str, Path]:
    """One folder a family, by its name, with `more` settings. Imports transformers: call it through `run_on_ranks`, where that
    is done."""
    import torch
    import transformers

    folders = {}
    for place, (family, (config_class, settings)) in enumerate({**FAMILIES, **CAUSAL_FAMILIES, **MIXTURES}.items()):
        if family not in families:
            continue
        folder = folders[family] = parent / family
        torch.manual_seed(place)
        config = getattr(transformers, config_class)(vocab_size=256, **settings | more)
        auto_class = transformers.AutoModelForSeq2SeqLM if family in FAMILIES else transformers.AutoModelForCausalLM
        model = auto_class.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder)
        save_tokenizer(family, folder, has_start=family == "bart")
    return folders


def build_gemmas(parent: Path) -> None:
    """Gemmas with dropout in their attention and a cap on their logits, a folder each; on one process."""
    build_model_folders(parent, ("gemma2", "gemma3"), attention_dropout=0.1, final_logit_softcapping=30.0)


def save_resized(base: Path, folder: Path, num_new: int = 0) -> Path:
    """A copy with an embedding for each token of its tokenizer, and `num_new` more."""
    import transformers
    from safetensors.torch import load_file, save_file

    shutil.copytree(base, folder)
    rows = len(transformers.AutoTokenizer.from_pretrained(base)) + num_new
    # By hand: transformers' resize would tie flan-T5's head again.
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if 256 in tensor.shape and ("embed" in name or "shared" in name or "lm_head" in name or name == "final_logits_bias"):
            tensors[name] = (tensor[:rows] if tensor.shape[0] == 256 else tensor[:, :rows]).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    return folder


def make_rows(num_rows: int, seed: int = 0) -> list[dict[str, str]]:
    """Rows of different lengths whose target is the beginning of their source."""
    drawn = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        words = drawn.choices(WORDS, k=drawn.randint(8, 30))
        rows.append({"source": " ".join(words), "target": " ".join(words[: drawn.randint(2, 6)])})
    return rows


def save_jsonl(path: Path, rows: Sequence[dict]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def save_wikihow_csv(path: Path, rows: list[dict[str, str]]) -> Path:
    """Write rows in the format of wikihowAll.csv, with its line breaks, stray separators and missing cells."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["headline", "title", "text"])
        writer.writeheader()
        for number, row in enumerate(rows):
            headline, text = row["target"].capitalize(), row["source"].capitalize()
            writer.writerow(
                {"headline": f"\n{headline}.,\n", "title": f"How to {row['target']}{number}", "text": f"{text}.;\n, {text}."}
            )
        writer.writerow({"headline": "\nNo text.", "title": "How to Fail", "text": ""})
    return path


def _build_tokenizer(special_tokens: tuple[str, ...]):
    """A byte-pair tokenizer with a token for each of `WORDS`; special tokens get the first ids and go around a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=[*special_tokens, "<unk>"], show_progress=False)
    tokenizer.train_from_iterator(WORDS, trainer)
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    around = [(token, special_tokens.index(token)) for token in ("<s>", "</s>") if token in special_tokens]
    template = "<s> $A </s>" if "<s>" in special_tokens else "$A </s>"
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=around)
    named = {name: token for name, token in tokens.items() if token in special_tokens}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **named)


def save_tokenizer(family: str, folder: Path, *, has_start: bool = False) -> None:
    """Write a tokenizer of `WORDS`, with fewer than 256 tokens; BART's kin have one before a text. Those of `LANGUAGES` have no
    target language yet, and mark a text's language in the way of their own family."""
    with tempfile.TemporaryDirectory() as scratch:
        if family in LANGUAGES:
            tokenizer = _TRANSLATION_TOKENIZERS[family](Path(scratch))
        else:
            tokenizer = _build_tokenizer(("<s>", "<pad>", "</s>") if has_start else ("<pad>", "</s>"))
        tokenizer.save_pretrained(folder)


def _nllb(scratch: Path):
    from transformers import NllbTokenizer

    trained = json.loads(_build_tokenizer(("<s>", "<pad>", "</s>")).backend_tokenizer.to_str())["model"]
    languages = ["eng_Latn", "fra_Latn", "deu_Latn"]
    return NllbTokenizer(vocab=trained["vocab"], merges=list(map(tuple, trained["merges"])), additional_special_tokens=languages)


def _mbart(scratch: Path):
    from transformers import MBartTokenizer

    letters = sorted({letter for word in WORDS for letter in word})
    pieces = [*((f"▁{word}", -2.0) for word in WORDS), *((letter, -5.0) for letter in ["▁", *letters])]
    return MBartTokenizer(vocab=[("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *pieces])


def _m2m_100(scratch: Path):
    import sentencepiece
    from transformers import M2M100Tokenizer
    from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES

    model = _train_sentencepiece(scratch / "trained.spm")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    vocabulary = ["<s>", "<pad>", "</s>", "<unk>", *(pieces.id_to_piece(i) for i in range(3, len(pieces)))]
    vocab_file = scratch / "trained.json"
    vocab_file.write_text(json.dumps({token: number for number, token in enumerate(vocabulary)}))
    languages = [f"__{code}__" for code in FAIRSEQ_LANGUAGE_CODES["m2m100"]]  # as in the special_tokens_map.json of a real one
    return M2M100Tokenizer(vocab_file=str(vocab_file), spm_file=str(model), additional_special_tokens=languages)


def _plbart(scratch: Path):
    from transformers import PLBartTokenizer

    return PLBartTokenizer(vocab_file=str(_train_sentencepiece(scratch / "trained.spm")))


_TRANSLATION_TOKENIZERS = {"nllb": _nllb, "mbart": _mbart, "m2m_100": _m2m_100, "plbart": _plbart}


def _train_sentencepiece(path: Path) -> Path:
    import sentencepiece

    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(WORDS * 10), model_writer=content, model_type="bpe", vocab_size=80, hard_vocab_limit=False,
        minloglevel=2,
    )  # fmt: skip
    path.write_bytes(content.getvalue())
    return path
