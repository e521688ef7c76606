"""An export is held against the trained weights before it counts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from toolkit.config.data import DataConfig
from toolkit.config.schema import ExportConfig, ModelConfig, RunConfig, SummarizationConfig
from toolkit.errors import UserError
from toolkit.export.compare import compare_logits, compare_weights, reload
from toolkit.export.write import Exported, _replace, _write_model, check_export_places

Tensors = dict[str, torch.Tensor]


class NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        pass


@pytest.fixture(scope="module")
def trained() -> tuple[T5ForConditionalGeneration, Tensors, Tensors]:
    """A model, its weights, and inputs with the logits for them."""
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=2)).eval()
    tokens_BT = torch.arange(8).view(2, 4)
    inputs = {"input_ids": tokens_BT, "attention_mask": torch.ones_like(tokens_BT), "decoder_input_ids": tokens_BT}
    with torch.no_grad():
        logits_BTV = model(**inputs, use_cache=False).logits
    return model, {name: p.detach().clone() for name, p in model.named_parameters()}, {**inputs, "logits": logits_BTV}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, trained: tuple[T5ForConditionalGeneration, Tensors, Tensors]) -> Path:
    """The model as an export writes it."""
    model, weights, check = trained
    folder = tmp_path_factory.mktemp("export")
    _write_model(Exported(model, NoTokenizer(), check, torch.float32, "5GB"), weights, folder)  # type: ignore[arg-type]
    return folder


def test_the_trained_weights_pass(
    trained: tuple[T5ForConditionalGeneration, Tensors, Tensors], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, weights, check = trained
    reloaded = reload(model, folder)
    compare_weights(weights, reloaded, folder)
    compare_logits(check, reloaded, folder, torch.float32, "")
    assert "differ" not in capsys.readouterr().err


def test_every_trained_weight_must_be_there_bit_for_bit(
    trained: tuple[T5ForConditionalGeneration, Tensors, Tensors], folder: Path
) -> None:
    model, weights, _ = trained
    reloaded = reload(model, folder)
    with pytest.raises(RuntimeError, match="adapter.weight is not what was trained"):
        compare_weights({**weights, "adapter.weight": torch.zeros(1)}, reloaded, folder)
    changed = weights["shared.weight"].clone()
    changed[3, 2] += 1e-6
    with pytest.raises(RuntimeError, match="shared.weight is not what was trained"):
        compare_weights({**weights, "shared.weight": changed}, reloaded, folder)


def test_other_logits_are_an_error_in_fp32_and_a_remark_in_bf16(
    trained: tuple[T5ForConditionalGeneration, Tensors, Tensors], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _, check = trained
    reloaded = reload(model, folder)
    other = {**check, "logits": check["logits"] * 1.2}
    with pytest.raises(RuntimeError, match=r"differ by 1.67e-01 of the largest, more than 0.0001$"):
        compare_logits(other, reloaded, folder, torch.float32, "")
    compare_logits(other, reloaded, folder, torch.bfloat16, "that is why")
    assert "differ by 1.67e-01 of the largest, more than 0.05; that is why" in capsys.readouterr().err


def test_reloading_takes_the_attention_that_was_trained_with(
    trained: tuple[T5ForConditionalGeneration, Tensors, Tensors], folder: Path
) -> None:
    model = trained[0]
    model.set_attn_implementation("eager")
    assert reload(model, folder).config._attn_implementation == "eager"
    model.set_attn_implementation("sdpa")
    assert reload(model, folder).config._attn_implementation == "sdpa"


@pytest.mark.parametrize("error", [OSError("disk full"), Exception("disk full (os error 28)")])  # the second as a tokenizer's
def test_an_older_export_stands_until_the_new_one_is_proven(tmp_path: Path, error: Exception) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "old").touch()

    def fails(unfinished: Path) -> None:
        (unfinished / "new").touch()
        raise error

    with pytest.raises(UserError, match=f"^the export {folder} could not be written: {re.escape(str(error))}$"):
        _replace(folder, fails)
    assert [path.name for path in folder.iterdir()] == ["old"] and [path.name for path in tmp_path.iterdir()] == ["export"]
    _replace(folder, lambda unfinished: (unfinished / "new").touch())
    assert [path.name for path in folder.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


@pytest.mark.parametrize("name", ["export", "merged"])
def test_a_link_or_file_in_the_place_of_an_export_is_refused_before_the_run(tmp_path: Path, name: str) -> None:
    config = SummarizationConfig(
        model=ModelConfig(name_or_path="model"),
        data=DataConfig(source="jsonl"),
        run=RunConfig(),
        export=ExportConfig(merge=name == "merged"),
    )
    (tmp_path / "export").mkdir()
    check_export_places(config, tmp_path)
    place = tmp_path / name
    if place.exists():
        place.rmdir()
    place.symlink_to(tmp_path / "another_disk")
    with pytest.raises(UserError, match=f"{place} is a link, and an export replaces a folder .*: remove it, or give a place"):
        check_export_places(config, tmp_path)
    place.unlink()
    place.touch()
    with pytest.raises(UserError, match=f"{place} is a file"):
        check_export_places(config, tmp_path)
