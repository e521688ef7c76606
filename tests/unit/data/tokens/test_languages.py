"""Tokenizers: source and target language of those of translation models, and how generation begins with them; trained ones,
and a model's own, which is read as it is."""

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import sentencepiece
import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

from tests.support.model_folders import FAMILIES, LANGUAGES, _build_tokenizer, save_tokenizer
from tests.support.refusals import refusal
from tests.support.tokenizer_kinds import LLAMA_3, build_byte_level
from toolkit.config.data import DataConfig
from toolkit.config.schema import ModelConfig
from toolkit.data.collate import SummarizationCollator
from toolkit.data.tokens.tokenizer import (
    hash_tokenizer,
    load_tokenizer,
    open_tokenizer,
    read_tokenizer,
    train_byte_level_tokenizer,
    trains_tokenizer,
)
from toolkit.objectives.seq2seq import Seq2Seq, set_languages


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A folder with a tokenizer, by family; none has a target language."""
    parent = tmp_path_factory.mktemp("tokenizers")
    for family in LANGUAGES:
        save_tokenizer(family, parent / family)
    return {family: parent / family for family in LANGUAGES}


load = AutoTokenizer.from_pretrained


def load_with_languages(folders: dict[str, Path], family: str):
    tokenizer = load(folders[family])
    set_languages(tokenizer, "tiny", *LANGUAGES[family])
    return tokenizer


@pytest.mark.parametrize(
    ("family", "source", "target"),
    [
        ("m2m_100", ["__en__", "▁beta", "</s>"], ["__fr__", "▁beta", "</s>"]),
        ("nllb", ["eng_Latn", "▁beta", "</s>"], ["fra_Latn", "▁beta", "</s>"]),
        ("mbart", ["▁beta", "</s>", "en_XX"], ["▁beta", "</s>", "fr_XX"]),
        ("plbart", ["▁beta", "</s>", "__python__"], ["▁beta", "</s>", "__en_XX__"]),
    ],
)
def test_texts_are_marked_as_the_tokenizer_does_and_stay_so_when_it_is_saved(folders, tmp_path, family, source, target):
    tokenizer = load_with_languages(folders, family)
    tokenizer.save_pretrained(tmp_path)
    saved = load(tmp_path)
    rows = {"row_id": [0], "prompt": ["beta"], "completion": ["beta"], "lead_text": [""]}
    for one in (tokenizer, saved):
        columns = Seq2Seq().tokenize(rows, one, DataConfig(source="jsonl"), [])
        assert one.convert_ids_to_tokens(columns["input_ids"][0]) == source
        assert one.convert_ids_to_tokens(columns["labels"][0]) == target
    assert hash_tokenizer(saved) == hash_tokenizer(tokenizer)
    set_languages(saved, "tiny", None, None)  # the saved ones are kept
    texts = SimpleNamespace(train=Dataset.from_dict({"prompt": ["beta"], "completion": ["beta\nbeta"]}))
    said = Seq2Seq().describe(saved, texts)
    assert said[0].startswith("sources are marked as ") and any("loses line breaks" in line for line in said)


@pytest.mark.parametrize("family", LANGUAGES)
def test_a_language_that_is_missing_or_unknown_is_refused(folders, family):
    source, _ = LANGUAGES[family]
    asked = "marks each text with its language: set data.target_language to one of "
    assert asked in refusal(set_languages, load(folders[family]), "tiny", source, None)
    for wrong in ("klingon", "beta", "</s>", "<pad>", ""):  # the second is a token of the texts
        assert refusal(set_languages, load(folders[family]), "tiny", source, wrong).startswith(
            f"data.target_language '{wrong}' is not a language of the tokenizer of tiny: it has "
        )
    tokenizer = _build_tokenizer(("<pad>", "</s>"))
    set_languages(tokenizer, "tiny", None, None)
    no_marks = "data.target_language is fr, but the tokenizer of tiny does not mark languages"
    assert refusal(set_languages, tokenizer, "tiny", None, "fr").startswith(no_marks)


@pytest.mark.parametrize(
    ("family", "start", "forced"),
    [("m2m_100", "</s>", "__fr__"), ("nllb", "</s>", "fra_Latn"), ("mbart", "fr_XX", None), ("plbart", "__en_XX__", None)],
)
def test_generation_begins_as_the_decoder_inputs_of_training(folders, family, start, forced, capsys):
    tokenizer = load_with_languages(folders, family)
    config_class, settings = FAMILIES[family]
    with torch.device("meta"):
        config = getattr(transformers, config_class)(vocab_size=256, **settings)
        model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    model.generation_config.forced_bos_token_id = 77  # of a model that was trained for another language
    own_shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    Seq2Seq().start_generation(model, tokenizer, SummarizationCollator(1, 2, own_shift))
    begins = [model.generation_config.decoder_start_token_id, model.generation_config.forced_bos_token_id]
    assert [token if token is None else tokenizer.convert_ids_to_tokens(token) for token in begins] == [start, forced]
    assert "forced_bos_token_id of the generation config is set to" in capsys.readouterr().out


TEXTS = [f'def take_oar_{i}(self):\n    """Return the oar."""\n    return self.oars[{i}]\n' for i in range(50)]


def write_tokenizer(folder: Path, **special_tokens: str) -> ModelConfig:
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "oar": 2}, unk_token="oar"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special_tokens).save_pretrained(folder)
    return ModelConfig(name_or_path=str(folder))


def test_byte_level_tokenizer_writes_every_text_and_is_the_same_each_time(tmp_path):
    tokenizer, again = (train_byte_level_tokenizer(iter(TEXTS), vocab_size=300) for _ in range(2))
    assert len(tokenizer) == 300
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, 1)
    for text in (TEXTS[3], "  Ruder – 櫂 🚣\r\n\t\x00", ""):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
        assert not {0, 1} & set(ids)
    assert tokenizer("<|endoftext|>")["input_ids"] == [1]
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(ModelConfig(name_or_path=str(tmp_path)), vocab_size=300)
    assert hash_tokenizer(tokenizer) == hash_tokenizer(again) == hash_tokenizer(loaded)
    assert hash_tokenizer(tokenizer) != hash_tokenizer(train_byte_level_tokenizer(TEXTS, vocab_size=299))


def test_new_tokens_are_special_those_that_are_there_stay_and_without_a_padding_token_the_end_token_pads(tmp_path):
    config = replace(write_tokenizer(tmp_path, eos_token="</s>"), add_tokens=["<|im_start|>", "</s>", "<|im_end|>"])
    tokenizer = load_tokenizer(config)
    assert tokenizer.convert_tokens_to_ids(config.add_tokens) == [3, 1, 4]
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1
    ids = tokenizer("<|im_start|>oar<|im_end|>")["input_ids"]
    assert ids == [3, 2, 4] and tokenizer.decode(ids, skip_special_tokens=True) == "oar"
    tokenizer.save_pretrained(tmp_path / "saved")
    again = load_tokenizer(ModelConfig(name_or_path=str(tmp_path / "saved"), add_tokens=config.add_tokens), vocab_size=5)
    assert hash_tokenizer(again) == hash_tokenizer(tokenizer)


@pytest.mark.parametrize(
    ("end", "added", "vocab_size", "sentence"),
    [
        (None, [], 3, "the tokenizer of {} has neither a padding nor an end token: set pad_token or eos_token in its "),
        ("</s>", [], 2, "the tokenizer of {} has 3 tokens, but the model only 2 embeddings: take the tokenizer that belongs to "),
        ("</s>", ["<|a|>", " "], None, "model.add_tokens[1] is ' ', which is empty: give a text, as <|im_start|>"),
        ("</s>", ["<|a|>", "<|a|>"], None, "model.add_tokens[1] is '<|a|>', for the second time: name each token once"),
        ("</s>", ["oar"], None, "model.add_tokens[0] is 'oar', an ordinary token of the tokenizer, which it would cut out of w"),
    ],
)
def test_tokenizers_and_tokens_that_do_not_fit_are_refused(tmp_path, end, added, vocab_size, sentence):
    config = replace(write_tokenizer(tmp_path, **{"eos_token": end} if end else {}), add_tokens=added)
    assert refusal(load_tokenizer, config, vocab_size=vocab_size).startswith(sentence.format(tmp_path))


def test_targets_with_a_vocabulary_of_their_own_are_refused(tmp_path, monkeypatch):
    """As of FSMT's tokenizer, whose package is not here."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(write_tokenizer(tmp_path, pad_token="<pad>").name_or_path)
    tokenizer.get_src_vocab = tokenizer.get_vocab
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *args, **options: tokenizer)
    of_tiny = ModelConfig(name_or_path="tiny")
    assert load_tokenizer(of_tiny, vocab_size=3) is tokenizer
    tokenizer.convert_ids_to_tokens = ["<pad>", "</s>", "rame"].__getitem__
    assert "tiny decodes targets with a vocabulary of their own" in refusal(load_tokenizer, of_tiny, vocab_size=3)


