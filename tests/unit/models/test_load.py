"""Which parameters are frozen, in what dtype they are stored, and a class or a built model that Python code gives to a run.
What a loss does not reach is found without weights, and is what real weights get no gradient for."""

import hashlib
import shutil
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import YoutuForCausalLM

from tests.families.kinds import kind_on_meta, kinds, tiny_config
from tests.support.model_folders import build_model_folders
from tests.support.own_models import own_class as make_class
from tests.support.refusals import refusal
from tests.support.seq2seq_families import build_model
from toolkit.config.schema import ModelConfig
from toolkit.models.config import load_model_config
from toolkit.models.freeze import cast_frozen, find_uncalled, find_unreached, freeze, freeze_as, hash_tensor
from toolkit.models.load import build_on_meta, check_kept, grow_vocabulary, load_model, own_class, save_built
from toolkit.models.safetensors_index import match_files
from toolkit.objectives.causal import Causal
from toolkit.objectives.objective import Objective
from toolkit.objectives.seq2seq import Seq2Seq


def test_frozen_weights_are_cast_but_for_layer_norms_and_what_trains_is_fp32():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2, dtype=torch.bfloat16))
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    cast_frozen(model, torch.bfloat16)
    assert [module.weight.dtype for module in model] == [torch.bfloat16, torch.float32, torch.float32]


def test_a_pattern_freezes_by_every_name_that_it_matches_in_full():
    def build() -> nn.ModuleDict:
        model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("body", "body_head", "head")})
        model["head"].weight = model["body"].weight
        return model

    model, again = build(), build()
    freeze(model, ["head.weight", r"body_head\.(weight|b)"])
    freeze_as(again, model)
    for one in (model, again):
        assert [name for name, p in one.named_parameters() if not p.requires_grad] == ["body.weight", "body_head.weight"]


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("led", "query_global"),
        ("deepseek_v32", "indexer.wk"),
        ("deepseek_v4", "indexer."),
        ("gemma3", "vision_tower"),
        ("mistral3", "multi_modal_projector"),
        ("t5gemma2", "eoi_embedding"),
        ("qwen2_5_vl", "visual.blocks"),
        ("qwen4_exp_text", "indexer."),
        ("llama", ""),
        ("mamba", ""),
        ("bart", ""),
    ],
)
def test_unreached_parameters_are_those_without_a_gradient(kind, part):
    found = find_unreached(kind_on_meta(kind))
    config = tiny_config(kind)
    model = getattr(transformers, kinds()[kind]).from_config(config).eval()
    tokens = torch.randint(3, 256, (1, 64 if kind == "led" else 128))
    inputs = {"input_ids": tokens} | ({"decoder_input_ids": tokens} if config.is_encoder_decoder else {})
    model(**inputs, use_cache=False).logits.sum().backward()
    trained = [(name, p.grad) for name, p in model.named_parameters() if p.requires_grad]
    assert found == [name for name, gradient in trained if gradient is None or not gradient.any()]
    assert any(part in name for name in found) if part else not found


def test_what_a_models_own_code_freezes_gets_no_adapter():
    found = find_unreached(kind_on_meta("blt"))
    assert found and all(name.startswith("model.patcher.") for name in found)


@pytest.mark.parametrize(("kind", "reason"), [("blip", "'pixel_values'"), ("diffusion_gemma", "its forward takes no labels")])
def test_a_model_that_needs_images_is_refused_before_its_weights_load(kind, reason):
    said = refusal(find_unreached, kind_on_meta(kind))
    assert f"is a {kind} model, which continues no text without images (" in said and reason in said


def test_a_forward_that_fails_without_weights_and_a_class_of_an_interactive_session_are_not_searched():
    """The class has no source: it is searched by its calls alone."""
    own = type("LlamaOfASession", (transformers.LlamaForCausalLM,), {"__module__": __name__})
    with torch.device("meta"):
        model = own(tiny_config("llama"))
    assert find_uncalled(model) == []
    with patch.object(own, "forward", side_effect=RuntimeError):
        assert find_unreached(model) == []


@pytest.mark.parametrize(
    ("kind", "weight"),
    [
        ("jamba", "mamba.dt_proj.weight"),
        ("gemma3n_text", "altup.correction_coefs.weight"),
        ("deepseek_v4", "self_attn.o_a_proj.weight"),
        ("bamba", "mamba.out_proj.weight"),
        ("mamba2", "mixer.out_proj.weight"),
        ("falcon", ""),
        ("nllb-moe", ""),
        ("bart", ""),
        ("t5", ""),
    ],
)
def test_linear_layers_whose_weight_is_read_without_a_call_are_found(kind, weight):
    found = find_uncalled(kind_on_meta(kind))
    assert all(name.endswith(weight) for name in found) and bool(found) == bool(weight)


