"""An export is held against the trained weights before it counts."""

import copy
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import T5Config, T5ForConditionalGeneration

from tests.support.adapter_models import compare_logits
from tests.support.refusals import refusal
from tests.support.tiny_models import one_process
from toolkit.config.python import load_config
from toolkit.data.collate import SummarizationCollator
from toolkit.errors import UserError
from toolkit.evaluation.rows import EvaluationRows
from toolkit.export import compare
from toolkit.export.compare import check_logits, choose_device, reload
from toolkit.export.paths import check_export_places, replaced, write_on_rank_0
from toolkit.export.write import _trained_logits
from toolkit.objectives.seq2seq import Seq2Seq
from toolkit.parallel.wrap import shard_model

Trained = tuple[T5ForConditionalGeneration, dict[str, torch.Tensor]]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained() -> Trained:
    """A model, and inputs with the logits for them."""
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=2)).eval()
    tokens_BT = torch.arange(8).view(2, 4)
    inputs = {"input_ids": tokens_BT, "attention_mask": torch.ones_like(tokens_BT), "decoder_input_ids": tokens_BT}
    with torch.no_grad():
        logits_BTV = model(**inputs, use_cache=False).logits
    return model, {**inputs, "logits": logits_BTV}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, trained: Trained) -> Path:
    folder = tmp_path_factory.mktemp("export")
    trained[0].save_pretrained(folder)
    return folder


def test_other_logits_are_an_error_in_fp32_and_a_remark_in_bf16(trained, folder, capsys):
    model, check = trained
    model.set_attn_implementation("eager")
    reloaded = reload(model, folder, CPU)
    compare_logits(check, reloaded, folder, torch.float32)
    assert reloaded.config._attn_implementation == model.config._attn_implementation == "eager"
    assert "differ" not in capsys.readouterr().err
    other = {**check, "logits": check["logits"] * 1.2}
    with pytest.raises(RuntimeError, match=r"differ by 1.67e-01 of the largest, more than 0.0001: the folder stands, but"):
        compare_logits(other, reloaded, folder, torch.float32)
    compare_logits(other, reloaded, folder, torch.bfloat16, "that is why")
    assert "differ by 1.67e-01 of the largest, more than 0.05; that is why" in capsys.readouterr().err


def test_logits_are_bounded_in_bytes_and_seconds(trained, folder, monkeypatch, capsys):
    """A model of 70 billion parameters on a host with 600 GiB free, and 20 GiB on its GPU; then 7 and 1 billion."""
    free = {"cpu": 600 * 2**30, "cuda": 20 * 2**30}
    monkeypatch.setattr(compare, "free_memory_bytes", lambda device: free[device.type])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    gpu = torch.device("cuda", 0)
    chosen, why = choose_device(gpu, 70 * 10**9, 96)
    assert chosen is None
    # 280e9 bytes at 5e8 a second are 560 s; 2 * 70e9 * 96 operations take 1.3 s on the GPU and 84 s on 8 threads.
    assert why == (
        "in fp32 the model takes 260.8 GiB; on cuda:0 20.0 GiB are free, and it would take 561 s; on cpu 600.0 GiB are free, and "
        "it would take 644 s; the limits are 50% and 120 s"
    )
    assert choose_device(gpu, 7 * 10**9, 96)[0] == CPU  # 28 GB do not fit beside the shards; 56 s and 8 s
    assert choose_device(gpu, 10**9, 96)[0] == gpu
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")  # the other ranks of the node wait: rank 0 may take their share of its memory
    free["cpu"] //= 8
    assert choose_device(gpu, 7 * 10**9, 96)[0] == CPU
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    # It is printed, and nothing is loaded.
    model, check = trained
    free["cpu"] = 1000
    check_logits(folder, model, lambda device: pytest.fail("loaded"), check, CPU, torch.float32, "")
    assert f"{folder} stands; its logits are not compared: in fp32" in capsys.readouterr().out


def test_a_device_without_room_after_all_leaves_the_logits_out_and_a_base_that_has_gone_is_one_sentence(trained, folder, capsys):
    """The folder stands, and the other ranks wait for this one: the run must not end by it."""

    def load(device: torch.device) -> torch.nn.Module:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")

    model, check = trained
    check_logits(folder, model, load, check, CPU, torch.float32, "")
    assert capsys.readouterr().out.endswith("its logits are not compared: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    with pytest.raises(UserError, match=f"{folder} stands, but its logits cannot be compared: "):
        check_logits(folder, model, lambda device: reload(model, folder / "gone", device), check, CPU, torch.float32, "")


def test_a_run_without_evaluation_rows_and_rows_that_are_long(trained):
    """Tokens of the check are in the vocabulary, also where the padding is its last one, and few."""
    sharded = shard_model(one_process(), copy.deepcopy(trained[0]))
    collator = SummarizationCollator(pad_token_id=63, decoder_start_token_id=0)
    for rows, shape in (([], (1, 4)), ([{"input_ids": [2] * 50, "labels": [3] * 50}] * 5, (4, 12))):
        check = _trained_logits(sharded, EvaluationRows(Dataset.from_list(rows), None, collator, Seq2Seq()))
        assert check["input_ids"].shape == check["decoder_input_ids"].shape == shape and check["logits"].isfinite().all()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), Exception("disk full (os error 28)")])  # a tokenizer's
def test_an_older_export_stands_until_the_new_one_is_proven(tmp_path, error):
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "old").touch()

    def fails() -> None:
        (tmp_path / "export.tmp" / "new").touch()
        raise error

    with pytest.raises(UserError, match=rf"^the export {folder} could not be written \(No space left on device\): fix that"):
        with replaced(folder):
            write_on_rank_0(folder, fails)
    assert [path.name for path in folder.iterdir()] == ["old"] and [path.name for path in tmp_path.iterdir()] == ["export"]
    with replaced(folder) as unfinished:
        (unfinished / "new").touch()
    assert [path.name for path in folder.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


@pytest.mark.parametrize("name", ["export", "merged"])
def test_a_link_or_file_in_the_place_of_an_export_is_refused_before_the_run(tmp_path, name):
    given = {"model.name_or_path": "model", "data.source": "x", "train.max_steps": 1, "adapter.method": "lora"}
    config = load_config("t5", overrides=given | {"export.merge": name == "merged"})
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
    assert f"{place} is a file" in refusal(check_export_places, config, tmp_path)
