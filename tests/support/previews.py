"""Inputs of `preview`, small enough to read its views, and their golden texts.

After a change of the view, `python -m tests.support.previews` writes the golden texts again: read the difference.
"""

import contextlib
import io
import os
import tempfile
from pathlib import Path

import yaml

from tests.support.chats import CHATML, build_chat_tokenizer, say
from tests.support.launch import REPOSITORY
from tests.support.model_folders import save_jsonl
from tests.support.workbench import call_toolkit

GOLDEN = REPOSITORY / "tests" / "unit" / "tools" / "preview"
CASES = {
    "t5": "--config t5.yaml --rows 2",
    "chats": "--config chats.yaml --rows 2 --accelerate-config fsdp2_cpu.yaml",
    "mix": "--config chats.yaml --config mix.yaml --rows 0",
    "long_text": "--config chats.yaml --data.files book.txt --data.source txt --row 10000000000",
}
"""The golden texts, and the flags that make them. Each is printed from a warm cache."""

HOSTILE = [
    "</script><script>alert(1)</script><img src=x onerror=alert(1)> &amp; &lt;b&gt; ]]> -->",
    "\x1b[2J\x1b]0;title\x07 \x9b31m a\rb \x08",
    "abc \u202e reversed \u2066 isolated \u200f mark \u061c \ufeff zero\u200bwidth \u2028 line",
    "[red]markup[/red] :smile: [[counts]] {braces} %s",
    "שלום & مرحبا 日本語 🎉 👩‍👩‍👧",
]
HOSTILE_ROWS = (
    "--config chats.yaml --data.files hostile.jsonl --data.eval_fraction 0 --data.max_length_tokens 256 "
    "--train.global_batch_size_rows 8 --rows 9"
)
LONG = "hello there " * 10_000 + "end"
"""More than a hundred thousand characters."""
LONG_ROW = "--config chats.yaml --data.files long.jsonl --data.eval_fraction 0 --data.loss_on all"

SENTENCES = ["what is two and two", "it is four", "be brief", "hello there", "thanks", "welcome"]


def save_inputs(folder: Path) -> None:
    """Models without weights, rows and run YAMLs."""
    from transformers import LlamaConfig, T5Config

    tokenizer = build_chat_tokenizer("<|im_start|>", "<|im_end|>", template=CHATML, vocab_size=330)
    sizes = {"vocab_size": 400, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaConfig(**sizes, hidden_size=8, intermediate_size=8, max_position_embeddings=256).save_pretrained(folder / "llama")
    T5Config(vocab_size=400, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0).save_pretrained(
        folder / "t5"
    )
    for model in ("llama", "t5"):
        tokenizer.save_pretrained(folder / model)
    pairs = [{"source": " ".join(_draw(i, 1 + i % 6)), "target": SENTENCES[i % 5], "id": i} for i in range(12)]
    save_jsonl(folder / "rows.jsonl", [*pairs, {**pairs[1], "id": 12}, {"source": "", "target": "empty"}])
    chats = [{"messages": say(*_draw(i, 2 + 2 * (i % 3)), system=f"chat no. {i}" if i % 4 == 0 else None)} for i in range(9)]
    chats[2]["messages"][1]["weight"] = 0
    save_jsonl(folder / "chats.jsonl", [*chats, chats[0], {"messages": say("so", "it is four " * 9)}])
    (folder / "book.txt").write_text(" ".join(SENTENCES * 6) + "\n\nThe end.\n")
    preset = (REPOSITORY / "accelerate_configs" / "fsdp2_cpu.yaml").read_text()
    (folder / "fsdp2_cpu.yaml").write_text(preset)
    train = {"global_batch_size_rows": 4, "micro_batch_size_rows": 2, "max_steps": 3}
    save_yaml(
        folder / "t5.yaml",
        model={"name_or_path": "t5", "from_scratch": True},
        data={"source": "jsonl", "files": "rows.jsonl", "eval_fraction": 0.2, "max_source_length_tokens": 24, "prefix": "sum: "},
        train=train,
    )
    save_yaml(
        folder / "chats.yaml",
        model={"name_or_path": "llama", "from_scratch": True},
        data={"source": "jsonl", "files": "chats.jsonl", "eval_fraction": 0.2, "max_length_tokens": 48},
        train=train,
        eval={"max_new_tokens": 4},
    )
    mix = [{"source": "jsonl", "files": "chats.jsonl", "weight": 3}, {"source": "txt", "files": "book.txt"}]
    save_yaml(folder / "mix.yaml", data={"mix": mix, "source": None, "files": None})


def save_hostile_rows(folder: Path) -> None:
    """Texts that a page or a terminal could take for more than text, and a row of a megabyte."""
    save_jsonl(folder / "hostile.jsonl", [{"messages": say(text, f"answer {text}")} for text in HOSTILE])
    save_jsonl(folder / "long.jsonl", [{"messages": say("so", LONG)}])


def _draw(first: int, num: int) -> list[str]:
    return [SENTENCES[(first + i) % len(SENTENCES)] for i in range(num)]


def save_yaml(path: Path, **sections) -> None:
    if "model" in sections:
        sections["data"] = {**sections["data"], "cache_dir": "cache"}
    path.write_text(yaml.safe_dump(sections))


def call_preview(flags: str | list[str]) -> int:
    """Run `python -m toolkit preview` in this process and folder; returns its exit code."""
    return call_toolkit("preview", *(flags.split() if isinstance(flags, str) else flags))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_inputs(Path(folder))
        os.chdir(folder)
        for name, flags in CASES.items():
            for _ in range(2):  # the second time the cache is warm
                printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
                with contextlib.redirect_stdout(printed):
                    assert call_preview(flags) == 0
                printed.seek(0)
                (GOLDEN / f"{name}.txt").write_text(f"$ python -m toolkit preview {flags}\n{printed.read()}", encoding="utf-8")


if __name__ == "__main__":
    main()
