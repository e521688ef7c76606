"""Memory and seconds of `python -m toolkit generate` for many short rows on 2 processes; it reads, generates and writes window by
window. And how fast it makes tokens, beside `datasets.map` with the same tokenizer.

Writes `generate_memory_<hardware>_<date>.md` into `benchmarks/results/`.

    python -m benchmarks.memory.generate_memory
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

from benchmarks.measuring import (
    Figures,
    build_parser,
    format_ratios,
    format_runs,
    format_table,
    interleave,
    run_script,
    write_report,
)

PACKAGES = ["torch", "transformers", "accelerate", "datasets", "tokenizers"]
PRESET, NUM_PROCESSES, NEW_TOKENS = "ddp_cpu", 2, 4
SIDE = "benchmarks/memory/generate_side.py"
OURS, PLAIN = "generate", "datasets.map"
GOAL_S = 10.0


def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory(prefix="generate-memory-") as name:
        folder = Path(name)
        write_model(folder / "model")
        write_rows(folder / "rows.jsonl", options.num_rows)
        launch = run_script(SIDE, ["generate", folder], preset=PRESET, num_processes=NUM_PROCESSES)
        figures = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(NUM_PROCESSES)]
        num_lines = (folder / "out.jsonl").read_bytes().count(b"\n")
        assert num_lines == options.num_rows, f"{num_lines} texts: {launch.stdout[-2000:]}"
        runs = interleave(lambda side, _: tokenize(folder, side), [OURS, PLAIN], options.repetitions, "tokenizing")
    about = f""". A Llama of one layer, 16 wide, with random weights; {options.num_rows:,} rows of 4 to 12 words;
{NEW_TOKENS} new tokens, batches of 8, fp32, {NUM_PROCESSES} processes over gloo. Other work had the cores meanwhile: compare the
bytes, not the seconds."""
    write_report("generate_memory", "Generating for many rows", about, [*describe(figures, runs)], packages=PACKAGES)


def parse_options() -> argparse.Namespace:
    parser = build_parser("Memory and seconds of generating for many short rows.", repetitions=3)
    parser.add_argument("--num_rows", type=int, default=200_000)
    return parser.parse_args()


def write_model(folder: Path) -> None:
    """A tiny Llama with a byte-level tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from toolkit.data.tokens.tokenizer import train_byte_level_tokenizer

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=600, max_position_embeddings=256, **sizes, **special))
    model.generation_config.max_new_tokens = NEW_TOKENS
    model.save_pretrained(folder)
    train_byte_level_tokenizer(list_words(), 600).save_pretrained(folder)


def list_words() -> list[str]:
    return [f"{first}{last}" for first in ("ba", "ke", "lo", "mi", "nu", "so") for last in ("der", "fen", "gal", "ton", "ris")]


def write_rows(path: Path, num_rows: int) -> None:
    draw, words = random.Random(0), list_words()
    with path.open("w") as file:
        for _ in range(num_rows):
            file.write(json.dumps({"text": " ".join(draw.choices(words, k=draw.randint(4, 12)))}) + "\n")


def tokenize(folder: Path, side: str) -> Figures:
    """One process that makes tokens of all rows."""
    return run_script(SIDE, [side, folder]).figures


def describe(ranks: list[dict], runs: dict[str, list[Figures]]) -> list[str]:
    """The sections of the report."""
    points = [point["num_rows"] for point in ranks[0]["points"]]
    rows = [
        [f"rank {number}", *(f"{point['resident_mib']:,.0f}" for point in rank["points"]), f"{rank['peak_mib']:,.0f}"]
        for number, rank in enumerate(ranks)
    ]
    memory = format_table(["resident memory, MiB, after", *(f"{point:,} rows" for point in points), "peak"], rows)
    first, all_s = ranks[0]["first_text_s"], ranks[0]["all_s"]
    verdict = "met" if first <= GOAL_S else "missed"
    speed = format_table(
        ["", "rows a second of the processor"],
        [*([side, format_runs(figures, "rows_per_s", 0)] for side, figures in runs.items()), [
            "ratio", format_ratios(runs[OURS], runs[PLAIN], "rows_per_s")]],
    )  # fmt: skip
    return [
        f"## Memory\n\n{memory}",
        f"## Seconds\n\nFrom the first row read to the first texts written: {first:.1f} s (goal {GOAL_S:.0f}: {verdict}). After "
        f"{ranks[0]['checked_s']:.1f} s of these all rows are checked, and the weights load. To the last text: {all_s:.0f} s.",
        "## Tokens\n\nMinimum / median / maximum. `generate` also checks each row; `datasets.map` in batches of 1,000, without "
        f"its cache; both one process, reading the file included.\n\n{speed}",
    ]


if __name__ == "__main__":
    main()