def test_a_buffer_without_dimensions_is_hashed():
    """The scale of Gemma 3's embedding: `verify` ended on it."""
    content = b"torch.float32 ()" + torch.tensor([8.0]).numpy().tobytes()
    assert hash_tensor(torch.tensor(8.0), torch.float32) == hashlib.sha256(content).hexdigest()


def test_a_new_head_is_drawn_from_the_seed_where_the_objective_allows_it(tmp_path):
    """Each rank draws it for itself, so the seed alone decides; backbone and an objective's own head must be in the files."""
    base = transformers.BertModel(tiny_config("bert"))
    base.save_pretrained(tmp_path)

    class New(Objective):
        auto_class = "AutoModelForSequenceClassification"
        may_draw_head = True

    config, new = ModelConfig(name_or_path=str(tmp_path)), New()
    model_config = load_model_config(config, new)
    heads = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(heads))  # what was drawn before does not matter
        model = load_model(config, model_config, new, seed)
        assert torch.equal(model.bert.encoder.layer[0].output.dense.weight, base.encoder.layer[0].output.dense.weight)
        heads.append(model.classifier.weight)
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    file = tmp_path / "model.safetensors"
    save_file({name: weight for name, weight in load_file(file).items() if "pooler" not in name}, file, {"format": "pt"})
    assert "lack 2 of the model's parameters (bert.pooler.dense.bias" in refusal(load_model, config, model_config, new, 0)
    base.save_pretrained(tmp_path)
    New.may_draw_head = False
    assert "lack 2 of the model's parameters (classifier.bias, classifier.w" in refusal(load_model, config, model_config, new, 0)


@pytest.mark.parametrize("is_equal", [False, True])
def test_two_values_of_one_parameter_are_refused_on_all_paths(tmp_path, is_equal):
    config = transformers.GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=2, eos_token_id=1)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    again = tensors["transformer.h.0.mlp.c_fc.weight"].clone()
    save_file(tensors | {"h.0.mlp.c_fc.weight": again if is_equal else again + 1}, tmp_path / "model.safetensors")
    name, both = str(tmp_path), "h.0.mlp.c_fc.weight and transformer.h.0.mlp.c_fc.weight"
    given, model_config = ModelConfig(name_or_path=name), load_model_config(ModelConfig(name_or_path=name), Causal())
    for load in (
        lambda: load_model(given, model_config, Causal(), 0),
        lambda: match_files(build_on_meta(given, model_config, Causal(), torch.float32), name, None, f"model {name}"),
    ):
        sentence = f"the weights of model {name} have {both}, one parameter with two values: keep the one that is meant"
        assert load() if is_equal else refusal(load) == sentence


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(build_model_folders(tmp_path_factory.mktemp("models"), ["t5"])["t5"])


built_t5 = partial(build_model, "t5")


def test_a_class_is_loaded_for_its_kind_of_config_until_the_run_ends(folder):
    own, auto = make_class("t5"), transformers.AutoModelForSeq2SeqLM
    with own_class(own, ModelConfig(name_or_path=folder), Seq2Seq()):
        assert type(auto.from_pretrained(folder)) is own
    with pytest.raises(ZeroDivisionError), own_class(own, ModelConfig(name_or_path=folder), Seq2Seq()):
        raise ZeroDivisionError
    assert type(auto.from_pretrained(folder)) is transformers.T5ForConditionalGeneration


