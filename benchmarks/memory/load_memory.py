"""Host memory of a rank while a model is loaded and sharded under FSDP2: each rank its part, beside each rank the whole.

Both ways run the recipe's own code on the same files; the whole way is what every rank did before, and what still happens where a
model cannot be read in parts. Writes `load_memory_<hardware>_<date>.md` into `benchmarks/results/`.

    python -m benchmarks.memory.load_memory
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measuring import (
    Figures,
    as_arguments,
    build_parser,
    format_ratios,
    format_runs,
    format_spread,
    format_table,
    interleave,
    median,
    run_script,
    write_report,
)

PACKAGES = ["torch", "transformers", "accelerate", "peft", "safetensors"]
PRESET, NUM_PROCESSES = "fsdp2_cpu", 2
SHARDED, WHOLE, TRAINED_TOO = "each rank its part", "each rank the whole", "each rank its part, then steps"
TRAINED: dict[str, dict[str, Any]] = {
    "LoRA, frozen base in bf16": {"adapter.method": "lora", "adapter.target_modules": ["q_proj", "v_proj"], "adapter.rank": 8},
    "all weights, fp32": {},
}


def main() -> None:
    options = parse_options()
    sections = []
    with tempfile.TemporaryDirectory(prefix="load-memory-") as name:
        for trained, num_layers in zip(TRAINED, (options.num_layers, options.num_layers_trained), strict=True):
            folder = Path(name) / f"{num_layers}-layers"
            num_bytes = write_model(folder, options, num_layers)
            runs = interleave(
                lambda side, _, folder=folder, trained=trained: load(folder, side, TRAINED[trained]),
                [SHARDED, WHOLE],
                options.repetitions,
                trained,
            )
            sections.append(describe(trained, runs, num_bytes))
    about = f"""; FSDP2, {NUM_PROCESSES} processes over gloo. The shards stay in host memory here; with
GPUs they would not.

Of the rank that has most, above what it had once model config, structure and libraries were there. *Anonymous*: memory of the
process itself (`RssAnon`, sampled every 5 ms). *Resident*: with mapped pages of files too; transformers maps the weights, and
keeps them mapped where their dtype is right already. The kernel can take such pages back, and ranks of a machine share them. Each
rank's part is read by `pread` and maps nothing. Seconds: from opening the files to shards with values, the hashes of frozen
weights included, with the files in the page cache. Minimum / median / maximum of {options.repetitions} repetitions, sides
interleaved."""
    write_report("load_memory", "Host memory of loading", about, sections, packages=PACKAGES)


def parse_options() -> argparse.Namespace:
    parser = build_parser("Host memory of a rank while a model is loaded and sharded.", repetitions=2)
    parser.add_argument("--hidden_size", type=int, default=2048)
    parser.add_argument("--num_layers", type=int, default=26, help="of the model under an adapter")
    parser.add_argument("--num_layers_trained", type=int, default=8, help="of the model that trains whole, in fp32")
    parser.add_argument("--vocab_size", type=int, default=64_000)
    return parser.parse_args()


def write_model(folder: Path, options: argparse.Namespace, num_layers: int) -> int:
    """A Llama with random weights in bf16, in several files; returns their bytes."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.initialization import no_init_weights

    config = LlamaConfig(
        hidden_size=options.hidden_size,
        intermediate_size=options.hidden_size * 8 // 3 // 64 * 64,
        num_hidden_layers=num_layers,
        num_attention_heads=options.hidden_size // 64,
        vocab_size=options.vocab_size,
        tie_word_embeddings=False,
    )
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.02, 0.02)
    model.save_pretrained(folder, max_shard_size="1GB")
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def load(folder: Path, side: str, trained: dict[str, Any]) -> Figures:
    """One launch of `load_sides.py`."""
    flags = {"model.name_or_path": folder, "data.source": "not/read", "train.num_epochs": 1, "run.output_dir": folder}
    flags |= {"train.global_batch_size_rows": NUM_PROCESSES, "train.micro_batch_size_rows": 1, **trained}
    way = {SHARDED: "sharded", WHOLE: "whole", TRAINED_TOO: "trained"}[side]
    arguments = [way, *as_arguments(flags)]
    return run_script("benchmarks/memory/load_sides.py", arguments, preset=PRESET, num_processes=NUM_PROCESSES).figures


def describe(trained: str, runs: dict[str, list[Figures]], num_bytes: int) -> str:
    """A section of the report."""
    gib = 2**30
    columns = ("anonymous_peak", "anonymous_after", "resident_peak")
    rows = []
    for side, figures in runs.items():
        cells = [format_spread([run[column] / gib for run in figures], 2) for column in columns]
        rows.append([side, *cells, format_runs(figures, "seconds")])
    ratios = [format_ratios(runs[WHOLE], runs[SHARDED], column) for column in (*columns, "seconds")]
    shards = median(runs[SHARDED], "shard_bytes")
    beside = [(run["anonymous_peak"] - run["shard_bytes"]) / 2**20 for run in runs[SHARDED]]
    header = ["", "anonymous peak, GiB", "anonymous after, GiB", "resident peak, GiB", "seconds"]
    num_millions = median(runs[SHARDED], "num_parameters") / 1e6
    return f"""## {trained}

{num_millions:,.0f} M parameters, {num_bytes / gib:.2f} GiB of files in bf16; one rank's shards are {shards / gib:.2f} GiB.
Read in parts, a rank needs {format_spread(beside, 0)} MiB beside its shards.

{format_table(header, [*rows, ["whole / part", *ratios]])}"""


if __name__ == "__main__":
    main()
