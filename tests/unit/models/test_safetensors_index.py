"""Parts of tensors out of safetensors files, and which tensor of a file is which of a model's."""

import copy
import dataclasses
import os
from functools import partial
from unittest.mock import patch

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import nn

from tests.families.kinds import tiny_config
from tests.support.adapter_models import LLAMA_SIZES
from tests.support.refusals import refusal
from tests.support.tiny_models import build_causal
from toolkit.models import tensor_reader
from toolkit.models.freeze import aliases, hash_tensor
from toolkit.models.safetensors_index import (
    DTYPES,
    ShardedReadUnsupported,
    check_loaded,
    find_weight_files,
    match_names,
    open_files,
    untie_differing,
)
from toolkit.models.tensor_reader import TensorReader, fill_parameters, pieces, state_readers
from toolkit.models.weights import hash_frozen
from toolkit.objectives.causal import Causal
from toolkit.objectives.seq2seq import Seq2Seq


def test_any_part_of_any_tensor_is_read(tmp_path):
    kept = [dtype for dtype in DTYPES.values() if dtype not in (torch.bool, torch.float8_e4m3fn, torch.float8_e8m0fnu)]
    tensors = {f"{dtype}": (torch.arange(120).view(6, 5, 4) - 7).to(dtype) for dtype in kept}
    tensors |= {"bools": torch.tensor([True, False, True]), "scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "some.safetensors")
    files = open_files([tmp_path / "some.safetensors"], "a test")
    assert files.keys() == tensors.keys()
    rest, box = (slice(0, 5), slice(0, 4)), (slice(1, 5), slice(2, 4), slice(3, 4))
    for dtype in kept:
        source = files[f"{dtype}"].to(dtype)
        assert source.shape == (6, 5, 4)
        for part in ((slice(0, 6), *rest), (slice(2, 3), *rest), box):
            assert torch.equal(source.read(part), tensors[f"{dtype}"][part])
    assert files["bools"].to(torch.bool).read((slice(1, 3),)).tolist() == [False, True]
    assert files["scalar"].to(torch.float64).read(()).item() == 3.5
    assert files["empty"].to(torch.float32).read((slice(0, 0), slice(0, 4))).shape == (0, 4)
    with patch("mmap.MADV_HUGEPAGE", 9999):  # a system without huge pages refuses the advice
        halves = files["torch.float32"].to(torch.bfloat16).read(box)
    assert torch.equal(halves, tensors["torch.float32"][box].bfloat16())


def test_files_that_cannot_be_read_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xff" * 64)
    sentence = refusal(open_files, [path], "the model")
    assert "model.safetensors of the model cannot be read as safetensors (" in sentence and "): save the model again" in sentence
    save_file({"weight": torch.ones(100)}, path)
    source = open_files([path], "the model")["weight"].to(torch.float32)
    os.truncate(path, path.stat().st_size - 8)
    assert source.read((slice(0, 98),)).sum() == 98
    sentence = "model.safetensors changed or went away while it was read (it has become shorter)"
    assert sentence in refusal(source.read, (slice(0, 100),))


def test_one_file_is_taken_before_an_index(tmp_path):
    with pytest.raises(ShardedReadUnsupported, match=r"has no model.safetensors or model.safetensors.index.json"):
        find_weight_files(str(tmp_path), None)
    model = build_causal("gpt2")
    model.save_pretrained(tmp_path, max_shard_size="5kB")
    parts = find_weight_files(str(tmp_path), None)
    assert len(parts) > 2 and all(path.parent == tmp_path for path in parts)
    assert open_files(parts, "it").keys() == model.state_dict().keys() - {"lm_head.weight"}
    save_file({"weight": torch.ones(1)}, tmp_path / "model.safetensors")
    assert [path.name for path in find_weight_files(str(tmp_path), None)] == ["model.safetensors"]
    assert len(find_weight_files(str(tmp_path), None, "model.safetensors.index.json")) == len(parts)


def test_names_are_matched_as_transformers_does(tmp_path):
    model = build_causal("gpt2")
    tensors = {name.removeprefix("transformer."): p.detach() for name, p in model.named_parameters()}
    tensors["more"] = tensors.pop("wpe.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    match = match_names(model, open_files([tmp_path / "model.safetensors"], "it"))
    assert match.tensors["transformer.wte.weight"] == "wte.weight"
    assert match.tensors["transformer.h.1.mlp.c_fc.bias"] == "h.1.mlp.c_fc.bias"
    assert (match.missing, match.unknown, match.other_shapes) == (["transformer.wpe.weight"], ["more"], {})


def test_layers_that_transformers_leaves_out_are_named_and_remains_of_old_files_are_not(tmp_path, caplog):
    """Layers that predict further tokens; T5's bias that no layer reads and GPT-2's masks are in every such file."""
    nothing = torch.zeros
    cases = {
        "qwen3_next": {"mtp.layers.0.fc.weight": nothing(32, 64), "mtp.norm.weight": nothing(32)},
        "t5": {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": nothing(4, 2)},
        "gpt2": {"transformer.h.0.attn.bias": nothing(1, 1, 128, 128)},
    }
    for kind, more in cases.items():
        objective = Seq2Seq() if kind == "t5" else Causal()
        model = objective.loader(config := tiny_config(kind)).from_config(config)
        model.save_pretrained(tmp_path / kind)
        save_file(load_file(path := tmp_path / kind / "model.safetensors") | more, path)
        match = match_names(model, open_files([path], "it"))
        check_loaded(objective, model, kind, match)
        assert (match.missing, match.unknown) == ([], []), kind
    (line,) = caplog.messages
    what = "the weights of model.name_or_path qwen3_next also have 2 tensors that the model does not take, so neither trained nor"
    assert line == f"{what} exported: mtp.layers.0.fc.weight, mtp.norm.weight"


def test_tensors_that_are_put_together_are_not_guessed(tmp_path):
    model = hf.HrmTextForCausalLM(hf.HrmTextConfig(**LLAMA_SIZES))
    model.save_pretrained(tmp_path)
    with pytest.raises(ShardedReadUnsupported, match="transformers makes .* out of tensors of another form"):
        match_names(model, open_files(find_weight_files(str(tmp_path), None), "it"))


def test_experts_are_read_in_any_part_as_transformers_merges_them(tmp_path):
    """Expert 10 comes after 9."""
    model = hf.MixtralForCausalLM(hf.MixtralConfig(**LLAMA_SIZES, num_local_experts=11))
    model.save_pretrained(tmp_path, max_shard_size="40kB")
    files = open_files(find_weight_files(str(tmp_path), None), "it")
    stored, match = dict(files), match_names(model, files)
    assert (match.missing, match.other_shapes, match.unknown) == ([], {}, [])
    for name, weight in model.state_dict().items():
        source = files[match.tensors[name]].to(torch.float32)
        assert torch.equal(source.read(tuple(slice(0, size) for size in weight.shape)), weight), name
        if weight.ndim == 3:
            middle = weight.shape[1] // 2
            for rows in ((3, 9), (middle - 2, middle + 3), (middle, middle + 1)):
                box = (slice(1, 2), slice(*rows), slice(2, 7))
                assert torch.equal(source.read(box), weight[box])
    del stored[next(name for name in stored if name.endswith("experts.1.w3.weight"))]
    assert match_names(model, stored).missing == ["model.layers.0.mlp.experts.gate_up_proj"]


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (100, 3), (2, 1000), (5, 4, 3), (2, 9, 5)])
def test_pieces_make_up_a_tensor(shape):
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    with patch.object(tensor_reader, "PIECE_BYTES", 64):
        boxes = list(pieces(shape))
    rows = [values[box] for box in boxes]
    assert torch.equal(torch.cat([row.reshape(-1) for row in rows]) if rows else values.reshape(-1), values.reshape(-1))
    assert all(row.numel() <= 16 or row.numel() == row.shape[-1] for row in rows)


@pytest.mark.parametrize("stored_as", ["shared", "encoder.embed_tokens", "decoder.embed_tokens"])
def test_a_head_of_its_own_is_untied_under_whichever_name_the_embedding_is_stored(tmp_path, stored_as):
    config = hf.T5Config(vocab_size=32, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=2)
    hf.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding, head = tensors.pop("shared.weight"), torch.randn(32, 16)
    stored = {**tensors, f"{stored_as}.weight": embedding, "lm_head.weight": head}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected, model = hf.T5ForConditionalGeneration.from_pretrained(tmp_path), hf.T5ForConditionalGeneration(config)
    files = open_files([tmp_path / "model.safetensors"], "the model")
    untie_differing(model, files, match_names(model, files))
    assert sorted(aliases(model).values()) == sorted(aliases(expected).values())
    assert ["lm_head.weight"] in aliases(model).values()


def test_what_is_read_once_is_hashed_as_it_is_read_and_as_it_is_held(monkeypatch):
    """From files in fp32, by pieces: the hash is that of the loaded parameter, in bf16."""
    monkeypatch.setattr(tensor_reader, "PIECE_BYTES", 1024)
    model = nn.Sequential(nn.Linear(300, 20), nn.Linear(20, 3))
    model[0].requires_grad_(False)
    in_fp32, num_read = copy.deepcopy(model), list[int]()
    empty = copy.deepcopy(model.bfloat16())
    for parameter in empty.parameters():
        parameter.data.zero_()

    def read(reader: TensorReader, box) -> torch.Tensor:
        num_read.append(reader.read(box).numel())
        return reader.read(box)

    plain = state_readers(in_fp32.state_dict())
    readers = {name: dataclasses.replace(reader, read=partial(read, reader)) for name, reader in plain.items()}
    hashes = hash_frozen(empty, readers, while_read=True)
    with pytest.raises(AssertionError, match="not all has been read"):
        hashes()
    fill_parameters(empty, readers)
    expected = {f"0.{name}": hash_tensor(parameter, torch.bfloat16) for name, parameter in model[0].named_parameters()}
    assert hashes() == hash_frozen(model, plain)() == expected
    assert len(num_read) > 20 and sum(num_read) == sum(parameter.numel() for parameter in model.parameters())
    assert all(torch.equal(one, other) for one, other in zip(empty.parameters(), model.parameters(), strict=True))
