"""`python -m toolkit`: what is done beside a run.

check FILE.yaml           check an accelerate YAML strictly
checkpoints RUN_FOLDER    one table of a run's checkpoints and whether each is whole; exits 1 where one is not
compare --presets A,B -- RECIPE …  one recipe under several presets: time, memory, loss, saving; exits 1 where one fails
plan --model M …          what each rank of a run would need, and whether it fits; exits 1 where it does not
presets [--write] FOLDER  check the tables of presets in the folder's README.md, or write them
results RUN_FOLDER...     one table of what several runs came to, and the plan's memory beside theirs
verify --model M …        prove on this box, by short runs, what a run relies on; exits 1 where something is not as it must be
"""

from __future__ import annotations

import argparse
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from toolkit.cli.checkpoints import show_checkpoints
from toolkit.cli.presets.page import update_choice
from toolkit.errors import UserError, exit_on_user_error
from toolkit.launch.accelerate_yaml import check_accelerate_yaml, update_preset_table

EXIT_NOT_VALID = 1
"""What `checkpoints` exits with where a folder named like a checkpoint is not valid, `plan` where a run does not fit, `compare`
where a preset fails, and `verify` where a check fails."""
WITH_RUN_FLAGS = ("plan", "verify")
"""Jobs that take the dotted flags of a recipe beside their own."""


def main() -> None:
    """Read the command line and do the one job it names. Each job is a function below that returns whether all is well."""
    parser = argparse.ArgumentParser(prog="python -m toolkit", description="What is done beside a run.")
    jobs = parser.add_subparsers(dest="job", required=True)
    for add in (_add_check, _add_checkpoints, _add_compare, _add_plan, _add_presets, _add_results, _add_verify):
        add(jobs)
    own, recipe = _split_at_recipe(sys.argv[1:])
    arguments, run_flags = parser.parse_known_args(own)
    if run_flags and arguments.job not in WITH_RUN_FLAGS:
        hint = ": the recipe and its flags stand after --" if arguments.job == "compare" else ""
        parser.error(f"unrecognized arguments: {' '.join(run_flags)}{hint}")
    with exit_on_user_error():
        is_well = arguments.do(arguments, recipe if arguments.job == "compare" else run_flags)
    if not is_well:
        raise SystemExit(EXIT_NOT_VALID)


def _split_at_recipe(argv: list[str]) -> tuple[list[str], list[str]]:
    """What stands before and after the first `--`, which argparse would take for one of its own."""
    if argv[:1] != ["compare"] or "--" not in argv:
        return argv, []
    place = argv.index("--")
    return argv[:place], argv[place + 1 :]


def _add_check(jobs: Any) -> None:
    check = jobs.add_parser("check", help="check an accelerate YAML: unknown keys, wrong values, keys that are ignored")
    check.add_argument("file", type=Path, help="the accelerate YAML")
    check.set_defaults(do=_check)


def _check(arguments: Namespace, _: list[str]) -> bool:
    check_accelerate_yaml(arguments.file)
    print(f"{arguments.file} is fine")
    return True


def _add_checkpoints(jobs: Any) -> None:
    checkpoints = jobs.add_parser("checkpoints", help="one table of a run's checkpoints; exits 1 where one is not valid")
    checkpoints.add_argument("run_folder", type=Path, metavar="RUN_FOLDER", help="as in runs/t5_docstrings")
    checkpoints.add_argument("--verify", action="store_true", help="hash every file again, not only compare its size")
    checkpoints.add_argument("--json", action="store_true", help="print a JSON list instead of the table")
    checkpoints.set_defaults(do=lambda arguments, _: show_checkpoints(arguments.run_folder, arguments.verify, arguments.json))


def _add_compare(jobs: Any) -> None:
    compare = jobs.add_parser(
        "compare",
        allow_abbrev=False,
        help="one recipe under several presets, one after the other: a table and a picture",
        usage="%(prog)s --presets A,B,C [options] -- RECIPE.py --config RUN.yaml …",
        description="The recipe's run folder, length and log_every_steps are set for it; all else stands after --.",
    )
    compare.add_argument(
        "--presets",
        required=True,
        metavar="A,B,C",
        help="names in accelerate_configs/ or files, each with changes if need be: fsdp2_size_wrap:fsdp_min_num_params=50000",
    )
    compare.add_argument("--num-processes", type=int, metavar="N", help="unset: as each preset says, or the GPUs there are")
    compare.add_argument("--use-cpu", action="store_true", help="run presets for GPUs on CPU processes too")
    compare.add_argument("--mixed-precision", choices=["no", "bf16"], help="for all of them; unset: as each preset says")
    compare.add_argument("--steps", type=int, default=20, metavar="N", help="optimizer updates of each run (20)")
    compare.add_argument("--warmup-steps", type=int, default=5, metavar="N", help="of them, first ones that are not timed (5)")
    compare.add_argument("--output", type=Path, metavar="FOLDER", help="a new folder; unset: runs/compare-DATE-TIME")
    compare.set_defaults(do=_compare)


