"""Quantized weights in files: slices of them are bit for bit what the libraries make of them; other formats are named."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.families.kinds import kind_on_meta, tiny_config
from tests.support.quantized.models import quantize_fp8, save_fp8_model
from tests.support.refusals import refusal
from toolkit.config.schema import ModelConfig
from toolkit.models.config import load_model_config
from toolkit.models.load import load_model
from toolkit.models.safetensors_index import ShardedReadUnsupported, match_names, open_files
from toolkit.models.tensor_reader import TensorReader
from toolkit.objectives.causal import Causal

QUANTIZED = Path(__file__).parents[2] / "support" / "quantized"


def read_by_rows(reader: TensorReader, rows: int) -> torch.Tensor:
    """All of a reader, so many rows at a time."""
    rest = [slice(0, size) for size in reader.shape[1:]]
    begins = range(0, reader.shape[0], rows)
    return torch.cat([reader.read((slice(begin, min(begin + rows, reader.shape[0])), *rest)) for begin in begins])


def digest(values: torch.Tensor) -> str:
    assert values.dtype == torch.bfloat16
    return hashlib.sha256(values.contiguous().view(torch.int16).numpy().tobytes()).hexdigest()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype == torch.bfloat16 and torch.equal(one.view(torch.int16), other.view(torch.int16))


def load(folder: Path, dtype: torch.dtype = torch.float32):
    """The model as a run loads it, whose configs do not name its codes."""
    config = ModelConfig(name_or_path=str(folder))
    model_config = load_model_config(config, Causal())
    model = load_model(config, model_config, Causal(), 0, dtype)
    assert not any("quantization" in str(settings) for settings in (model_config.to_dict(), model.config.to_dict()))
    return model


@pytest.mark.parametrize("rows", [1, 7, 1000])
@pytest.mark.parametrize("kind", ["bnb_nested", "bnb_plain"])
def test_nf4_by_rows_is_what_bitsandbytes_makes_of_it(kind, rows):
    files = open_files([QUANTIZED / kind / "model.safetensors"], "it")
    hashes = json.loads((QUANTIZED / kind / "hashes_of_values.json").read_text())
    assert files.keys() == hashes.keys()
    for name, expected in hashes.items():
        assert digest(read_by_rows(files[name].to(torch.bfloat16), rows)) == expected, name
    reader = files["model.layers.0.mlp.down_proj.weight"].to(torch.float32)
    assert reader.shape == (72, 232)
    columns = reader.read((slice(3, 9), slice(100, 103)))
    assert torch.equal(columns, read_by_rows(reader, 72)[3:9, 100:103]) and columns.dtype == torch.float32


@pytest.mark.parametrize("scales_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("shape", [(256, 384), (200, 130), (64, 32)])
def test_fp8_by_rows_is_what_transformers_makes_of_it(tmp_path, shape, scales_dtype):
    torch.manual_seed(0)
    codes, scales = quantize_fp8(torch.randn(shape) * torch.arange(1, shape[1] + 1), scales_dtype)
    save_file({"some.weight": codes, "some.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    files = open_files([tmp_path / "model.safetensors"], "it")
    assert files.keys() == {"some.weight"}
    reader = files["some.weight"].to(torch.bfloat16)
    expected = _dequantize_fp8_weight(codes, scales, [128, 128], torch.float32).bfloat16()
    for rows in (5, 128, 1000):
        assert same_bits(read_by_rows(reader, rows), expected)
    assert same_bits(reader.read((slice(40, 50), slice(3, 30))), expected[40:50, 3:30])


@pytest.mark.parametrize("num_experts", [1, 2, 3])
def test_mxfp4_by_experts_is_what_transformers_makes_of_it(tmp_path, num_experts):
    """In the files of a gpt-oss; every code and exponent is met."""
    torch.manual_seed(0)
    model, tensors, expected = kind_on_meta("gpt_oss"), {}, {}
    for name, tensor in model.state_dict().items():
        if tensor.ndim < 3:
            tensors[name] = torch.zeros(tensor.shape)
            continue
        shape = tensor.shape[0], tensor.shape[2], tensor.shape[1] // 32
        blocks, scales = (torch.randint(0, end, of, dtype=torch.uint8) for end, of in ((256, (*shape, 16)), (255, shape)))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales)
    assert len(expected) == 4
    save_file(tensors, tmp_path / "model.safetensors")
    files = open_files([tmp_path / "model.safetensors"], "it")
    match = match_names(model, files)
    assert (match.missing, match.other_shapes, match.unknown) == ([], {}, [])
    for key, values in expected.items():
        reader = files[match.tensors[key]].to(torch.bfloat16)
        assert same_bits(read_by_rows(reader, num_experts).contiguous(), values)
        assert same_bits(reader.read((slice(1, 2), slice(5, 40), slice(0, 9))).contiguous(), values[1:2, 5:40, :9].contiguous())


def test_a_slice_reads_its_own_codes_and_scales(tmp_path):
    """Half the rows take half the bytes; NF4's blocks and fp8's may reach over the edge."""
    codes, scales = quantize_fp8(torch.randn(512, 256), torch.float32)
    save_file({"some.weight": codes, "some.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    nf4 = open_files([QUANTIZED / "bnb_nested" / "model.safetensors"], "it")["model.layers.0.mlp.up_proj.weight"]
    fp8 = open_files([tmp_path / "model.safetensors"], "it")["some.weight"]
    blocks = 232 * 72 // 64 // 2 + 1
    expected = {nf4: 232 * 72 // 4 + blocks + 4 * 256 + 4, fp8: 256 * 256 + 2 * 2 * 4}
    read: list[int] = []
    preadv = os.preadv

    def count(file: int, buffers, place: int) -> int:
        read.append(preadv(file, buffers, place))
        return read[-1]

    for reader, num_bytes in expected.items():
        read.clear()
        with patch("os.preadv", count):
            reader.read((slice(0, reader.shape[0] // 2), slice(0, reader.shape[1])))
        assert sum(read) == num_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_quantized_model_loads_as_a_plain_one(tmp_path, dtype):
    about = transformers.FineGrainedFP8Config(dequantize=True)
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        save_fp8_model(tmp_path / "fp8"), dtype=torch.bfloat16, quantization_config=about
    )
    values = {"fp8": {name: digest(tensor) for name, tensor in plain.state_dict().items()}}
    shutil.copytree(QUANTIZED / "bnb_nested", tmp_path / "nf4")
    values["nf4"] = json.loads((tmp_path / "nf4" / "hashes_of_values.json").read_text())
    values["nf4"]["lm_head.weight"] = values["nf4"]["model.embed_tokens.weight"]
    for kind, expected in values.items():
        model = load(tmp_path / kind, dtype)
        state = model.state_dict()
        assert {tensor.dtype for tensor in state.values()} == {dtype}
        assert {name: digest(tensor.bfloat16()) for name, tensor in state.items()} == expected
        assert all(torch.equal(tensor, tensor.bfloat16().to(dtype)) for tensor in state.values())
        # Its own folder is a plain model's, for anyone.
        model.save_pretrained(tmp_path / "saved")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=dtype)
        assert {name: digest(tensor.bfloat16()) for name, tensor in again.state_dict().items()} == expected


END = "layers.0.mlp.up_proj.weight"


def test_a_nested_config_may_say_that_weights_are_quantized(tmp_path):
    torch.manual_seed(0)
    transformers.AutoModelForImageTextToText.from_config(tiny_config("gemma3")).bfloat16().save_pretrained(tmp_path)
    settings, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    (name,) = (key for key in tensors if key.endswith(END))
    codes, scales = quantize_fp8(tensors[name].float(), torch.float32)
    quantized = tensors | {name: codes, f"{name}_scale_inv": scales}
    save_file(quantized, tmp_path / "model.safetensors", metadata={"format": "pt"})

    def loaded(about: dict) -> dict[str, torch.Tensor]:
        settings["text_config"]["quantization_config"] = about
        (tmp_path / "config.json").write_text(json.dumps(settings))
        return load(tmp_path, torch.bfloat16).state_dict()

    (value,) = (t for key, t in loaded({"quant_method": "fp8", "weight_block_size": [128, 128]}).items() if key.endswith(END))
    assert same_bits(value, _dequantize_fp8_weight(codes, scales, [128, 128], torch.float32).bfloat16())
    assert "is quantized as gptq, and only bitsandbytes nf4, " in refusal(loaded, {"quant_method": "gptq"})


@pytest.mark.parametrize(
    ("kind", "about"),
    [
        *((name, {"quant_method": name}) for name in ("gptq", "awq", "hqq", "compressed-tensors", "torchao")),
        ("bitsandbytes int8", {"quant_method": "bitsandbytes", "load_in_8bit": True, "bnb_4bit_quant_type": "fp4"}),
        ("bitsandbytes fp4", {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}),
        ("fp8 in blocks of None", {"quant_method": "fp8", "weight_block_size": None}),
        ("fp8 in blocks of [1, 32]", {"quant_method": "fp8", "weight_block_size": [1, 32]}),
    ],
)
def test_a_format_that_is_not_read_is_named(tmp_path, kind, about):
    settings = json.loads((QUANTIZED / "bnb_plain" / "config.json").read_text()) | {"quantization_config": about}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert refusal(load_model_config, ModelConfig(name_or_path=str(tmp_path)), Causal()) == (
        f"model.name_or_path {tmp_path} is quantized as {kind}, and only bitsandbytes nf4, mxfp4, fp8 in blocks of [128, 128] "
        "are read: give it in full precision"
    )


def test_codes_whose_scales_are_missing_or_of_other_blocks_are_refused(tmp_path):
    folder = save_fp8_model(tmp_path / "fp8")
    name, tensors = "model.layers.0.mlp.down_proj.weight", load_file(folder / "model.safetensors")
    del tensors[f"{name}_scale_inv"]
    for scales in ({}, {f"{name}_scale_inv": torch.ones(1, 1)}):
        save_file(tensors | scales, folder / "model.safetensors", metadata={"format": "pt"})
        reason = f"{name} is stored as F8_E4M3, without scales of blocks of 128 x 128"
        with pytest.raises(ShardedReadUnsupported, match=f"^{reason}$"):
            open_files([folder / "model.safetensors"], "it")
        assert f"fp8 has no loadable safetensors weights ({reason}): give a folder with them" in refusal(load, folder)


@pytest.mark.parametrize("ending", [".nested_absmax", ".nested_quant_map", ".absmax", ".quant_map"])
def test_a_missing_tensor_of_a_4_bit_weight_is_named(tmp_path, ending):
    """Without their own scales, codes of scales would be read as plain scales."""
    tensors = load_file(QUANTIZED / "bnb_nested" / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    del tensors[name + ending]
    save_file(tensors, tmp_path / "model.safetensors")
    sentence = f"{name} of model a is stored in codes, but not its {name}{ending}: save the model again"
    assert refusal(open_files, [tmp_path / "model.safetensors"], "model a") == sentence
