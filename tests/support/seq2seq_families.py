"""Every model that `AutoModelForSeq2SeqLM` names: run by a test, tiny, or refused with a sentence."""

from tests.support.model_folders import FAMILIES

IN_PROCESS = (
    "bigbird_pegasus", "blenderbot", "blenderbot-small", "encoder-decoder", "fsmt", "led", "marian", "mvp", "pegasus_x",
    "prophetnet", "t5gemma",
)  # fmt: skip
"""Model types that no folder of `build_model_folders` has."""

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

    from tests.families.kinds import tiny_config

    if family in FAMILIES:
        name, settings = FAMILIES[family]
        config = getattr(transformers, name)(vocab_size=256, **settings)
    else:
        config = tiny_config(family)
    torch.manual_seed(0)
    return transformers.AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32).eval()


def build_collator(model):
    from toolkit.objectives.seq2seq import Seq2Seq

    return Seq2Seq().build_collator(model, 0)
