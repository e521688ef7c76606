"""The commands of `python -m toolkit` that also take the dotted flags of a recipe."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any


def add_plan(jobs: Any) -> None:
    """The arguments of `plan`."""
    plan = jobs.add_parser(
        "plan", allow_abbrev=False, help="predict each rank's memory, without a GPU; also takes a recipe's dotted flags"
    )
    plan.add_argument("--model", required=True, metavar="FOLDER_OR_ID", help="the model; its config.json is enough")
    plan.add_argument(
        "--accelerate-config", type=Path, required=True, metavar="PRESET.yaml", help="accelerate YAML of the launch"
    )
    plan.add_argument("--num-processes", type=int, required=True, help="number of ranks, one per GPU")
    plan.add_argument("--config", metavar="RUN.yaml", help="run YAML (default: micro-batches of one row of 1,024 tokens)")
    plan.add_argument("--recipe", choices=["llm", "t5"], help="recipe of the run (default: by the model)")
    plan.add_argument("--gpu-memory-gib", type=float, default=80.0, help="memory of one GPU (default: 80), 0.92 of it usable")
    plan.add_argument("--json", action="store_true", help="print the memory plan as JSON")
    plan.set_defaults(do=_plan)


def _plan(arguments: Namespace, run_flags: list[str]) -> bool:
    from toolkit.tools.plan.report import show_plan  # torch takes seconds to import

    return show_plan(
        arguments.model,
        arguments.accelerate_config,
        arguments.num_processes,
        ([f"--config={arguments.config}"] if arguments.config else []) + run_flags,
        recipe=arguments.recipe,
        gpu_memory_gib=arguments.gpu_memory_gib,
        as_json=arguments.json,
    )


def add_preview(jobs: Any) -> None:
    """The arguments of `preview`."""
    preview = jobs.add_parser(
        "preview",
        allow_abbrev=False,
        help="show the rows of a run as the model will see them; also takes a recipe's dotted flags",
    )
    preview.add_argument("--config", action="append", default=[], metavar="RUN.yaml", help="the run YAML")
    preview.add_argument("--recipe", choices=["llm", "t5"], help="recipe of the run (default: by the model)")
    preview.add_argument(
        "--accelerate-config", type=Path, metavar="PRESET.yaml", help="accelerate YAML of the launch, for its number of processes"
    )
    preview.add_argument("--rows", dest="num_rows", type=int, default=3, metavar="N", help="rows to show (default: 3)")
    preview.add_argument("--row", dest="row_id", type=int, metavar="ID", help="show this row alone, in full length")
    preview.add_argument("--html", type=Path, metavar="FILE", help="write a page instead of printing")
    preview.set_defaults(do=_preview)


def _preview(arguments: Namespace, run_flags: list[str]) -> bool:
    from toolkit.tools.preview.preview import preview  # torch takes seconds to import

    preview(run_flags, **_as_arguments(arguments))
    return True


def add_verify(jobs: Any) -> None:
    """The arguments of `verify`."""
    verify = jobs.add_parser(
        "verify", allow_abbrev=False, help="prove on this machine what a run relies on; also takes a recipe's dotted flags"
    )
    verify.add_argument(
        "--model", metavar="FOLDER_OR_ID", help="model to verify with (default: that of --config, else a small T5)"
    )
    verify.add_argument("--config", metavar="RUN.yaml", help="run YAML (default: rows of docstrings)")
    verify.add_argument("--recipe", choices=["llm", "t5"], help="recipe to run (default: by the model)")
    verify.add_argument(
        "--presets",
        type=lambda names: names.split(","),
        metavar="A,B",
        help="names or paths of presets, in addition to DDP (default: fsdp2_full_shard)",
    )
    verify.add_argument("--num-processes", type=int, help="number of ranks (default: the GPUs of this machine, else 2)")
    verify.add_argument("--use-cpu", action="store_true", help="run on the CPU even if there are GPUs")
    verify.add_argument("--bf16", action="store_true", help="add a run in bf16, compared with fp32 to 5 %%")
    verify.add_argument(
        "--tolerance", type=float, default=1e-5, help="largest relative difference of losses and gradients (default: 1e-5)"
    )
    verify.add_argument(
        "--output", type=Path, default=Path("runs/verify"), metavar="FOLDER", help="folder of the table (default: runs/verify)"
    )
    verify.set_defaults(do=_verify)


def _verify(arguments: Namespace, run_flags: list[str]) -> bool:
    from toolkit.tools.verify.verify import verify

    return verify(run_flags, **_as_arguments(arguments))


def _as_arguments(arguments: Namespace) -> dict[str, Any]:
    """The options of a command as arguments of its function."""
    return {name: value for name, value in vars(arguments).items() if name not in ("job", "do")}
