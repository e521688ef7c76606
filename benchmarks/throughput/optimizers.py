"""The optimizers of `optim.name` beside AdamW: bytes of state and checkpoint, seconds of a step and of its update.

All of them update one model in turns, from gradients of their own rows, so that whatever else the machine does slows all alike.

    python -m benchmarks.throughput.optimizers
"""

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measuring import build_parser, format_table, run_worker, write_report

NUM_PROCESSES, PRESET = 2, "fsdp2_cpu"
PACKAGES = ["torch", "transformers", "accelerate"]
NAMES = ("adamw", "adamw_8bit", "adafactor", "lion")
SHAPE = {
    "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "num_key_value_heads": 12,
    "tie_word_embeddings": False,
}  # fmt: skip


def main() -> None:
    parser = build_parser("Bytes and seconds of the optimizers.", repetitions=7)
    parser.add_argument("--num_layers", type=int, default=10)
    parser.add_argument("--vocab_size", type=int, default=8_192)
    parser.add_argument("--num_row_tokens", type=int, default=64)
    options = parser.parse_args()
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="optimizers-") as name:
        shape = SHAPE | {"num_hidden_layers": options.num_layers, "vocab_size": options.vocab_size}
        config = {
            "shape": shape, "rounds": options.repetitions, "num_row_tokens": options.num_row_tokens, "work_folder": name,
        }  # fmt: skip
        figures = run_worker(Path(__file__), config, Path(name) / "config.json", preset=PRESET, num_processes=NUM_PROCESSES)
    sides = figures["sides"]
    rows = []
    for optimizer in NAMES:
        side, adamw = sides[optimizer], sides["adamw"]
        sizes = [f"{side[key] / 2**20:,.1f} ({side[key] / adamw[key]:.3f})" for key in ("state_bytes", "checkpoint_bytes")]
        rows.append([f"`{optimizer}`", *sizes, *(_times(side[key], adamw[key]) for key in ("step_s", "update_s"))])
    about = f"""; {PRESET}, {NUM_PROCESSES} processes over gloo. A random Llama of
{figures["num_parameters"] / 1e6:.0f} M parameters in fp32; in a step each rank has a row of {options.num_row_tokens} tokens.
Medians of {options.repetitions} rounds, in each of which each optimizer took a step, in turns; ratios to `adamw` are medians
within a round, with quartiles. Load average {before:.1f} before the run and {os.getloadavg()[0]:.1f} after it;
what is above {NUM_PROCESSES} is other work. An update clips the gradients, steps and drops them. Not measured on a GPU."""
    header = [
        "`optim.name`", "state on a rank, MiB (of `adamw`'s)", "checkpoint, MiB (of `adamw`'s)",
        "step, s; times `adamw`'s", "update, s; times `adamw`'s",
    ]  # fmt: skip
    write_report("optimizers", "Optimizers beside AdamW", about, [format_table(header, rows)], packages=PACKAGES)


def _times(seconds: list[float], adamw: list[float]) -> str:
    """The median, and how many times AdamW's it is within a round."""
    low, middle, high = statistics.quantiles([one / other for one, other in zip(seconds, adamw, strict=True)], n=4)
    return f"{statistics.median(seconds):.3f}; {middle:.2f} [{low:.2f}, {high:.2f}]"


def measure(config: dict[str, Any]) -> dict[str, Any]:
    """Figures of each optimizer, of the rank that has or takes most. Collective."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from benchmarks.checkpoint.save_sides import GOAL, IDENTITY, accumulate_gradients, seconds_of, update
    from toolkit.checkpoint.save import CheckpointWriter
    from toolkit.checkpoint.state import TrainState
    from toolkit.config.schema import CheckpointConfig, OptimConfig
    from toolkit.distributed.comm import gather_objects
    from toolkit.launch.accelerator import build_accelerator
    from toolkit.parallel.units import local_tensor
    from toolkit.parallel.wrap import shard_model
    from toolkit.training.optim import build_optimizer

    accelerator = build_accelerator()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**config["shape"]), dtype=torch.float32)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    sharded = shard_model(accelerator, model)
    optimizers = {name: build_optimizer(OptimConfig(name=name, lr=1e-6), sharded.model) for name in NAMES}
    sides: dict[str, dict[str, Any]] = {name: {"step_s": [], "update_s": []} for name in NAMES}

    def take_step(name: str) -> tuple[float, float]:
        """Seconds of a step, and of its update."""
        forward_s = seconds_of(lambda: accumulate_gradients(sharded, 1, config["num_row_tokens"]))
        update_s = seconds_of(lambda: update(sharded, optimizers[name]))
        return forward_s + update_s, update_s

    for name in NAMES:  # makes the state
        take_step(name)
    for number in range(config["rounds"]):
        for turn in range(len(NAMES)):
            name = NAMES[(turn + number) % len(NAMES)]
            for key, seconds in zip(("step_s", "update_s"), take_step(name), strict=True):
                sides[name][key].append(seconds)
    for name, optimizer in optimizers.items():
        state = [value for of_weight in optimizer.state.values() for value in of_weight.values() if torch.is_tensor(value)]
        sides[name]["state_bytes"] = max(gather_objects(sum(local_tensor(value).nbytes for value in state)))
        folder, settings = Path(config["work_folder"]) / name, CheckpointConfig(async_save=False)
        writer = CheckpointWriter(folder, sharded, optimizer, IDENTITY, settings, GOAL)
        writer.save(TrainState(step=1))
        save = writer.finish()
        assert save is not None
        sides[name]["checkpoint_bytes"] = save.num_bytes
    return {"num_parameters": num_parameters, "sides": sides}


def _side() -> None:
    from toolkit.distributed.comm import close_groups, rank

    figures = measure(json.loads(Path(sys.argv[1]).read_text()))
    if rank() == 0:
        print(json.dumps(figures), flush=True)
    close_groups()


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].endswith(".json"):
        _side()
    else:
        main()
