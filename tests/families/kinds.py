"""Tiny models of every kind that transformers maps to a causal model, an encoder-decoder, or a model of images that continues
texts, their configs shrunk by rule."""

import inspect
from pathlib import Path
from types import SimpleNamespace

from tests.support.model_folders import BART_TOKENS, save_tokenizer
from tests.support.seq2seq_families import AUDIO

SIZES = {
    # Widths; 8 a head.
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "embedding_size", "model_dim"), 64),
    "hidden_size_global": 64,
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "dff", "n_inner"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size", "mlp_dim"), 48),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "attention_head_dim", "global_head_dim", "swa_head_dim"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "index_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "hidden_size_per_layer_input"), 8),
    # Numbers.
    **dict.fromkeys(
        (
            "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "num_encoder_layers",
            "num_decoder_layers", "depth",
        ),
        2,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads",
            "num_encoder_attention_heads", "num_decoder_attention_heads", "linear_num_value_heads", "index_n_heads",
        ),
        4,
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "linear_num_key_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    # Recurrent layers.
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "state_size", "ssm_state_size", "mamba_d_state"), 8),
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "lru_width": 64, "mamba_n_groups": 1,
    "n_groups": 1, "linear_num_heads": 4, "linear_head_dim": 8,
    # Positions and tokens.
    **dict.fromkeys(("sliding_window", "attention_window", "local_attention_window", "attention_window_size"), 8),
    **dict.fromkeys(
        (
            "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_encoder_position_embeddings",
            "max_decoder_position_embeddings",
        ),
        128,
    ),
    **dict.fromkeys(
        ("vocab_size", "decoder_vocab_size", "src_vocab_size", "tgt_vocab_size", "vocab_size_per_layer_input"), 256
    ),
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "decoder_start_token_id": 0, "forced_eos_token_id": None,
}  # fmt: skip
"""What the rule sets, where a config has the name."""
WEIGHT_SIZE = 0.1
"""Standard deviation of each matrix, so that attention has something to say."""

OTHERS: dict[str, tuple[str, ...]] = {
    "speech or music": (
        *AUDIO, "musicgen", "musicgen_melody", "phi4_multimodal", "whisper", "moshi", "speech_to_text_2",
    ),
    "no texts without images, proteins or blocks of noise": (
        "blip", "blip-2", "diffusion_gemma", "evolla", "florence2", "git", "idefics", "instructblip", "instructblipvideo",
        "kosmos-2", "pi0", "pix2struct", "pix2struct_text_model", "pp_formulanet", "trocr", "udop", "vision-encoder-decoder",
    ),
    "a tower of another library (timm)": ("fast_vlm", "gemma3n", "perception_lm"),
    "tokens that see later ones": (
        "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
        "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod", "reformer", "xlm",
        "xlnet",
    ),
    "drafts for another model's cache": ("gemma4_assistant", "gemma4_unified_assistant"),
}  # fmt: skip
"""Kinds that are not in the table, by what they are for."""


def _rope(*section: int) -> dict:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*section]}}