def test_what_fits_neither_the_task_nor_the_config_is_refused(folder):
    mistakes = [
        (folder, {}, Seq2Seq(), "model is a str, not an encoder-decoder that generates text: take one such as T5"),
        (torch.nn.Linear(2, 2), {}, Seq2Seq(), "model is a Linear, not an encoder-decoder"),
        (transformers.T5EncoderModel, {}, Seq2Seq(), "model is a T5EncoderModel, not an encoder-decoder"),
        (transformers.LlamaForCausalLM, {}, Seq2Seq(), "model is a LlamaForCausalLM, not an encoder-decoder"),
        (built_t5(), {}, Causal(), "model is a T5ForConditionalGeneration, not a causal language model"),
        (transformers.BartForConditionalGeneration, {}, Seq2Seq(),
         f"model is a BartForConditionalGeneration, for bart models, but model.name_or_path {folder} is a t5 model: "),
        (built_t5(), {"from_scratch": True}, Seq2Seq(), "model is built, and model.from_scratch asks for other weights: "),
        (built_t5(), {"init_from": "runs/first"}, Seq2Seq(), "model is built, and model.init_from asks for other weights: "),
        *((given, {"train_tokenizer": True, **more}, Seq2Seq(), "model.train_tokenizer is true, which is for a model built ")
          for given, more in ((None, {}), (transformers.T5ForConditionalGeneration, {}), (built_t5(), {"tokenizer": "other"}),
                              (None, {"from_scratch": True, "init_from": "runs/first"}))),
    ]  # fmt: skip
    for given, changes, task, sentence in mistakes:
        enter = own_class(given, ModelConfig(name_or_path=folder, **changes), task).__enter__
        assert refusal(enter).startswith(sentence)


def test_a_built_model_becomes_a_folder_named_by_its_contents_and_its_tokenizer(folder, tmp_path):
    base = Path(shutil.copytree(folder, tmp_path / "base"))
    config, tokenizer_of = ModelConfig(name_or_path=str(base), revision="main"), transformers.AutoTokenizer.from_pretrained

    def save(config: ModelConfig, model=None) -> ModelConfig:
        return save_built(model or built_t5(), config, tmp_path)

    saved = save(config)
    assert saved.revision is None and Path(saved.name_or_path).parent == tmp_path / "models"
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(saved.name_or_path)
    expected = built_t5().state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    tokenizer = tokenizer_of(base)
    assert tokenizer("alpha beta").input_ids == tokenizer_of(saved.name_or_path)("alpha beta").input_ids
    torch.nn.init.ones_((other := built_t5()).shared.weight)
    assert save(config) == saved != save(config, other)
    # Of a base whose tokenizer has changed.
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(base)
    changed = save(config)
    assert changed != saved and tokenizer_of(changed.name_or_path).chat_template == "{{ messages }}"
    (base / "tokenizer.json").write_text("{")
    assert refusal(save, config).startswith(f"the tokenizer of {base} could not be read ")
    # Of a base without a tokenizer.
    for file in (*base.glob("tokenizer*"), *base.glob("chat*")):
        file.unlink()
    asked = ModelConfig(name_or_path=str(base), train_tokenizer=True)
    with own_class(built_t5(), asked, Seq2Seq()):
        trained = save(asked)
    assert trained.train_tokenizer and not list(Path(trained.name_or_path).glob("tokenizer*"))
    assert "could not be read (T5Tokenizer finds no vocabulary); its files are config.json, " in refusal(save, config)
    named = save(ModelConfig(name_or_path=str(base), tokenizer=folder))
    assert named.tokenizer is None and (Path(named.name_or_path) / "tokenizer.json").is_file()


def test_what_a_folder_would_not_bring_back_is_refused(folder, tmp_path):
    model = built_t5()
    model.lm_head = torch.nn.Sequential(model.lm_head, torch.nn.Tanh())
    sentence = refusal(save_built, model, ModelConfig(name_or_path=folder), tmp_path)
    assert sentence.startswith("model has modules that T5ForConditionalGeneration does not build from its config: ")
    frozen = built_t5()
    frozen.shared.weight.requires_grad_(False)
    sentence = refusal(save_built, frozen, ModelConfig(name_or_path=folder), tmp_path)
    assert sentence.startswith("model has frozen shared.weight, which a run does not see: name what is frozen in ")


def test_a_model_with_a_scalar_parameter_grows(folder):
    model = built_t5().to("meta")
    model.scale = torch.nn.Parameter(torch.tensor(1.0))
    grown = grow_vocabulary(model, ModelConfig(name_or_path=folder, add_tokens=[f"<|{n}|>" for n in range(256)]))
    assert "shared.weight" in grown and "scale" not in grown


def test_a_model_whose_weights_are_set_anew_after_they_are_loaded_is_refused():
    check_kept(kind_on_meta("youtu"), "base")
    config = tiny_config("youtu")
    config.pad_token_id = 0
    with torch.device("meta"):
        model = YoutuForCausalLM(config)
    sentence = "transformers sets model.embed_tokens.weight of base, or a part of it, anew whenever it loads a youtu,"
    assert refusal(check_kept, model, "base").startswith(sentence)
