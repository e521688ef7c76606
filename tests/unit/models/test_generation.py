"""The generation config of a run: what its YAML sets, then what is valid of the base's. What is read from a model's config
before its weights, and the positions that rows and texts may fill."""

import json
import re
from operator import attrgetter
from pathlib import Path

import pytest
import torch
import transformers as hf

from tests.families.kinds import tiny_config
from tests.support.model_folders import BART_SIZES, BART_TOKENS
from tests.support.refusals import refusal
from toolkit.config.schema import AdapterConfig, EvalConfig, ModelConfig
from toolkit.errors import UserError
from toolkit.models.config import check_weight_files, hub_commit, load_model_config
from toolkit.models.generation import choose_generation
from toolkit.models.lora import add_adapter
from toolkit.models.position_limits import check_positions, group_by_rope, warn_of_shared_rope
from toolkit.objectives.causal import Causal
from toolkit.objectives.objective import Objective
from toolkit.objectives.seq2seq import Seq2Seq


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
    "a watermark": ({"watermarking_config": hf.WatermarkingConfig(greenlist_ratio=0.5).to_dict()}, {}, []),
}
SAYS_NOTHING = (False, 1, 50)
"""Values of the above that are transformers' own."""


@pytest.fixture(scope="module")
def bart() -> hf.PreTrainedModel:
    torch.manual_seed(0)
    return hf.AutoModelForSeq2SeqLM.from_config(hf.BartConfig(vocab_size=32, **BART_SIZES, **BART_TOKENS)).eval()


def choose(model: hf.PreTrainedModel, folder: Path, given: dict, file: str = "generation_config.json") -> EvalConfig:
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
    read = hf.GenerationConfig.from_pretrained(tmp_path / "export")
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
    blt = hf.AutoModelForCausalLM.from_config(tiny_config("blt")).eval()
    choose(blt, tmp_path, {})
    assert blt.generate(torch.tensor([[5, 6, 7]]), min_new_tokens=2, max_new_tokens=2, pad_token_id=0).shape == (1, 5)


def load(folder: Path, objective: Objective, **settings) -> hf.PreTrainedConfig:
    return load_model_config(ModelConfig(name_or_path=str(folder), **settings), objective)


@pytest.mark.parametrize(
    ("config", "objective", "names"),
    [
        (hf.T5GemmaConfig, Seq2Seq(), ["dropout_rate", "encoder.dropout_rate", "decoder.attention_dropout"]),
        (hf.BartConfig, Seq2Seq(), ["dropout", "attention_dropout", "activation_dropout"]),
        (hf.GPT2Config, Causal(), ["attn_pdrop", "embd_pdrop", "resid_pdrop"]),
        (hf.Starcoder2Config, Causal(), ["attention_dropout", "embedding_dropout", "residual_dropout"]),
    ],
)
def test_dropout_is_that_of_every_rate(tmp_path, config, objective, names):
    config(decoder_start_token_id=0).save_pretrained(tmp_path)
    own, changed = (load(tmp_path, objective, dropout=p) for p in (None, 0.25))
    assert [attrgetter(name)(changed) for name in names] == [0.25] * len(names)
    assert all(attrgetter(name)(own) != 0.25 for name in names)


def test_layers_are_never_dropped_and_outputs_have_names(tmp_path, capsys):
    """Losses, checks and the export read `logits` by its name."""
    hf.OPTConfig(layerdrop=0.1, return_dict=False).save_pretrained(tmp_path)
    config = load(tmp_path, Causal(), dropout=0.25)
    assert (config.dropout, config.layerdrop, config.return_dict) == (0.25, 0.0, True)
    printed = capsys.readouterr().err
    assert f"layerdrop of {tmp_path} is set to 0: every rank must run every layer\n" in printed
    assert f"return_dict of {tmp_path} is set to true: outputs are read by their names\n" in printed


NOT_CAUSAL = "not a causal language model: take one such as Llama, Qwen or Gemma"
KERNEL = "names the attention user/kernel, which is code of the hub: set "


@pytest.mark.parametrize(
    ("config", "more", "settings", "sentence"),
    [
        (hf.BertConfig(), {}, {}, f"is a bert model, {NOT_CAUSAL}"),
        (hf.BartConfig(), {}, {}, f"is a bart model, {NOT_CAUSAL}"),
        (hf.BertConfig(is_decoder=True), {}, {}, ""),
        (hf.GPTNeoXConfig(is_decoder=False), {}, {}, ""),  # a decoder that does not say so
        # MPT's `attn_pdrop`: as 0.0 it ended every run, and with another rate its export could not be read again.
        (hf.MptConfig(), {}, {"dropout": 0.25},
         "model.dropout 0.25 cannot be attn_pdrop of a mpt, which is declared a whole number: set it to 0, or leave it out"),
        (hf.MptConfig(), {}, {"dropout": 0.0}, ""),
        *((hf.Gemma3Config(), {"attn_implementation": named}, {}, KERNEL)
          for named in ("user/kernel", {"text_config": "user/kernel"})),
    ],
)  # fmt: skip
def test_what_no_run_can_train_is_refused_by_its_config(tmp_path, config, more, settings, sentence):
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | more))
    if sentence:
        assert sentence in refusal(load, tmp_path, Causal(), **settings)
        return
    loaded = load(tmp_path, Causal(), **settings)
    assert loaded.model_type == config.model_type
    assert config.model_type != "mpt" or type(loaded.attn_config.attn_pdrop) is int