BERT = {
    "model_type": "bert", "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96, "max_position_embeddings": 128,
}  # fmt: skip
MORE = {
    **{
        kind: ({"bos_token_id": 2}, "takes no None")
        for kind in ("cwm", "emu3_text_model", "modernbert-decoder", "t5_gemma_module", "t5gemma2_decoder")
    },
    **{
        f"{kind}_text": (_rope(2, 3, 3), "splits its positions")
        for kind in ("cosmos3_edge", "glm4v", "glm_ocr", "paddleocr_vl", "qwen2_5_omni", "qwen2_5_vl", "qwen2_vl")
    },
    "glm4v_moe_text": (_rope(1, 1, 2), "splits its positions"),
    "hunyuan_vl_text": (_rope(2, 2, 2, 2), "splits its positions"),
    "qwen2_vl_vision": ({"embed_dim": 64}, "has another name for its width"),
    **dict.fromkeys(
        ("chameleon", "emu3"), ({"vocabulary_map": {"<image>": 4, "<|extra_200|>": 5}}, "reads the token of an image there")
    ),
    "deepseek_ocr2_text": ({"mlp_layer_types": ["dense", "sparse"], "head_dim": None}, "has no types by default"),
    "ernie4_5_vl_moe_text": (
        {"moe_intermediate_size": [48, 48], **_rope(3, 3, 2)},
        "has a width each for texts and images, and splits its positions",
    ),
    "emu3_vqgan": ({"base_channels": 32, "codebook_size": 64}, "has names of its own"),
    "chameleon_vqgan": ({"base_channels": 32, "latent_channels": 32, "embed_dim": 32}, "has names of its own"),
    "glm5_next_vision": ({"out_hidden_size": 64, "projection_intermediate_size": 96}, "has names of its own"),
    "glm5_next_text": ({"qk_rope_head_dim": 0, "head_dim": None}, "has no rotary positions"),
    "granite4_vision": ({"deepstack_layer_map": [[0, 0]], "downsample_rate": "2/4"}, "has no pairs of layers by default"),
    "granite_docling_vision": ({"out_hidden_size": 64}, "has another name for the text's width"),
    "inkling2_vision": ({"text_hidden_size": 64}, "has another name for the text's width"),
    "janus_vqgan": (
        {"base_channels": 32, "latent_channels": 32, "num_embeddings": 64, "projection_dim": 64, "image_token_embed_dim": 64},
        "has names of its own",
    ),
    "janus_vision_model": ({"projection_dim": 64, "depth": 2}, "has another name for the text's width"),
    "kosmos_2_5_text_model": ({"embed_dim": 64, "layers": 2, "attention_heads": 4}, "has names of its own"),
    "molmo2_adapter": ({"vision_feature_layer": [1, 0], "text_hidden_size": 64}, "names layers that a small tower lacks"),
    "muse_spark_audio": (
        {"num_hidden_layers": None, "hidden_sizes": [16, 16, 16, 16], "out_hidden_size": 64},
        "has an entry per layer in several lists",
    ),
    "unlimited_ocr_text": ({"num_key_value_heads": 4}, "its plain attention has a key for each query"),
    **dict.fromkeys(
        ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"),
        ({"vision_start_token_id": 4}, "reads the token that begins an image, which the files of real models name"),
    ),
    "radio": ({"video_temporal_patch_size": 2}, "has what its model says too"),
    **dict.fromkeys(("blenderbot", "blenderbot-small", "fsmt", "led", "mvp"), (BART_TOKENS, "begins and pads as BART")),
    "bamba": ({"attn_layer_indices": [1]}, "names its attention layers by their places"),
    "bigbird_pegasus": ({"block_size": 2, "num_random_blocks": 1}, "its blocks are longer than a row"),
    "blt": ({"encoder_hash_byte_group_vocab": 64}, "its tables of byte groups have half a million rows"),
    "cohere_compass_text": (
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")
            },
        },
        "has no rotary positions by default",
    ),
    "dbrx": (
        {
            "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        },
        "its parts do not know what its defaults say of them",
    ),
    "deepseek_v4": (
        {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}},
        "compresses 128 tokens, more than a row has",
    ),
    "dots3_note_audio_encoder": ({"adapter_input_size": 64, "adapter_out_dim": 64}, "has widths of its own for them"),
    "dots3_note_vision_encoder": (
        {"mlp_layer_types": ["dense", "dense"], "adapter_in_dim": 64, "adapter_out_dim": 64},
        "has more experts in each of 42 layers by default",
    ),
    "dots3_note_text": (
        {
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_q_lora_rank": 8,
            "swa_kv_lora_rank": 8,
            "swa_head_dim": 16,
            "swa_qk_nope_head_dim": 8,
            "swa_v_head_dim": 16,
            "shared_experts_intermediate_size": 48,
        },
        "has sizes of its own for the layers with a window",
    ),
    "encoder-decoder": (
        {
            "encoder": BERT,
            "decoder": BERT | {"is_decoder": True, "add_cross_attention": True},
            "pad_token_id": 0,
            "eos_token_id": 1,
            "decoder_start_token_id": 2,
        },
        "has no parts by default",
    ),
    "falcon": ({"head_dim": None}, "computes it"),
    "falcon_h1": ({"mamba_d_ssm": 128}, "heads times their size is the width of the state"),
    **dict.fromkeys(
        ("gemma4_text", "gemma4_unified_text"),
        ({"global_head_dim": 16}, "its full attention has heads of 512 by default, whose scores rounding changes"),
    ),
    "gemma3n_text": ({"num_kv_shared_layers": 0}, "shares keys between more layers than there are"),
    "gpt_neo": ({"attention_types": [[["global", "local"], 1]]}, "names its layers by pairs"),
    "granitemoehybrid": ({"layer_types": ["mamba", "attention"]}, "has no attention by default"),
    "jamba": ({"attn_layer_period": 2, "attn_layer_offset": 1}, "names its attention layers by a period"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "has attention only in its default types"),
    "lfm2_moe": ({"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}, "has no types by default"),
    "mamba2": ({"num_heads": 8, "head_dim": 16}, "heads times their size is twice the width"),
    "mllama_text_model": (
        {"bos_token_id": 2, "num_hidden_layers": 3, "cross_attention_layers": [1]},
        "has layers for images beyond the second",
    ),
    "pegasus_x": ({"num_global_tokens": 4, "block_size": 8}, "its blocks are longer than a row"),
    "phimoe": ({"router_jitter_noise": 0.0, "input_jitter_noise": 0.0}, "draws its experts at random while it trains"),
    "prophetnet": (
        {"num_hidden_layers": None, "disable_ngram_loss": True, "bos_token_id": 2, "decoder_start_token_id": 2},
        "has two kinds of layers, and a second loss",
    ),
    "recurrent_gemma": ({"num_hidden_layers": 3}, "its third layer has attention"),
    "longcat_flash": ({"head_dim": 8}, "the size of rotary positions"),
    "qwen4_exp_text": (
        {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16, "indexer_compress_ratio": 4},
        "has no sizes of its indexer",
    ),
    "xlstm": ({"v_head_dim": None, "head_dim": None, "qk_dim_factor": 1.0}, "computes them"),
    "youtu": ({"pad_token_id": None}, "sets the row of a padding token to 0 whenever it is loaded"),
    "zamba": ({"layers_block_type": ["mamba", "mamba", "hybrid"] * 2, "num_hidden_layers": 6}, "two layers share weights"),
    "zamba2": ({"layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4, "num_mem_blocks": 1}, "has 54 layers"),
    "zaya": ({"num_experts_per_tok": 1}, "takes no other number"),
}
"""What the rule cannot know: the config's settings, None where `SIZES` must not be used, and why."""


def kinds() -> dict[str, str]:
    """The kinds by name, with their auto class."""
    from transformers.models.auto import modeling_auto

    causal = dict.fromkeys(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "AutoModelForCausalLM")
    causal |= dict.fromkeys(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, "AutoModelForImageTextToText")
    return causal | dict.fromkeys(modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, "AutoModelForSeq2SeqLM")


def shrink(config_class) -> dict:
    """What a tiny config of the class is built with: `SIZES`, one layer of each type, also of its parts."""
    default = config_class()
    names = set(dir(default)) | set(default.to_dict())
    sizes = {name: value for name, value in SIZES.items() if name in names}
    if "kv_lora_rank" in names:  # latent attention: each query head has a key, and rotary positions have a head size of their own
        sizes.pop("head_dim", None)
        sizes |= {"num_key_value_heads": 4} if "num_key_value_heads" in sizes else {}
    if (types := getattr(default, "layer_types", None)) and "layer_types" in inspect.signature(config_class).parameters:
        types = list(dict.fromkeys(types))
        sizes["layer_types"] = types if len(types) > 1 else types * 2
        sizes["num_hidden_layers"] = len(sizes["layer_types"])
    for name in getattr(config_class, "sub_configs", {}):
        if (part := getattr(default, name, None)) is not None:
            sizes[name] = shrink(type(part)) | {"model_type": part.model_type}
    more, _ = MORE.get(config_class.model_type, ({}, ""))
    return {name: value for name, value in (sizes | more).items() if value is not None or name not in more}


def tiny_config(kind: str, **settings):
    import transformers

    config_class = transformers.CONFIG_MAPPING[kind]
    start = {"decoder_start_token_id": 0} if kinds()[kind] == "AutoModelForSeq2SeqLM" else {}
    return config_class(**start | shrink(config_class) | settings)


def kind_on_meta(kind: str):
    import torch
    import transformers

    with torch.device("meta"):
        return getattr(transformers, kinds()[kind]).from_config(tiny_config(kind))


def has_experts(kind: str) -> bool:
    from toolkit.models.experts import expert_counts

    return bool(expert_counts(SimpleNamespace(config=tiny_config(kind))))


def save_kind(kind: str, folder: Path):
    """Write a tiny random model of a kind and its tokenizer; the model, in fp32."""
    return save_random(kind, kinds()[kind], tiny_config(kind), folder)


def save_random(family: str, auto_class: str, config, folder: Path):
    """Write a random model of a config and a tokenizer of the family; the model, in fp32."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, auto_class).from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        is_shut = not parameter.any() and not name.endswith(("weight", "bias"))  # a factor of 0 lets no gradient through
        if parameter.requires_grad and (parameter.ndim > 1 or is_shut):
            torch.nn.init.normal_(parameter, std=WEIGHT_SIZE)
    model.save_pretrained(folder)
    save_tokenizer(family, folder, has_start=getattr(config, "pad_token_id", 0) == 1)
    return model
