"""Source and target language of the tokenizers of translation models, and how generation begins with them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from datasets import Dataset
from transformers import AutoTokenizer

from tests.support.model_folders import FAMILIES, WORDS, _build_tokenizer
from tests.support.refusals import refusal
from tests.support.translation_tokenizers import LANGUAGES, save_translation_tokenizer
from toolkit.config.data import DataConfig
from toolkit.data.collate import SummarizationCollator
from toolkit.data.tokens.tokenizer import hash_tokenizer
from toolkit.objectives.seq2seq import Seq2Seq, set_languages


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A folder with a tokenizer, by family; none has a target language."""
    parent = tmp_path_factory.mktemp("tokenizers")
    for family in LANGUAGES:
        save_translation_tokenizer(family, WORDS, parent / family)
    return {family: parent / family for family in LANGUAGES}


def load(folder: Path):
    return AutoTokenizer.from_pretrained(folder)


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