def _compare(arguments: Namespace, recipe: list[str]) -> bool:
    from toolkit.cli.compare.runs import Conditions, compare

    if not recipe:
        raise UserError("compare needs a recipe after its own options: add -- recipes/t5.py --config RUN.yaml")
    conditions = Conditions(
        command=recipe,
        num_steps=arguments.steps,
        warmup_steps=arguments.warmup_steps,
        num_processes=arguments.num_processes,
        use_cpu=arguments.use_cpu,
        mixed_precision=arguments.mixed_precision,
    )
    presets = [preset for preset in arguments.presets.split(",") if preset]
    return compare(presets, conditions, arguments.output or Path("runs", f"compare-{time.strftime('%Y%m%d-%H%M%S')}"))


def _add_plan(jobs: Any) -> None:
    plan = jobs.add_parser(
        "plan", allow_abbrev=False, help="memory of each rank before there is a GPU; dotted flags as of a recipe"
    )
    plan.add_argument("--model", required=True, metavar="FOLDER_OR_ID", help="its config.json is enough")
    plan.add_argument("--accelerate-config", type=Path, required=True, metavar="PRESET.yaml", help="as for accelerate launch")
    plan.add_argument("--num-processes", type=int, required=True, help="ranks, one a GPU")
    plan.add_argument("--config", metavar="RUN.yaml", help="run YAML; unset: one row of 1,024 tokens")
    plan.add_argument("--recipe", choices=["llm", "t5"], help="unset: by the model")
    plan.add_argument("--gpu-memory-gib", type=float, default=80.0, help="of one GPU (80); 0.92 of it counts as usable")
    plan.add_argument("--json", action="store_true", help="print all of it as JSON")
    plan.set_defaults(do=_plan)


def _plan(arguments: Namespace, run_flags: list[str]) -> bool:
    from toolkit.planning.report import show_plan  # torch takes seconds to import

    return show_plan(
        arguments.model,
        arguments.accelerate_config,
        arguments.num_processes,
        ([f"--config={arguments.config}"] if arguments.config else []) + run_flags,
        recipe=arguments.recipe,
        gpu_memory_gib=arguments.gpu_memory_gib,
        as_json=arguments.json,
    )


def _add_presets(jobs: Any) -> None:
    presets = jobs.add_parser("presets", help="see that the tables in a folder's README.md are those of its presets")
    presets.add_argument("folder", type=Path, metavar="FOLDER", help="as in accelerate_configs")
    presets.add_argument("--write", action="store_true", help="write the table, and the section of which preset to take")
    presets.add_argument("--plan", action="store_true", help="with --write: plan that section anew, which takes minutes")
    presets.set_defaults(do=_presets)


def _presets(arguments: Namespace, _: list[str]) -> bool:
    if arguments.plan and not arguments.write:
        raise UserError("--plan is given without --write: add it, a new plan is written")
    if arguments.plan:
        from toolkit.cli.presets.choice import save_choice  # torch takes seconds to import

        save_choice(arguments.folder)
    update_preset_table(arguments.folder, write=arguments.write)
    update_choice(arguments.folder, write=arguments.write)
    return True


def _add_results(jobs: Any) -> None:
    results = jobs.add_parser("results", help="one table of the first and the last evaluation of several runs")
    results.add_argument("run_folders", nargs="+", type=Path, metavar="RUN_FOLDER", help="as in runs/t5_docstrings")
    results.set_defaults(do=_results)


def _results(arguments: Namespace, _: list[str]) -> bool:
    from toolkit.cli.results import show_runs

    show_runs(arguments.run_folders)
    return True


def _add_verify(jobs: Any) -> None:
    verify = jobs.add_parser(
        "verify", allow_abbrev=False, help="prove on this box what a run relies on; dotted flags as of a recipe"
    )
    verify.add_argument("--model", metavar="FOLDER_OR_ID", help="unset: that of --config, else a small T5")
    verify.add_argument("--config", metavar="RUN.yaml", help="run YAML; unset: rows of docstrings")
    verify.add_argument("--recipe", choices=["llm", "t5"], help="unset: by the model")
    verify.add_argument(
        "--presets", type=lambda names: names.split(","), metavar="A,B", help="names or paths (fsdp2_full_shard), beside DDP"
    )
    verify.add_argument("--num-processes", type=int, help="unset: the GPUs of this box, else 2")
    verify.add_argument("--use-cpu", action="store_true", help="on the CPU, GPUs or not")
    verify.add_argument("--tolerance", type=float, default=1e-5, help="largest relative difference of losses, gradients (1e-5)")
    verify.add_argument("--output", type=Path, default=Path("runs/verify"), metavar="FOLDER", help="of the table (runs/verify)")
    verify.set_defaults(do=_verify)


def _verify(arguments: Namespace, run_flags: list[str]) -> bool:
    from toolkit.cli.verify.verify import verify

    return verify(run_flags, **{name: value for name, value in vars(arguments).items() if name not in ("job", "do")})
