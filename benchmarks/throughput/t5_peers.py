"""Our T5 recipe beside transformers' `Seq2SeqTrainer`: training, evaluation with generation, memory.

Same model, rows, machine and precision; the sides run in turn within each repetition, starting with another one each time,
and the ratios are taken within a repetition, so that a machine that is busy for a while slows all alike. Only training steps
and whole evaluations are timed, not the start. Writes `t5_peers_<hardware>_<date>.md` into `benchmarks/results/`.

    python -m benchmarks.throughput.t5_peers

The rows are docstrings, the tokenizer is trained on them, and all sides read the same ids. A length-grouped epoch runs from
long rows to short, so the matched peer and we are timed over one whole epoch.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.measuring import Figures, build_parser, format_ratios, format_runs, format_table, interleave, median, write_report
from benchmarks.throughput.t5_sides import MAX_SOURCE_TOKENS, VOCAB_SIZE, Data, OurRun, run_ours, run_peer, write_data

PACKAGES = ["torch", "transformers", "accelerate", "datasets", "tokenizers"]
DEFAULTS, MATCHED, OURS = "Seq2SeqTrainer, defaults", "Seq2SeqTrainer, matched", "recipes/t5.py"
MATCHED_EAGER, OURS_EAGER = f"{MATCHED}, eager attention", f"{OURS}, eager attention"
SHAPES = {
    "speed": {"d_model": 256, "d_ff": 1024, "num_heads": 4, "d_kv": 64, "num_layers": 4, "num_decoder_layers": 4},
    "memory": {"d_model": 768, "d_ff": 3072, "num_heads": 12, "d_kv": 64, "num_layers": 6, "num_decoder_layers": 6},
}


def main() -> None:
    options = parse_options()
    comparisons = {"training": compare_training, "evaluation": compare_evaluation, "memory": compare_memory}
    with tempfile.TemporaryDirectory(prefix="t5-peers-") as folder:
        data = write_data(Path(folder), SHAPES, options.num_rows, options.num_eval_rows)
        sections = [comparisons[part](data, options) for part in options.parts]
    about = f"""; bf16.

Minimum / median / maximum of {options.repetitions} repetitions, sides interleaved; ratios are taken within a repetition."""
    write_report("t5_peers", "recipes/t5.py beside Seq2SeqTrainer", about, sections, packages=PACKAGES)


def parse_options() -> argparse.Namespace:
    parser = build_parser(
        "T5 training and evaluation beside Seq2SeqTrainer.", parts=["training", "evaluation", "memory"], repetitions=3
    )
    parser.add_argument("--num_rows", type=int, default=2000, help="training rows at most; one epoch of them is timed")
    parser.add_argument("--num_eval_rows", type=int, default=200, help="held-out rows at most")
    parser.add_argument("--batch_size_rows", type=int, default=16)
    parser.add_argument("--eval_batch_size_rows", type=int, default=64, help="ours and the matched peer's")
    parser.add_argument("--num_beams", type=int, default=1)
    parser.add_argument("--max_new_tokens", type=int, default=48)
    parser.add_argument("--warmup_steps", type=int, default=5)
    parser.add_argument(
        "--default_steps", type=int, default=40, help="steps timed of the peer's defaults; its batches are random"
    )
    parser.add_argument("--weights_steps", type=int, default=250, help="steps that train the weights which all sides evaluate")
    parser.add_argument("--memory_steps", type=int, default=3)
    return parser.parse_args()


def compare_training(data: Data, options: argparse.Namespace) -> str:
    """Training steps from random weights; a section of the report."""
    epoch_steps = -(-data.num_train_rows // options.batch_size_rows)
    flags = {
        "model.from_scratch": True,
        "train.global_batch_size_rows": options.batch_size_rows,
        "train.micro_batch_size_rows": options.batch_size_rows,
        "train.max_steps": options.warmup_steps + epoch_steps,
        "eval.at_start": False,
        "eval.generate": False,
        "eval.num_rows": 1,
    }

    def measure(side: str, name: str) -> Figures:
        attention = "eager" if side in (MATCHED_EAGER, OURS_EAGER) else "sdpa"
        if side in (OURS, OURS_EAGER):
            chosen = flags | {"model.attn_implementation": attention}
            return run_ours(OurRun(data=data, name=name, model="speed", flags=chosen, num_warmup_steps=options.warmup_steps))
        return run_peer(
            data,
            name,
            task="train",
            mode="default" if side == DEFAULTS else "matched",
            model_folder=data.model("speed"),
            dataset_folder=data.tokens("train"),
            batch_size_rows=options.batch_size_rows,
            num_warmup_steps=options.warmup_steps,
            num_steps=options.default_steps if side == DEFAULTS else epoch_steps,
            attn_implementation=attention,
        )

    sides = [DEFAULTS, MATCHED, MATCHED_EAGER, OURS, OURS_EAGER]
    runs = interleave(measure, sides, options.repetitions, "training")
    columns = {"samples/s": ("samples_per_s", 1), "tokens/s": ("tokens_per_s", 0), "peak GiB": ("peak_memory_gib", 2)}
    return f"""## Training