def test_the_start_of_a_decoder_may_be_in_its_generation_config_alone(tmp_path):
    hf.T5Config(bos_token_id=3).save_pretrained(tmp_path)
    assert "has no decoder_start_token_id: add it" in refusal(load, tmp_path, Seq2Seq())
    (tmp_path / "generation_config.json").write_text('{"decoder_start_token_id": 0}')
    assert load(tmp_path, Seq2Seq()).decoder_start_token_id == 0


@pytest.mark.parametrize("longest", [10, 11])
def test_a_rope_that_the_longest_row_chooses_for_all_is_warned_of(longest):
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = hf.Phi3Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, pad_token_id=0,
        max_position_embeddings=64, original_max_position_embeddings=10, initializer_range=0.2,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4} | factors,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    rows_BT = torch.randint(1, 64, (2, longest))
    together, alone = model(rows_BT).logits[0, :6], model(rows_BT[:1, :6]).logits[0]
    warning = warn_of_shared_rope(config, longest)
    assert torch.allclose(together, alone, atol=1e-4) == (warning is None)
    if longest > 10:
        assert "the longest row has 11 tokens: beyond 10 the model's longrope rope has" in warning
    assert warn_of_shared_rope(hf.LlamaConfig(), 100_000) is None


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (("model.safetensors", "model-1-of-1.safetensors"), "model.safetensors and model-1-of-1.safetensors, of which"),
        (("model-1-of-1.safetensors", "model-2-of-2.safetensors"), "model-1-of-1.safetensors and model-2-of-2.safetensors"),
        (("model.safetensors", "model-1-of-2.safetensors", "model-2-of-2.safetensors"), "model-1-of-2.safetensors and 1 more"),
        (("model.safetensors", "consolidated.safetensors", "pytorch_model.bin"), ""),
        (("model-1-of-1.safetensors",), ""),
    ],
)
def test_a_folder_with_two_sets_of_weights_is_refused(tmp_path, files, sentence):
    for file in files:
        (tmp_path / file).touch()
    index = {"weight_map": {"lm_head.weight": "model-1-of-1.safetensors"}}  # it may be older than model.safetensors
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    if not sentence:
        return check_weight_files(tmp_path, "the model")
    said = refusal(check_weight_files, tmp_path, "the model")
    assert said.startswith("the model holds two sets of weights, ") and said.endswith(": keep one of them there")
    assert sentence in said


def test_a_hub_models_files_are_of_one_commit(tmp_path, monkeypatch):
    """A branch may move while a run loads; and an adapter says at which commit it was trained."""
    commit, asked = "0123456789abcdef" * 2 + "01234567", []
    tiny_config("llama").save_pretrained(tmp_path / "models--user--tiny" / "snapshots" / commit)
    (tmp_path / "models--user--tiny" / "refs").mkdir()
    (tmp_path / "models--user--tiny" / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def has_no_index(name: str, file: str, revision: str | None, **options: bool) -> None:
        asked.append(revision)

    monkeypatch.setattr("transformers.utils.cached_file", has_no_index)
    base = ModelConfig(name_or_path="user/tiny")
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(load_model_config(base, Causal()))
    add_adapter(model, AdapterConfig(method="lora", target_modules=["q_proj"]), base)
    assert asked == [commit]
    assert model.peft_config["default"].revision == commit
    # a folder of that name is what loads
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user" / "tiny").mkdir(parents=True)
    assert hub_commit(base) is None


def test_rows_share_a_forward_only_where_their_rope_is_the_same_as_alone():
    def group(kind: str, *lengths: int) -> tuple[int, ...]:
        return group_by_rope([(kind, 10)], *lengths)

    assert group("longrope", 3, 10) == group("dynamic", 3, 10) == group("dynamic", 9, 9)
    assert group("longrope", 11, 12) == group("longrope", 20, 30) != group("longrope", 10, 30) != group("longrope", 9, 30)
    assert len({group("dynamic", length, 30) for length in (9, 11, 12)}) == 3
    assert group_by_rope([], 9, 30) == ()


LLAMA, BART = hf.LlamaConfig(max_position_embeddings=32), hf.BartConfig(max_position_embeddings=32)
TOGETHER = "a prompt has up to 25 tokens and eval.max_new_tokens is 8, together 33"


@pytest.mark.parametrize(
    ("config", "longest", "new", "what", "setting"),
    [
        (LLAMA, {"row": 32, "prompt": 24}, 8, "", ""),
        (LLAMA, {"row": 33, "prompt": 24}, 8, "the longest row has 33", "data.max_length_tokens"),
        (LLAMA, {"row": 9, "prompt": 25}, 8, TOGETHER, "data.max_length_tokens plus eval.max_new_tokens"),
        (BART, {"source": 32, "target": 32}, 32, "", ""),
        (BART, {"source": 33, "target": 9}, 8, "the longest source has 33", "data.max_source_length_tokens"),
        (BART, {"source": 9, "target": 33}, 8, "the longest target has 33", "data.max_target_length_tokens"),
        (BART, {"source": 9, "target": 9}, 33, "a generated text may have 33", "eval.max_new_tokens"),
        # What is not generated takes no position.
        (LLAMA, {"row": 9, "prompt": 9}, None, "", ""),
        (LLAMA, {"row": 9, "prompt": 0}, 33, "", ""),
        (BART, {"source": 9, "target": 9}, None, "", ""),
        (hf.T5Config(), {"source": 9000, "target": 9000}, 9000, "", ""),
    ],
)
def test_a_limit_is_the_last_length_that_fits(config, longest, new, what, setting):
    evaluation = EvalConfig(max_new_tokens=new or 33, generate=new is not None)
    if not what:
        return check_positions(config, "tiny", longest, evaluation)
    sentence = f"{what} tokens, but tiny has only 32 positions: set {setting} to at most 32"
    assert refusal(check_positions, config, "tiny", longest, evaluation) == sentence
