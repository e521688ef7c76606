"""The families of the support table, by the name of their tiny config, and how each is trained."""

from pathlib import Path

from tests.families.kinds import save_random, tiny_config
from tests.support.model_folders import CAUSAL_FAMILIES, FAMILIES, MIXTURES, T5_SIZES

ENCODER_DECODERS = {
    "t5": "T5", "flan_t5": "FLAN-T5, T5 1.1", "mt5": "mT5", "umt5": "UMT5", "longt5": "LongT5", "t5gemma": "T5Gemma",
    "bart": "BART", "mbart": "mBART", "pegasus": "Pegasus", "pegasus_x": "PEGASUS-X", "marian": "Marian", "m2m_100": "M2M-100",
    "nllb": "NLLB", "led": "LED", "blenderbot": "Blenderbot", "prophetnet": "ProphetNet",
    "switch_transformers": "Switch Transformers",
}  # fmt: skip
CAUSAL = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2, Qwen2.5", "qwen3": "Qwen3", "gemma2": "Gemma 2",
    "gemma3": "Gemma 3 (text)", "phi3": "Phi-3", "olmo2": "OLMo 2", "granite": "Granite", "glm4": "GLM-4", "smollm3": "SmolLM3",
    "cohere": "Cohere", "stablelm": "StableLM", "falcon": "Falcon", "gpt2": "GPT-2", "gpt_neox": "GPT-NeoX", "opt": "OPT",
    "bloom": "BLOOM", "mamba": "Mamba",
}  # fmt: skip
EXPERTS = {
    "mixtral": "Mixtral", "qwen2_moe": "Qwen2-MoE", "qwen3_moe": "Qwen3-MoE", "olmoe": "OLMoE", "granitemoe": "Granite-MoE",
    "gpt_oss": "gpt-oss", "deepseek_v3": "DeepSeek-V3",
}  # fmt: skip
TITLES = EXPERTS | CAUSAL | ENCODER_DECODERS
NUM_STEPS, LR, BETA1, BETA2, EPS = 3, 1e-2, 0.8, 0.9, 1e-6
"""With this eps no update comes of the rounding of gradients that should be 0, such as those of a key's bias."""
OPTIM = {
    "optim.lr": LR, "optim.beta1": BETA1, "optim.beta2": BETA2, "optim.eps": EPS, "optim.weight_decay": 0,
    "optim.schedule": "constant", "optim.max_grad_norm": None,
}  # fmt: skip
FROZEN = {"led": "_global", "phimoe": "mlp.router"}
"""Part of the names of what a text's loss does not reach. Phi-MoE's routers train only where they draw experts at random."""
SETTINGS = {
    "prophetnet": {"train.micro_batch_size_rows": 1, "eval.batch_size_rows": 1},
    **dict.fromkeys(
        (
            "dots3_note", "dots3_note_text", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text", "olmoe",
            "granite4_vision", "qwen3_5_moe", "qwen3_5_moe_text",
        ),
        {"optim.lr": LR / 10},
    ),
}  # fmt: skip
"""Of the run YAML, by family. The outputs of ProphetNet's decoder depend on the padded length. With `LR`, whose step is a tenth
of each weight, plain training of the others in fp32 ends up to 4e-3 away from that in fp64; with a tenth of it at most 1e-6."""
IN_FP32 = ("fsmt", "inkling2", "inkling2_text", "xglm")
"""Families whose code computes in fp32 only: plain training does too."""
WIDTHS = ("hidden_size", "d_model", "n_embd", "word_embed_proj_dim")
"""Doubled to 64, which NF4's blocks divide."""


def save_model(family: str, folder: Path) -> None:
    """Write the family's tiny random model and its tokenizer."""
    import transformers

    known = FAMILIES | CAUSAL_FAMILIES | MIXTURES | {"switch_transformers": ("SwitchTransformersConfig", T5_SIZES)}
    if family in known:
        name, sizes = known[family]
        config = getattr(transformers, name)(vocab_size=256, **_widen(sizes))
    else:
        config = tiny_config(family)
    auto_class = "AutoModelForSeq2SeqLM" if family in ENCODER_DECODERS else "AutoModelForCausalLM"
    save_random(family, auto_class, config, folder)


def _widen(sizes: dict) -> dict:
    return {key: 2 * value if key in WIDTHS else value for key, value in sizes.items()}