T5 {describe_shape("speed")} from random weights, dropout 0.1; {data.num_train_rows} docstrings, sources cut to
{MAX_SOURCE_TOKENS} tokens; batch {options.batch_size_rows}; {options.warmup_steps} steps of warm-up, then {options.default_steps}
steps (defaults) or the {epoch_steps} of an epoch (matched, ours). Attention is sdpa where a side does not say eager: on a CPU
sdpa's backward is slow with T5's position bias. Tokens: sources and targets without padding. Memory: resident.

{comparison_table(runs, columns, ["samples/s", "tokens/s"])}

Of the positions in a batch {median(runs[DEFAULTS], "padding_share"):.0%} are padding by default,
{median(runs[MATCHED], "padding_share"):.0%} matched. Loss of the last ten steps: {median(runs[MATCHED], "loss"):.2f} matched,
{median(runs[OURS], "loss"):.2f} ours."""


def compare_evaluation(data: Data, options: argparse.Namespace) -> str:
    """Held-out loss, generation and ROUGE with the same weights; a section of the report."""
    model, tokens = data.model("trained"), data.tokens("train")
    steps = {"num_warmup_steps": 1, "num_steps": options.weights_steps}
    run_peer(
        data,
        "weights",
        task="train",
        mode="matched",
        model_folder=data.model("speed"),
        dataset_folder=tokens,
        save_to=model,
        **steps,
    )
    flags = {
        # Evaluations at steps 0, 1 and 2, with a learning rate too small to move a weight; the first one warms up.
        "train.max_steps": 2,
        "optim.lr": 1e-20,
        "train.global_batch_size_rows": 2,
        "train.micro_batch_size_rows": 2,
        "eval.every_steps": 1,
        "eval.batch_size_rows": options.eval_batch_size_rows,
        "eval.max_new_tokens": options.max_new_tokens,
        "eval.num_beams": options.num_beams,
    }

    def measure(side: str, name: str) -> Figures:
        if side == OURS:
            return run_ours(OurRun(data=data, name=name, model="trained", flags=flags))
        return run_peer(
            data,
            name,
            task="evaluate",
            mode="default" if side == DEFAULTS else "matched",
            model_folder=model,
            dataset_folder=data.tokens("eval"),
            batch_size_rows=options.eval_batch_size_rows,
            max_new_tokens=options.max_new_tokens,
            num_beams=options.num_beams,
        )

    runs = interleave(measure, [DEFAULTS, MATCHED, OURS], options.repetitions, "evaluation")
    columns = {"rows/s": ("eval_rows_per_s", 1), "loss": ("eval_loss", 3), "ROUGE-L": ("eval_rougeL", 2)}
    return f"""## Evaluation with generation

Loss, generation ({options.num_beams} beams, at most {options.max_new_tokens} tokens) and ROUGE of {data.num_eval_rows} rows,
all sides with the same weights; batches of 8 by default, of {options.eval_batch_size_rows} matched and ours. Loss and ROUGE show
that the sides do the same work: the Trainer's loss is a mean over batches, ours over label tokens.

{comparison_table(runs, columns, ["rows/s"])}"""


def compare_memory(data: Data, options: argparse.Namespace) -> str:
    """Resident memory of a rank under FSDP2 and DDP, 2 processes each; a section of the report."""
    flags = {
        "model.from_scratch": True,
        "train.max_steps": options.memory_steps,
        "train.global_batch_size_rows": 8,
        "train.micro_batch_size_rows": 4,
        "eval.at_start": False,
        "eval.generate": False,
        "eval.num_rows": 2,
    }
    presets = {"DDP": "ddp_cpu", "FSDP2": "fsdp2_cpu"}

    def measure(side: str, name: str) -> Figures:
        return run_ours(OurRun(data=data, name=name, model="memory", flags=flags, preset=presets[side], num_processes=2))

    runs = interleave(measure, list(presets), options.repetitions, "memory")
    columns = {"training": "training_memory_gib", "whole run, with export": "peak_memory_gib"}
    rows = [[side, *(format_runs(runs[side], key, 2) for key in columns.values())] for side in presets]
    return f"""## Peak resident memory of a rank, GiB

T5 {describe_shape("memory")}; 2 processes, micro-batches of 4.

{format_table(["", *columns], rows)}"""


def comparison_table(runs: dict[str, list[Figures]], columns: dict[str, tuple[str, int]], speeds: list[str]) -> str:
    """A row a side; after its figures how many times as fast we are, by each of the columns in `speeds`."""
    rows = []
    for side, figures in runs.items():
        cells = [format_runs(figures, key, digits) for key, digits in columns.values()]
        cells += ["" if side == OURS else format_ratios(runs[OURS], figures, columns[speed][0]) for speed in speeds]
        rows.append([side, *cells])
    return format_table(["", *columns, *(f"ours, by {speed}" for speed in speeds)], rows)


def describe_shape(name: str) -> str:
    """`(d_model 256, …, vocabulary 4096)`."""
    return f"({', '.join(f'{key} {value}' for key, value in SHAPES[name].items())}, vocabulary {VOCAB_SIZE})"


if __name__ == "__main__":
    main()
