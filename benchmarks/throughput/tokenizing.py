"""Processor time from JSON lines to tokens in the cache, beside a plain `datasets.map` with the same tokenizer, one process each.

Short pairs, and short chats of two turns whose template marks the assistant's text. Ours also checks and splits the rows, finds
duplicates and cuts, and hashes what it writes. Writes `tokenizing_<hardware>_<date>.md` into `benchmarks/results/`.

    python -m benchmarks.throughput.tokenizing
"""

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measuring import (
    REPOSITORY,
    Figures,
    build_parser,
    format_ratios,
    format_runs,
    format_table,
    interleave,
    run_side,
    write_report,
)

KINDS = ("pairs, one call", "pairs, prompts masked", "chats")
"""What the plain side does."""
TEMPLATE = REPOSITORY / "recipes" / "chat_templates" / "chatml_generation.jinja"


def main() -> None:
    if sys.argv[1:2] == ["--side"]:
        return ours(*sys.argv[2:])
    parser = build_parser("Processor time of tokenizing, beside datasets.map.", parts=KINDS, repetitions=3)
    parser.add_argument("--num-rows", type=int, default=100_000)
    parser.add_argument("--older", type=Path, help="a checkout of an older version, as a third side")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        save_inputs(Path(folder), options.num_rows)
        for kind in options.parts:
            sides = {"ours": REPOSITORY, "plain": None} | ({"older": options.older} if options.older else {})

            def measure(side: str, name: str, kind: str = kind, sides: dict[str, Path | None] = sides) -> Figures:
                file, where = Path(folder) / f"{kind.split(',')[0]}.jsonl", sides[side]
                files = [kind, file, Path(folder) / "tokenizer", Path(folder) / f"{name}-{side}"]
                start = ["-c", _START.format(where, REPOSITORY), "--side"] if where else ["benchmarks/baselines/datasets_map.py"]
                return run_side([sys.executable, *start, *files], num_threads=1).figures

            runs = interleave(measure, [*sides], options.repetitions, kind)
            cells = [format_runs(runs["plain"], "cpu_s"), format_runs(runs["ours"], "cpu_s")]
            cells.append(format_ratios(runs["ours"], runs["plain"], "cpu_s"))
            cells += [format_ratios(runs["older"], runs["plain"], "cpu_s")] if options.older else []
            rows.append([kind, *cells])
    header = ["kind", "datasets.map, CPU s", "ours, CPU s", "ours, times datasets.map"] + ["before"] * bool(options.older)
    about = (
        f"\n\n{options.num_rows:,} rows; min / median / max of {options.repetitions} repetitions, sides by turns; processor time "
        f"of the process, without its imports. Load of the machine at the end: {os.getloadavg()[0]:.1f}."
    )
    packages = ["datasets", "tokenizers", "transformers", "pyarrow", "numpy"]
    title = "Tokenizing, beside a plain datasets.map"
    write_report("tokenizing", title, about, [format_table(header, rows)], packages=packages)


_START = """\
import sys
sys.path[:0] = ["{0}"]
import toolkit
assert toolkit.__path__[0].startswith("{0}")
sys.path[:1] = ["{1}"]
from benchmarks.throughput.tokenizing import ours
ours(*sys.argv[2:])
"""


def save_inputs(folder: Path, num_rows: int) -> None:
    """Rows of made-up words, and a byte-level tokenizer trained on these."""
    from toolkit.data.tokens.tokenizer import train_byte_level_tokenizer

    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(5000)]

    def say(number: int) -> str:
        return " ".join(draw.choices(words, k=number))

    with (folder / "pairs.jsonl").open("w") as pairs, (folder / "chats.jsonl").open("w") as chats:
        for _ in range(num_rows):
            pairs.write(json.dumps({"prompt": say(12) + "?", "completion": " " + say(8)}) + "\n")
            turns = [{"role": ("user", "assistant")[i % 2], "content": say(n)} for i, n in enumerate((12, 8, 6, 10))]
            chats.write(json.dumps({"messages": turns}) + "\n")
    tokenizer = train_byte_level_tokenizer([" ".join(words)] * 3, 4000)
    special = ["<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": special})
    tokenizer.chat_template = TEMPLATE.read_text()
    tokenizer.save_pretrained(folder / "tokenizer")


def ours(kind: str, file: str, tokenizer: str, cache: str) -> None:
    """One process reads, splits, tokenizes and caches the rows."""
    import datasets  # noqa: F401  imports are not measured, as on the other side
    from transformers import AutoTokenizer  # noqa: F401  `import transformers` alone leaves most of it to its first use

    from toolkit.config.data import LLMDataConfig
    from toolkit.config.schema import ModelConfig
    from toolkit.data.tokens.prepare import prepare_rows
    from toolkit.objectives import built_in

    start = time.process_time()
    config = LLMDataConfig(source="jsonl", files=file, cache_dir=cache, num_tokenizer_workers=1)
    rows = prepare_rows(built_in(config.objective), config, ModelConfig(name_or_path=tokenizer), 8000)
    print(json.dumps({"cpu_s": time.process_time() - start, "rows": len(rows.train) + len(rows.evaluation)}))


if __name__ == "__main__":
    main()
