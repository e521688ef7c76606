"""Writes an export's settings also as transformers 4 spelled them, for that version and tools that read as it does.

transformers 5 reads the same with them; what it would read otherwise is not written. `make test-transformers4` compares losses.
"""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.data.tokens.tokenizer import differing_parts, hash_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# By hand, as version 4 is not there to be asked, and version 5 only reads these spellings.
_NAMES = {"gpt_neox": "rotary_emb_base rotary_pct -", "modernbert-decoder": "global_rope_theta - local_rope_theta"}
_USUAL_NAMES = "rope_theta partial_rotary_factor rope_local_base_freq"
"""Of the base frequency, the share of a head that rotates, and the base frequency of layers with a window."""
_BY_FLAGS = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer")
"""Tokenizers for which transformers 4 adds begin and end by flags, whatever `tokenizer.json` says."""
_SCALED = {"mt5": False, "umt5": True}
"""Whether transformers 5 scales the logits as T5 does, where no setting says so."""


def spell_config(folder: Path, model: PreTrainedModel) -> list[str]:
    """Add the old spelling to the `config.json` of the model's folder; returns sentences on what others than transformers 5 read
    otherwise."""
    path, remarks, config = folder / "config.json", [], model.config
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings |= {"torch_dtype": settings["dtype"]} if "dtype" in settings else {}
    # `rope_theta`, `rope_scaling` and the like beside `rope_parameters`.
    spelled = copy.deepcopy(settings)
    parts = [part for part in (spelled, *spelled.values()) if isinstance(part, dict) and part.get("rope_parameters")]
    old = [_old_rope(part) for part in parts]
    for part, own in zip(parts, old, strict=True):
        part |= own or {}
    before = _ropes(type(config).from_pretrained(folder))
    path.write_text(json.dumps(spelled), encoding="utf-8")
    is_same = False
    with contextlib.suppress(KeyError, ValueError):  # Gemma 4's config refuses what it makes of an old spelling
        is_same = _ropes(type(config).from_pretrained(folder)) == before
    if is_same and None not in old:
        settings = spelled
    else:
        remarks.append("Its rope_parameters have no older spelling: transformers 4, and tools that read as it does, miss them.")
    # The head. Before version 5, T5 and its kin scaled their logits where the head was tied, by the same flag.
    head: Any = model.get_output_embeddings()
    if head is not None and hasattr(config, "tie_word_embeddings"):
        is_tied = sum(p is head.weight for _, p in model.named_parameters(remove_duplicate=False)) > 1
        flag = getattr(config, "scale_decoder_outputs", _SCALED.get(config.model_type, is_tied))
        for part in (settings, settings.get("text_config") or {}):
            part["tie_word_embeddings"] = flag
        if flag != is_tied:
            what = "untied and its logits are scaled" if flag else "tied and its logits are not scaled"
            remarks.append(f"Its head is {what}: transformers 4, and tools that read as it does, take one flag for both.")
        elif config.is_encoder_decoder and config.tie_word_embeddings != flag:
            what = "CTranslate2 scales its logits as if its head were tied, if it converts with transformers 5"
            remarks.append(f"{what}: greedy texts are the same, scores and beams are not. Convert with transformers 4.")
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return remarks


def spell_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Give the folder's `tokenizer_config.json` the names that transformers 4 knows, if version 5 reads the same then; returns a
    sentence where it reads another tokenizer either way, as for some kinds of models it takes their usual class whatever is named
    (tokenization_auto.py:390)."""
    from transformers import AutoTokenizer

    path = folder / "tokenizer_config.json"
    if not path.exists():
        return []
    ours, read = hash_tokenizer(tokenizer), AutoTokenizer.from_pretrained(folder)
    settings = json.loads(before := path.read_text(encoding="utf-8"))
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    if str(settings.get("tokenizer_class")).removesuffix("Fast") in _BY_FLAGS:
        ids = tokenizer("a")["input_ids"]
        settings |= {"add_bos_token": ids[0] == tokenizer.bos_token_id, "add_eos_token": ids[-1] == tokenizer.eos_token_id}
    path.write_text(json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    if hash_tokenizer(AutoTokenizer.from_pretrained(folder)) not in (ours, hash_tokenizer(read)):
        path.write_text(before, encoding="utf-8")
    of_both = [getattr(each, "backend_tokenizer", None) for each in (read, tokenizer)]
    if None in of_both or not differing_parts(*of_both):
        return []
    what = f"AutoTokenizer of transformers 5 reads its tokenizer as {type(read).__name__}, which splits texts otherwise"
    return [f"{what}: take PreTrainedTokenizerFast."]


def _old_rope(part: dict[str, Any]) -> dict[str, Any] | None:
    """The old spelling of a config's `rope_parameters`, of all layers or of each kind of them; None if there is none."""
    rope = part["rope_parameters"]
    full, sliding = (rope.get(f"{kind}_attention") or rope for kind in ("full", "sliding"))
    theta, share, local = _NAMES.get(part.get("model_type", ""), _USUAL_NAMES).split()
    old = {theta: full.get("rope_theta"), share: full.get("partial_rotary_factor")}
    if full is not rope:
        old[local] = sliding.get("rope_theta")
        if sliding.get("rope_type") != "default" or rope.keys() > {"full_attention", "sliding_attention"}:
            return None
    scaling = {key: value for key, value in full.items() if key not in ("rope_theta", "partial_rotary_factor", "type")}
    if scaling.get("rope_type") == "longrope":  # Phi-3's takes three keys, and divides the two lengths for its factor
        length = scaling["original_max_position_embeddings"]
        if scaling.get("factor") not in (None, part["max_position_embeddings"] / length) or scaling.get("attention_factor"):
            return None
        scaling = {"type": "longrope", **{key: scaling[key] for key in ("short_factor", "long_factor")}}
        old["original_max_position_embeddings"] = length
    old |= {"rope_scaling": scaling} if scaling != {"rope_type": "default"} else {}
    return {key: value for key, value in old.items() if value is not None and key != "-"}


def _ropes(config: Any) -> list[dict[str, Any]]:
    """What a config and those nested in it say of rope, but `type`, an old name, and `factor`, which longrope's has not."""
    found = [getattr(part, "rope_parameters", None) or {} for part in (config, *map(vars(config).get, config.sub_configs))]
    ropes = [kind or {} for rope in found for kind in (rope.values() if "full_attention" in rope else [rope])]  # BEAM's: none
    return [{key: value for key, value in rope.items() if value is not None and key not in ("type", "factor")} for rope in ropes]
