"""A model's own tokenizer: none is made up, and a `tokenizer.json` is read as it is."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from tests.support.refusals import refusal
from tests.support.tokenizer_kinds import LLAMA_3, build_byte_level
from toolkit.config.schema import ModelConfig
from toolkit.data.tokens.read_tokenizer import open_tokenizer, read_tokenizer, trains_tokenizer
from toolkit.data.tokens.tokenizer import hash_tokenizer
from toolkit.export.run_data import check_kept_tokenizer

NUMBERS = "In 2023 the 1234567 rows"
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "</s>"}


def write_config(folder: Path, kind: str, **settings: Any) -> Path:
    import transformers

    transformers.AutoConfig.for_model(kind, **settings).save_pretrained(folder)
    return folder


def write_split(folder: Path, kind: str, split: str | None, **settings: Any) -> Path:
    """A byte-level tokenizer as a `tokenizer.json` from elsewhere, whose config names these settings."""
    write_config(folder, kind)
    build_byte_level(split=split).backend_tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(SPECIAL_TOKENS | settings))
    return folder


def tokens_of_file(folder: Path, text: str = NUMBERS) -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    return ids


@pytest.mark.parametrize(
    ("kind", "files", "reason"),
    [
        ("t5", {}, "T5Tokenizer finds no vocabulary"),
        ("gpt2", {"tokenizer_config.json": '{"bos_token": "<b>"}'}, "GPT2Tokenizer finds no vocabulary"),
        ("gemma", {"spiece.model": "x"}, "GemmaTokenizer finds no vocabulary"),
        ("bert", {"vocab.txt": ""}, "BertTokenizer finds no vocabulary"),
        ("llama", {"tokenizer.json": "{"}, "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("llama", {"tokenizer.json": "{}"}, "'added_tokens'"),
        ("llama", {"tokenizer.json": Tokenizer(models.BPE()).to_str()}, "TokenizersBackend finds no vocabulary"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path: Path, kind: str, files: dict[str, str], reason: str) -> None:
    write_config(tmp_path, kind)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert refusal(read_tokenizer, ModelConfig(name_or_path=str(tmp_path))) == (
        f"the tokenizer of {tmp_path} could not be read ({reason}); its files are {', '.join(sorted(['config.json', *files]))}: "
        "put the tokenizer that belongs to the weights there, or name a folder or hub id that has it in model.tokenizer"
    )


def test_one_that_needs_no_file_or_another_file_is_read(tmp_path: Path) -> None:
    import sentencepiece

    byt5 = write_config(tmp_path / "byt5", "t5", tokenizer_class="ByT5Tokenizer")
    assert open_tokenizer(byt5)("é")["input_ids"] == [198, 172, 1]
    content, llama = io.BytesIO(), write_config(tmp_path / "llama", "llama")
    lines, how = iter(["wrap the text"] * 20), {"vocab_size": 14, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=content, **how)
    (llama / "tokenizer.model").write_bytes(content.getvalue())
    assert "x" in open_tokenizer(llama).get_vocab()


def test_a_tokenizer_is_trained_from_scratch_alone_and_may_be_that_of_another_folder(tmp_path: Path) -> None:
    bare = ModelConfig(name_or_path=str(write_config(tmp_path / "bare", "t5")))
    other = str(write_split(tmp_path / "runs" / "first" / "tokenizer", "qwen2", LLAMA_3))
    start = replace(bare, from_scratch=True, init_from=str(tmp_path / "runs" / "first"))
    chosen = [replace(bare, tokenizer=other), replace(bare, tokenizer=other, from_scratch=True), start]
    assert [trains_tokenizer(config) for config in (bare, *chosen)] == [False] * 4
    assert trains_tokenizer(replace(bare, from_scratch=True)) and trains_tokenizer(replace(bare, train_tokenizer=True))
    checkpoint = tmp_path / "runs" / "first" / "checkpoints" / "step-00000003"
    checkpoint.mkdir(parents=True)
    for config in (*chosen, replace(start, init_from=str(checkpoint))):
        assert read_tokenizer(config)(NUMBERS)["input_ids"] == tokens_of_file(Path(other))


@pytest.mark.parametrize(
    ("kind", "split", "settings", "replaced"),
    [
        (
            "qwen2",
            LLAMA_3,
            {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ a }}"},
            "normalizer, pre_tokenizer",
        ),
        ("gpt2", LLAMA_3, {"tokenizer_class": "GPT2Tokenizer", "model_max_length": 9}, "pre_tokenizer"),
        ("gpt2", None, {"tokenizer_class": "GPT2Tokenizer"}, ""),
        ("gpt2", None, {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, ""),
    ],
)
def test_parts_of_a_file_are_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, split: str | None, settings: dict[str, Any], replaced: str
) -> None:
    """The last two are as their class has them, the last because its owner says so."""
    import transformers

    folder = write_split(tmp_path / "model", kind, split, **settings)
    with caplog.at_level("INFO", "toolkit"):
        own = open_tokenizer(folder)
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    line = f"transformers 5 would replace {replaced} of the tokenizer.json of {folder} by those of {type(auto).__name__}: "
    assert caplog.messages == ([f"{line}the file's own are used, and exported"] if replaced else [])
    assert own("a" + NUMBERS)["input_ids"] == (
        tokens_of_file(folder, "a" + NUMBERS) if replaced else auto("a" + NUMBERS)["input_ids"]
    )
    assert (type(own) is type(auto)) is not replaced or (own(NUMBERS)["input_ids"] != auto(NUMBERS)["input_ids"])
    for name in ("special_tokens_map", "chat_template", "model_max_length", "model_input_names", "padding_side"):
        assert getattr(own, name) == getattr(auto, name), name
    own.save_pretrained(tmp_path / "saved")
    assert hash_tokenizer(open_tokenizer(tmp_path / "saved")) == hash_tokenizer(own)


def test_a_run_that_began_with_the_parts_of_a_class_is_told_how_to_go_on(tmp_path: Path) -> None:
    import transformers

    folder, kept = write_split(tmp_path / "model", "qwen2", LLAMA_3), tmp_path / "run" / "tokenizer"
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(kept)
    assert refusal(check_kept_tokenizer, tmp_path / "run", open_tokenizer(folder)) == (
        f"this run began with the tokenizer in {kept}, and the model's is now read with another normalizer, pre_tokenizer: "
        f"set model.tokenizer {kept} to go on with that one, or take another run.name"
    )
    check_kept_tokenizer(tmp_path / "run", open_tokenizer(kept))
    check_kept_tokenizer(tmp_path / "removed", open_tokenizer(folder))
