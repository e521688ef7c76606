"""Which parameters are frozen, and in what dtype they are stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from toolkit.config.schema import ModelConfig
from toolkit.errors import UserError
from toolkit.models.config import load_model_config
from toolkit.models.freeze import cast_frozen, freeze, freeze_as
from toolkit.models.load import build_on_meta, load_model
from toolkit.models.safetensors_index import match_files
from toolkit.tasks import causal


def test_frozen_weights_are_cast_but_for_layer_norms_and_what_trains_is_fp32() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2, dtype=torch.bfloat16))
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    cast_frozen(model, torch.bfloat16)
    assert [module.weight.dtype for module in model] == [torch.bfloat16, torch.float32, torch.float32]


def test_a_pattern_freezes_by_every_name_that_it_matches_in_full() -> None:
    def build() -> nn.ModuleDict:
        model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("body", "body_head", "head")})
        model["head"].weight = model["body"].weight
        return model

    model, again = build(), build()
    freeze(model, ["head.weight", r"body_head\.(weight|b)"])
    freeze_as(again, model)
    for one in (model, again):
        assert [name for name, p in one.named_parameters() if not p.requires_grad] == ["body.weight", "body_head.weight"]


def test_a_new_head_is_drawn_from_the_seed_where_the_task_allows_it(tmp_path: Path) -> None:
    """Each rank draws it for itself, so the seed alone decides; the backbone, and a task's own head, must be in the files."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    base = transformers.BertModel(transformers.BertConfig(**sizes))
    base.save_pretrained(tmp_path)
    config, task = ModelConfig(name_or_path=str(tmp_path)), replace(causal.TASK, auto_class="AutoModelForSequenceClassification")
    new = replace(task, may_draw_head=True)
    model_config = load_model_config(config, replace(new, check_model_config=lambda *_: None))
    heads = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(heads))  # what was drawn before does not matter
        model: Any = load_model(config, model_config, new, seed)
        assert torch.equal(model.bert.encoder.layer[0].output.dense.weight, base.encoder.layer[0].output.dense.weight)
        heads.append(model.classifier.weight)
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    with pytest.raises(UserError, match=r"lack 2 of the model's parameters \(classifier.bias, classifier.weight"):
        load_model(config, model_config, task, 0)
    file = tmp_path / "model.safetensors"
    save_file({name: weight for name, weight in load_file(file).items() if "pooler" not in name}, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"lack 2 of the model's parameters \(bert.pooler.dense.bias"):
        load_model(config, model_config, new, 0)


@pytest.mark.parametrize("is_equal", [False, True])
def test_two_values_of_one_parameter_are_refused_on_all_paths(tmp_path: Path, is_equal: bool) -> None:
    config = transformers.GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=2, eos_token_id=1)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    again = tensors["transformer.h.0.mlp.c_fc.weight"].clone()
    save_file(tensors | {"h.0.mlp.c_fc.weight": again if is_equal else again + 1}, tmp_path / "model.safetensors")
    name = str(tmp_path)
    given, model_config = ModelConfig(name_or_path=name), load_model_config(ModelConfig(name_or_path=name), causal.TASK)
    for load in (
        lambda: load_model(given, model_config, causal.TASK, 0),
        lambda: match_files(build_on_meta(given, model_config, causal.TASK, torch.float32), name, None, f"model {name}"),
    ):
        if is_equal:
            load()
            continue
        both = (
            "h.0.mlp.c_fc.weight and transformer.h.0.mlp.c_fc.weight, one parameter with two values: keep the one that is meant"
        )
        with pytest.raises(UserError, match=f"^the weights of model {name} have {both}$"):
            load()
