"""The generation config of a run: what its YAML sets, then what is valid of the base's."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PreTrainedModel,
    WatermarkingConfig,
)

from tests.families.kinds import tiny_config
from tests.support.model_folders import BART_SIZES, BART_TOKENS
from toolkit.config.schema import EvalConfig, ModelConfig
from toolkit.errors import UserError
from toolkit.models.generation import choose_generation


def as_said(settings: dict) -> list[str]:
    return [f"{key} {json.dumps(value)}" for key, value in settings.items()]


GREEDY, BEAMS = {"num_beams": 1}, {"num_beams": 4, "early_stopping": True, "length_penalty": 2.0}
GROUPS = {"num_beam_groups": 2, "diversity_penalty": 0.5}
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "min_p": 0.1, "epsilon_cutoff": 0.001}
LENGTHS = {"max_length": 142, "min_length": 56, "max_time": 1.0}
OUTPUT = dict.fromkeys(("return_dict_in_generate", "output_scores", "output_attentions", "output_hidden_states"), True)
# Of the base → what of it is left out, beside the settings of the run.
BASES = {
    "beams": (BEAMS | {"no_repeat_ngram_size": 3}, {}, []),
    "beams, greedy": (BEAMS | {"num_return_sequences": 1}, GREEDY, ["num_beams 4", "early_stopping true", "length_penalty 2.0"]),
    "groups of beams": (BEAMS | GROUPS, {}, as_said(GROUPS)),
    "sampling": (SAMPLING | {"top_k": 50}, {}, as_said(SAMPLING)),
    "the type of the output": (OUTPUT, {}, as_said(OUTPUT)),
    "its logits alone": ({"output_logits": True, "output_scores": False}, {}, ["output_logits true"]),
    "several texts": ({"num_return_sequences": 3}, {}, ["num_return_sequences 3"]),
    "several texts of beams": (BEAMS | {"num_return_sequences": 3}, {}, ["num_return_sequences 3"]),
    "a tokenizer's": ({"stop_strings": ["\n\n"], "token_healing": True}, {}, ['stop_strings ["\\n\\n"]', "token_healing true"]),
    "code of the hub": ({"penalty_alpha": 0.6, "dola_layers": "high"}, {}, ["penalty_alpha 0.6", 'dola_layers "high"']),
    "assistance": ({"prompt_lookup_num_tokens": 3}, {}, ["prompt_lookup_num_tokens 3"]),
    "a compiler's": ({"compile_config": {"mode": "default"}}, {}, ['compile_config {"mode": "default"}']),
    "a cache": ({"cache_implementation": "hybrid", "use_cache": False}, {}, ['cache_implementation "hybrid"', "use_cache false"]),
    "lengths": (LENGTHS | {"min_new_tokens": 2}, {}, as_said(LENGTHS)),
    "an argument of generate": ({"streamer": 1}, {}, ["streamer 1"]),
    "tokens": ({"forced_bos_token_id": 0, "pad_token_id": 0, "suppress_tokens": [7], "bad_words_ids": [[9]]}, {}, []),
    "penalties": ({"repetition_penalty": 1.2, "encoder_no_repeat_ngram_size": 4, "renormalize_logits": True}, {}, []),
    "a watermark": ({"watermarking_config": WatermarkingConfig(greenlist_ratio=0.5).to_dict()}, {}, []),
}
SAYS_NOTHING = (False, 1, 50)
"""Values of the above that are transformers' own."""


@pytest.fixture(scope="module")
def bart() -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("bart", vocab_size=32, **BART_SIZES, **BART_TOKENS)).eval()


def choose(model: PreTrainedModel, folder: Path, given: dict, file: str = "generation_config.json") -> EvalConfig:
    (folder / file).write_text(json.dumps(given))
    return choose_generation(EvalConfig(max_new_tokens=8), model, ModelConfig(name_or_path=str(folder)))


@pytest.mark.parametrize("name", BASES)
def test_what_the_yaml_leaves_unset_is_the_bases_where_it_is_valid(bart, tmp_path, capsys, name):
    theirs, ours, left_out = BASES[name]
    (tmp_path / "generation_config.json").write_text(json.dumps(theirs | {"decoder_start_token_id": 2, "eos_token_id": 2}))
    base = ModelConfig(name_or_path=str(tmp_path))
    config = choose_generation(EvalConfig(max_new_tokens=8, **ours), bart, base)
    made = bart.generation_config
    made.validate(strict=True)
    made.save_pretrained(tmp_path / "export")
    read = GenerationConfig.from_pretrained(tmp_path / "export")
    keys = {sentence.partition(" ")[0] for sentence in left_out}
    kept = {key: value for key, value in theirs.items() if key not in keys and value not in SAYS_NOTHING}
    stored = json.loads(read.to_json_string(use_diff=False))
    assert {key: value for key, value in stored.items() if key in kept} == kept
    assert (config.num_beams, read.num_beams) == (ours.get("num_beams", theirs.get("num_beams", 1)),) * 2
    printed = capsys.readouterr().out
    assert re.findall(r"^(.+) of the generation config of \S+ is left out: .", printed, re.MULTILINE) == left_out
    tokens = bart.generate(input_ids=torch.tensor([[5, 6, 2], [7, 2, 1]]), pad_token_id=1)
    assert isinstance(tokens, torch.Tensor) and len(tokens) == 2 and tokens.shape[1] <= 9


def test_an_old_config_has_the_settings_itself(bart, tmp_path, capsys):
    """As facebook/bart-large-cnn's, which has no `generation_config.json`."""
    given = bart.config.to_dict() | {"num_beams": 4, "early_stopping": True, "min_length": 3, "num_return_sequences": 2}
    config = choose(bart, tmp_path, given, "config.json")
    assert (config.num_beams, bart.generation_config.early_stopping, bart.generation_config.min_length) == (4, True, 3)
    what = f"the generation config of {tmp_path}"
    lines = [line for line in capsys.readouterr().out.splitlines() if "beams" in line]
    assert lines[0].startswith("texts are generated with ") and lines[0].endswith(f" of {what}") and "num_beams 4" in lines[0]
    assert lines[1] == "4 beams take about 4 times the time and cache of greedy decoding, which is eval.num_beams 1"


@pytest.mark.parametrize("given", [{"num_beams": "4"}, {"num_beams": 4.0}, {"eos_token_id": ["1"]}, [1]])
def test_settings_of_a_wrong_type_are_refused(bart, tmp_path, given):
    with pytest.raises(UserError, match=rf"of {re.escape(str(tmp_path))} cannot be read \(.+\): correct or remove it$"):
        choose(bart, tmp_path, given)


def test_a_model_for_which_transformers_can_build_no_cache_generates_without(tmp_path):
    blt = AutoModelForCausalLM.from_config(tiny_config("blt")).eval()
    choose(blt, tmp_path, {})
    assert blt.generate(torch.tensor([[5, 6, 7]]), min_new_tokens=2, max_new_tokens=2, pad_token_id=0).shape == (1, 5)
