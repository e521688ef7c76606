"""The rows and models of `make bench`: docstrings, as text for a side that tokenizes and as ids for one that does not."""

from pathlib import Path
from typing import Any

MIN_BODY_CHARACTERS = 120  # as the held-out rows; one-line docstrings would not be a summarization
VOCAB_SIZE, MAX_SOURCE_TOKENS, MAX_TARGET_TOKENS = 4096, 512, 64
MAX_LENGTH_TOKENS = 512
"""Of a document of the causal model."""
T5_SHAPE = {"d_model": 256, "d_ff": 1024, "num_heads": 4, "d_kv": 64, "num_layers": 4, "num_decoder_layers": 4}
LLAMA_SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


def write_t5_data(folder: Path, num_train_rows: int, num_eval_rows: int) -> None:
    """Write `train` and `eval`, as `.jsonl` with `source` and `target`, and as `_tokens` with ids; and `model`, no weights."""
    from datasets import Dataset
    from transformers import T5Config

    from toolkit.data.tokens.tokenizer import train_tokenizer
    from toolkit.files.json_lines import save_json_lines

    splits = load_docstrings(folder, num_train_rows, num_eval_rows)
    tokenizer = train_tokenizer(
        Dataset.from_list(splits["train"]).rename_columns({"source": "prompt", "target": "completion"}), VOCAB_SIZE
    )
    for split, texts in splits.items():
        save_json_lines(folder / f"{split}.jsonl", texts)
        sources = tokenizer([row["source"] for row in texts], truncation=True, max_length=MAX_SOURCE_TOKENS)
        targets = tokenizer([row["target"] for row in texts], truncation=True, max_length=MAX_TARGET_TOKENS)
        ids = {"input_ids": sources["input_ids"], "labels": targets["input_ids"]}
        Dataset.from_dict(ids).save_to_disk(folder / f"{split}_tokens")
    T5Config(**T5_SHAPE, vocab_size=len(tokenizer), pad_token_id=0, decoder_start_token_id=0).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def write_llm_data(folder: Path, num_rows: int) -> int:
    """Write `train.jsonl` and `eval.jsonl` with `prompt` and `completion` that nobody has to cut, and `model`, no weights.

    Returns:
        the tokens of all training rows, with their end tokens.
    """
    from transformers import LlamaConfig

    from toolkit.data.tokens.tokenizer import train_byte_level_tokenizer
    from toolkit.files.json_lines import save_json_lines

    splits = load_docstrings(folder, num_rows, num_eval_rows=8)
    tokenizer = train_byte_level_tokenizer((row[side] for row in splits["train"] for side in row), VOCAB_SIZE)
    fitted = {split: [fit(tokenizer, row) for row in rows] for split, rows in splits.items()}
    for split, rows in fitted.items():
        save_json_lines(folder / f"{split}.jsonl", rows)
    end = tokenizer.eos_token_id
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": end, "eos_token_id": end}
    LlamaConfig(**LLAMA_SHAPE, vocab_size=len(tokenizer), **ids).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    lengths = [len(tokenizer(row["prompt"] + row["completion"])["input_ids"]) + 1 for row in fitted["train"]]
    assert max(lengths) <= MAX_LENGTH_TOKENS, "a row was not cut enough"
    return sum(lengths)


def write_pairs(folder: Path, num_rows: int) -> int:
    """As `write_llm_data`, with `chosen` and `rejected` (the next row's) for `completion`; the tokens of both documents."""
    from transformers import AutoTokenizer

    from toolkit.files.json_lines import load_json_lines, save_json_lines

    write_llm_data(folder, num_rows)
    for split in ("train", "eval"):
        rows = load_json_lines(folder / f"{split}.jsonl")
        answers = [row.pop("completion") for row in rows]
        others = [*answers[1:], *answers[:1]]
        rows = [row | {"chosen": ours, "rejected": other} for row, ours, other in zip(rows, answers, others, strict=True)]
        rows = [row for row in rows if row["chosen"] != row["rejected"]]
        save_json_lines(folder / f"{split}.jsonl", rows)
        if split == "train":
            tokenizer = AutoTokenizer.from_pretrained(folder / "model")
            texts = [row["prompt"] + row[answer] for row in rows for answer in ("chosen", "rejected")]
            num_tokens = sum(min(len(ids) + 1, MAX_LENGTH_TOKENS) for ids in tokenizer(texts)["input_ids"])
    return num_tokens


def load_docstrings(folder: Path, num_train_rows: int, num_eval_rows: int) -> dict[str, list[dict[str, str]]]:
    """Docstrings with a body, `source` and `target`, of the splits `train` and `eval`, evenly spaced over what there is."""
    from toolkit.config.data import DataConfig
    from toolkit.data.rows.load import load_rows
    from toolkit.objectives.seq2seq import Seq2Seq

    rows = load_rows(Seq2Seq(), DataConfig(source="recipes/sources/docstrings.py:load_rows", cache_dir=str(folder / "cache")))
    long_enough = rows.train.filter(lambda row: len(row["lead_text"]) >= MIN_BODY_CHARACTERS)
    found = {"train": (long_enough, num_train_rows), "eval": (rows.evaluation, num_eval_rows)}
    return {
        split: [
            {"source": row["prompt"], "target": row["completion"]}
            for row in (rows[place * len(rows) // most] for place in range(most))
        ]
        for split, (rows, most) in found.items()
    }


def fit(tokenizer: Any, row: dict[str, str]) -> dict[str, str]:
    """A prompt that ends on a token boundary, a line's, and a completion; cut so that they fit with the end token."""
    completion = cut(tokenizer, row["target"], MAX_TARGET_TOKENS)
    # The two others: the line's end and the end token.
    prompt = cut(tokenizer, row["source"], MAX_LENGTH_TOKENS - 2 - len(tokenizer(completion)["input_ids"]))
    return {"prompt": prompt.rstrip() + "\n", "completion": completion.strip()}


def cut(tokenizer: Any, text: str, max_tokens: int) -> str:
    """The text's first tokens."""
    ends = [end for _, end in tokenizer(text, return_offsets_mapping=True)["offset_mapping"]]
    return text if len(ends) <= max_tokens else text[: ends[max_tokens - 1]]
