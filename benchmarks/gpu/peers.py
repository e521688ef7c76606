"""Ours beside TRL and `Seq2SeqTrainer` on models of the real shapes, with matched settings, one side after the other.

    python -m benchmarks.gpu.peers llama-8b-lora t5-base t5-base-evaluation

A side is a process that takes turns (`benchmarks/turns.py`); the first turn has the start in it, and warms up. The sides do not
run at the same time: two 8B models fill a GPU.
"""

import importlib.util
import json
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import LEFT_OUT, emit, part_parser, preset_file
from benchmarks.gpu.shapes import Case, find_case, list_flags, random_weights, write_inputs
from benchmarks.measuring import num_cores
from benchmarks.turns import Side
from toolkit.files.json_lines import load_json_lines, save_json_lines

EVALUATION = "-evaluation"
TURNS = {False: (3, 10), True: (2, 1)}
"""By `--small`, the number of turns, of which the first is not counted, and the steps of each."""
EVALUATED = {False: (256, 64, 64), True: (8, 4, 4)}
"""By `--small`: rows, batch, new tokens."""
PEERS = {"llm": ("TRL", "sft_trainer"), "t5": ("Seq2SeqTrainer", "seq2seq_trainer")}


def main() -> None:
    parser = part_parser(__doc__)
    parser.add_argument("works", nargs="+", metavar="NAME")
    options, failed = parser.parse_args(), []
    for work in options.works:
        name, evaluates = work.removesuffix(EVALUATION), work.endswith(EVALUATION)
        case = find_case(name, small=options.small)
        if case.recipe == "llm" and importlib.util.find_spec("trl") is None:
            sys.exit(print(f"{LEFT_OUT}TRL is not installed, which pip install -c constraints.txt -e '.[bench]' brings"))
        with tempfile.TemporaryDirectory(prefix="peers-", dir=options.folder) as folder:
            for side, command in list_sides(case, options.folder, Path(folder), evaluates=evaluates, small=options.small):
                try:
                    take_turns(case, side, command, evaluates=evaluates, small=options.small)
                except RuntimeError:  # the other side may still run
                    traceback.print_exc()
                    failed.append(f"{side} of {work}")
    print(f"measured: {', '.join(options.works)}")
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def take_turns(case: Case, side: str, command: list[Any], *, evaluates: bool, small: bool) -> None:
    """Start a side, let it take its turns, end it, and print its figures."""
    num_turns, num_steps = TURNS[small]
    process = Side(command, num_threads=num_cores())
    first, *turns = [process.take_turn() for _ in range(num_turns)]
    process.close()
    seconds = sum(turn["seconds"] for turn in turns)
    figures = {"rows_per_s": sum(turn["rows"] for turn in turns) / seconds, "first_turn_s": first["seconds"]}
    if "gpu_gib" in first:
        figures["peak_gib"] = turns[-1]["gpu_gib"]
    if not evaluates:
        figures |= {"tokens_per_s": sum(turn["tokens"] for turn in turns) / seconds, "step_s": seconds / num_steps / len(turns)}
    emit("evaluation" if evaluates else "training", work=case.title, preset="single", side=side, beside=True, **figures)


def list_sides(case: Case, folder: Path, own: Path, *, evaluates: bool, small: bool) -> Iterator[tuple[str, list[Any]]]:
    """Write the inputs; the name of each side with its command, ours first."""
    (num_turns, num_steps), (num_rows, batch, new_tokens) = TURNS[small], EVALUATED[small]
    tokenizer = write_inputs(case, num_rows // case.rows + 1 if evaluates else num_steps * (num_turns + 1), own)
    rows = load_json_lines(own / "rows.jsonl")
    has_weights = evaluates or "adapter.method" in case.flags
    weights = random_weights(case, own, folder, "float32" if evaluates else "bfloat16") if has_weights else None
    flags = list_flags(case, own, weights) | {"train.max_steps": 10**4, "log_every_steps": num_steps}  # the driver ends it
    theirs: dict[str, Any] = {"model_folder": weights or own / "model", "work_folder": own / "peer", "lr": flags["optim.lr"]}
    theirs |= {"steps_per_turn": num_steps, "batch_size_rows": case.rows}
    if evaluates:
        # Between two evaluations is one step, whose learning rate is too small to move a weight; other rows are trained on.
        rows, others = rows[:num_rows], rows[num_rows:]
        save_json_lines(own / "evaluated.jsonl", rows)
        save_json_lines(own / "rows.jsonl", others)
        flags |= {"data.eval_files": [str(own / "evaluated.jsonl")], "eval.every_steps": 1, "eval.batch_size_rows": batch,
                  "eval.max_new_tokens": new_tokens, "optim.lr": 1e-20}  # fmt: skip
        theirs |= {"batch_size_rows": batch, "max_new_tokens": new_tokens}
    if case.recipe == "t5":
        theirs |= {"mode": "matched", "task": "evaluate" if evaluates else "train", "dataset_folder": own / "tokens"}
        _save_tokens(case, rows, tokenizer, own)
    else:
        theirs |= _matched_to(case) | {"rows_file": own / "rows.jsonl", "max_length_tokens": case.tokens[0]}
    ours = {"task": "evaluate" if evaluates else "train", "recipe": case.recipe, "flags": flags, "steps_per_turn": num_steps}
    launched = ["env", f"TOOLKIT_ACCELERATE_YAML={preset_file('single', own)}", sys.executable]
    peer, script = PEERS[case.recipe]
    yield "ours", [*launched, "benchmarks/throughput/ours.py", _save(ours, own / "ours.json")]
    yield peer, [sys.executable, f"benchmarks/baselines/{script}.py", _save(theirs, own / "peer.json")]


def _matched_to(case: Case) -> dict[str, Any]:
    """TRL's settings for the same work: loss on all tokens, no checkpointing; an adapter of the same size, or packed rows."""
    options: dict[str, Any] = {"gradient_checkpointing": False, "completion_only_loss": False}
    if case.flags["data.packing"]:
        options |= {"packing": True, "packing_strategy": "bfd"}
    adapter = {"r": case.flags.get("adapter.rank"), "lora_alpha": 32, "target_modules": "all-linear"}
    return {"options": options, "adapter": adapter if adapter["r"] else None}


def _save_tokens(case: Case, rows: list[dict[str, Any]], tokenizer: Any, own: Path) -> None:
    from datasets import Dataset

    columns = {}
    for column, key, most in (("input_ids", "source", case.tokens[0]), ("labels", "target", case.tokens[1])):
        columns[column] = tokenizer([row[key] for row in rows], truncation=True, max_length=most)["input_ids"]
    Dataset.from_dict(columns).save_to_disk(own / "tokens")


def _save(config: dict[str, Any], path: Path) -> Path:
    path.write_text(json.dumps(config, default=str))
    return path


if __name__ == "__main__":
    main()