BOTH = "normalizer, pre_tokenizer"
NUMBERS = "In 2023 the 1234567 rows"
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "</s>"}


def write_config(folder: Path, kind: str, **settings) -> Path:
    transformers.AutoConfig.for_model(kind, **settings).save_pretrained(folder)
    return folder


def write_split(folder: Path, kind: str, split: str | None, **settings) -> Path:
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
        ("bert", {"vocab.txt": ""}, "BertTokenizer finds no vocabulary"),
        ("llama", {"tokenizer.json": "{"}, "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("llama", {"tokenizer.json": "{}"}, "'added_tokens'"),
        ("llama", {"tokenizer.json": Tokenizer(models.BPE()).to_str()}, "TokenizersBackend finds no vocabulary"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path, kind, files, reason):
    write_config(tmp_path, kind)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert refusal(read_tokenizer, ModelConfig(name_or_path=str(tmp_path))) == (
        f"the tokenizer of {tmp_path} could not be read ({reason}); its files are {', '.join(sorted(['config.json', *files]))}: "
        "put the tokenizer that belongs to the weights there, or name a folder or hub id that has it in model.tokenizer"
    )


def test_one_that_needs_no_file_or_another_file_is_read(tmp_path):
    byt5 = write_config(tmp_path / "byt5", "t5", tokenizer_class="ByT5Tokenizer")
    assert open_tokenizer(byt5)("é")["input_ids"] == [198, 172, 1]
    content, llama = io.BytesIO(), write_config(tmp_path / "llama", "llama")
    lines, how = iter(["wrap the text"] * 20), {"vocab_size": 14, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=content, **how)
    (llama / "tokenizer.model").write_bytes(content.getvalue())
    assert "x" in open_tokenizer(llama).get_vocab()


def test_a_tokenizer_is_trained_from_scratch_alone_and_may_be_that_of_another_folder(tmp_path):
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
        ("qwen2", LLAMA_3, {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ a }}"}, BOTH),
        ("gpt2", LLAMA_3, {"tokenizer_class": "GPT2Tokenizer", "model_max_length": 9}, "pre_tokenizer"),
        ("gpt2", None, {"tokenizer_class": "GPT2Tokenizer"}, ""),
        ("gpt2", None, {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, ""),
    ],
)
def test_parts_of_a_file_are_its_own(tmp_path, caplog, kind, split, settings, replaced):
    """The last two are as their class has them, the last because its owner says so."""
    folder = write_split(tmp_path / "model", kind, split, **settings)
    with caplog.at_level("INFO", "toolkit"):
        own = open_tokenizer(folder)
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    line = f"transformers 5 would replace {replaced} of the tokenizer.json of {folder} by those of {type(auto).__name__}: "
    assert caplog.messages == ([f"{line}the file's own are used, and exported"] if replaced else [])
    text = f"a{NUMBERS}"
    assert own(text)["input_ids"] == (tokens_of_file(folder, text) if replaced else auto(text)["input_ids"])
    assert (type(own) is type(auto)) is not replaced or (own(NUMBERS)["input_ids"] != auto(NUMBERS)["input_ids"])
    for name in ("special_tokens_map", "chat_template", "model_max_length", "model_input_names", "padding_side"):
        assert getattr(own, name) == getattr(auto, name), name
    own.save_pretrained(tmp_path / "saved")
    assert hash_tokenizer(open_tokenizer(tmp_path / "saved")) == hash_tokenizer(own)
