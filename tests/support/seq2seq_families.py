"""Every model that `AutoModelForSeq2SeqLM` names: run by a test, tiny, or refused with a sentence."""

from tests.support.model_folders import BART_SIZES, BART_TOKENS, FAMILIES, PEGASUS_TOKENS

BERT = {
    "model_type": "bert", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
GEMMA = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
PROPHETNET = {
    "hidden_size": 32, "num_encoder_layers": 2, "num_decoder_layers": 2, "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    "bos_token_id": 2, "decoder_start_token_id": 2, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip

IN_PROCESS = {
    "bigbird_pegasus": BART_SIZES | PEGASUS_TOKENS | {"block_size": 2, "num_random_blocks": 1},
    "blenderbot": BART_SIZES | BART_TOKENS,
    "blenderbot-small": BART_SIZES | BART_TOKENS,
    "encoder-decoder": {
        "encoder": BERT, "decoder": BERT | {"is_decoder": True, "add_cross_attention": True},
        "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 2,
    },
    "fsmt": BART_SIZES | BART_TOKENS | {"langs": ["en", "de"], "src_vocab_size": 256, "tgt_vocab_size": 256},
    "led": BART_SIZES | BART_TOKENS | {
        "attention_window": 8, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64,
    },
    "marian": BART_SIZES | PEGASUS_TOKENS | {"decoder_vocab_size": 256},
    "mvp": BART_SIZES | BART_TOKENS,
    "pegasus_x": BART_SIZES | PEGASUS_TOKENS | {"num_global_tokens": 4, "block_size": 8},
    "prophetnet": PROPHETNET | {"disable_ngram_loss": True},
    "t5gemma": {"encoder": GEMMA, "decoder": GEMMA, "vocab_size": 256},
}  # fmt: skip
"""Model type and what its config is built with, beside `vocab_size=256`."""

AUDIO = (
    "audioflamingo3", "glmasr", "granite_speech", "granite_speech_plus", "moss_transcribe_diarize", "musicflamingo",
    "nemo_speechlm", "qwen2_audio", "qwen3_asr", "seamless_m4t", "seamless_m4t_v2", "vibevoice_asr", "voxtral",
    "voxtral_realtime",
)  # fmt: skip
REFUSED: dict[str, str] = {
    **dict.fromkeys(AUDIO, "which takes audio beside text"),
    "nllb-moe": "has 128 experts as separate modules",
    "switch_transformers": "has 8 experts as separate modules",
}
"""Model type and what its error says."""


def build_model(family: str):
    """A tiny random model of the family, the same on every rank, without dropout."""
    import torch
    import transformers

    if family in FAMILIES:
        name, settings = FAMILIES[family]
        config_class = getattr(transformers, name)
    else:
        config_class, settings = transformers.CONFIG_MAPPING[family], IN_PROCESS[family]
    takes_vocab_size = family not in ("encoder-decoder", "fsmt")
    config = config_class(**{**({"vocab_size": 256} if takes_vocab_size else {}), **settings})
    torch.manual_seed(0)
    return transformers.AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32).eval()


def build_collator(model):
    from toolkit.objectives.seq2seq import Seq2Seq

    return Seq2Seq().build_collator(model, 0)
