"""`python -m toolkit`: the command line of the tools; `--help` lists them, and for each its arguments."""

import argparse
import errno
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from toolkit.errors import UserError, exit_on_user_error, one_line
from toolkit.launch.accelerate_yaml import check_accelerate_yaml
from toolkit.launch.log import lost_outputs, start_logging
from toolkit.tools.recipes import OF_PAIRS, RECIPES, recipes

WITH_RUN_FLAGS = ("export", "plan", "preview", "train", "verify")
"""Commands that also take the dotted flags of a recipe."""
OF_TEXTS = sorted([*RECIPES.values(), *OF_PAIRS.values()])
"""Recipes that these commands know."""

AddCommand = Callable[..., Any]
"""Adds a command: its name, the `module:function` of `toolkit.tools` that it calls, and its help; returns its parser."""


def main() -> None:
    """Read the command line and run the command: a function that takes its options by name, after the recipe's flags."""
    parser, argv = build_parser(), sys.argv[1:]
    # argparse would interpret `compare`'s `--` itself.
    place = argv.index("--") if argv[:1] == ["compare"] and "--" in argv else len(argv)
    arguments, run_flags = parser.parse_known_args(argv[:place])
    if run_flags and arguments.job not in WITH_RUN_FLAGS:
        hint = ": write the recipe and its flags after --" if arguments.job == "compare" else ""
        parser.error(f"unrecognized arguments: {' '.join(run_flags)}{hint}")
    options = {name: value for name, value in vars(arguments).items() if name not in ("job", "do")}
    with exit_on_user_error():
        start_logging()
        before = [run_flags] if arguments.job in WITH_RUN_FLAGS else [argv[place + 1 :]] if arguments.job == "compare" else []
        module, _, function = arguments.do.partition(":")
        is_well = getattr(import_module(f"toolkit.tools.{module}"), function)(*before, **options)
        sys.stdout.flush()
        reason = lost_outputs().get("stdout")
        if reason not in (None, os.strerror(errno.EPIPE)):  # a broken pipe is a reader that has seen enough, as `head`
            raise UserError(f"standard output cannot be written ({reason}): make room there, or print to another place")
    if is_well is False:
        raise SystemExit(1)  # what `checkpoints`, `plan`, `compare` or `verify` checks is not well


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    prog = "shardtune" if Path(sys.argv[0]).name == "shardtune" else "python -m toolkit"
    parser = argparse.ArgumentParser(prog=prog, description="Commands beside a training run.")
    jobs = parser.add_subparsers(dest="job", required=True)

    def add_command(name: str, do: str, about: str, **more: Any) -> argparse.ArgumentParser:
        command = jobs.add_parser(name, allow_abbrev=False, help=about, **more)
        command.set_defaults(do=do)  # imported when it runs: torch takes seconds
        return command

    _add_before_a_run(add_command)
    _add_beside_a_run(add_command)
    _add_comparisons(add_command)
    return parser


def _add_before_a_run(add_command: AddCommand) -> None:
    about = "check an accelerate YAML for unknown keys, wrong values and ignored keys"
    add_command("check", "main:_check", about).add_argument("file", type=Path, help="the accelerate YAML")

    add = add_command(
        "init", "recipes:init", "copy a recipe, its configs and the presets into a project of your own"
    ).add_argument
    add("folder", type=Path, metavar="DIR", help="the project's folder; it may exist")
    add("--recipe", choices=recipes(), default="t5", help="which recipe (default: t5)")

    add_command("ls", "recipes:list_shipped", "list the recipes, configs and presets that come with the toolkit")

    about = "predict each rank's memory, without a GPU; also takes a recipe's dotted flags"
    add = add_command("plan", "plan.plan:show_plan", about).add_argument
    add("--model", required=True, metavar="FOLDER_OR_ID", help="the model; its config.json is enough")
    add("--accelerate-config", type=Path, required=True, metavar="PRESET.yaml", help="accelerate YAML of the launch")
    add("--num-processes", type=_at_least(1), required=True, help="number of ranks, one per GPU")
    add("--config", metavar="RUN.yaml", help="run YAML (default: micro-batches of one row of the recipe's default length)")
    add("--recipe", choices=OF_TEXTS, help="recipe of the run (default: by the model)")
    add("--gpu-memory-gib", type=float, default=80.0, help="memory of one GPU (default: 80), 0.92 of it usable")
    add("--json", dest="as_json", action="store_true", help="print the memory plan as JSON")

    about = "show the rows of a run as the model will see them; also takes a recipe's dotted flags"
    add = add_command("preview", "preview.preview:preview", about).add_argument
    add("--config", action="append", default=[], metavar="RUN.yaml", help="the run YAML")
    add("--recipe", choices=OF_TEXTS, help="recipe of the run (default: by the model)")
    launch = "accelerate YAML of the launch, for its number of processes"
    add("--accelerate-config", type=Path, metavar="PRESET.yaml", help=launch)
    add("--rows", dest="num_rows", type=_at_least(0), default=3, metavar="N", help="rows to show (default: 3)")
    add("--row", dest="row_id", type=int, metavar="ID", help="show this row alone, in full length")
    add("--html", type=Path, metavar="FILE", help="write a page instead of printing")

    about = "choose a preset that fits this machine's GPUs, and start the recipe; also takes its dotted flags"
    add = add_command("train", "train:train", about).add_argument
    add("config", metavar="RUN.yaml", help="the run YAML")
    add("--preset", metavar="NAME", help="name in accelerate_configs/ or a file (default: the fastest that fits)")
    add("--recipe", choices=OF_TEXTS, help="recipe to start (default: the run YAML's, else by the model)")
    processes = "number of ranks (default: one per GPU; with --preset on a CPU, its own)"
    add("--num-processes", type=_at_least(1), metavar="N", help=processes)
    _add_precision(add, "the run (default: the preset's)")
    add("--dry-run", action="store_true", help="print the `accelerate launch` line, and start nothing")


def _add_beside_a_run(add_command: AddCommand) -> None:
    about = "list a run's checkpoints; exits 1 if one is not valid"
    add = add_command("checkpoints", "checkpoints:show_checkpoints", about).add_argument
    add("run_folder", type=Path, metavar="RUN_FOLDER", help="a run's folder, as in runs/t5_functions")
    add("--verify", action="store_true", help="also hash every file, instead of only comparing sizes")
    add("--json", dest="as_json", action="store_true", help="print a JSON list instead of the table")

    about = "write a checkpoint as a Hugging Face folder; also under accelerate launch -m"
    add = add_command("export", "export:export", about).add_argument
    add("run_folder", type=Path, metavar="RUN_FOLDER", help="a run's folder, as in runs/t5_functions")
    add("--checkpoint", metavar="STEP|best|last", help="which one (default: as the run's export.weights)")
    add("--merge", action="store_true", help="the model with the adapter merged into it, not the adapter")
    add("--dtype", choices=["float32", "bfloat16", "float16"], help="of the files (default: as it was trained)")
    add("--to", type=Path, metavar="FOLDER", help="a new folder (default: export-STEP in the run's)")
    add("--push-to-hub", metavar="NAMESPACE/NAME", help="upload it to this repository of the Hugging Face hub")
    add("--private", action="store_true", help="with --push-to-hub: a private repository")

    about = "write summaries or answers with a trained model; also under accelerate launch -m"
    parser = add_command("generate", "generate.generate:run", about)
    add, add_text = parser.add_argument, parser.add_mutually_exclusive_group(required=True).add_argument
    add("model", metavar="MODEL_OR_RUN", help="a run's folder, an export, or a folder or id of transformers")
    add_text("--file", metavar="FILE", help="a file of a kind that runs read; - for standard input, one text per line")
    add_text("--text", dest="texts", action="append", default=[], metavar="TEXT", help="a text; may be given several times")
    add_text("--chat", dest="is_chat", action="store_true", help="talk to a causal model in the terminal")
    add("--column", metavar="NAME", help="column of --file (default: the run's, else a usual name)")
    add("--csv-delimiter", metavar="C", help="between the cells of a .csv (default: the run's, else a comma)")
    add("--encoding", metavar="NAME", help="of --file (default: UTF-8 if the file is that, else the run's)")
    add("--plain", action="store_true", help="a text is the prompt itself, not a user's turn of a chat")
    add("--output", type=Path, metavar="OUT.jsonl", help="file of the texts (default: print them)")
    add("--batch-size-rows", type=_at_least(1), metavar="N", help="rows at once (default: the run's evaluations')")
    add("--max-new-tokens", type=_at_least(1), metavar="N", help="longest text (default: the run's)")
    add("--num-beams", type=_at_least(1), metavar="N", help="beams (default: the run's)")
    add("--dtype", choices=["float32", "bfloat16"], help="of the model (default: the run's)")

    about = "write a page that shows a run, or several beside each other; --text prints its tables"
    add = add_command("report", "main:_report", about).add_argument
    add("run_folders", nargs="+", type=Path, metavar="RUN_FOLDER", help="runs' folders, as in runs/t5_functions")
    add("--text", action="store_true", help="print first and last evaluations and planned beside measured memory, write no page")
    add("--output", type=Path, metavar="FILE.html", help="the page (default: report.html, in the folder of one run)")


def _add_comparisons(add_command: AddCommand) -> None:
    add = add_command(
        "compare",
        "compare.runs:compare",
        "run a recipe under several presets, one after the other; writes a table and a picture",
        usage="%(prog)s --presets A,B,C [options] -- RECIPE.py --config RUN.yaml …",
        description="compare sets the recipe's run folder, length and log_every_steps. Write its other flags after --.",
    ).add_argument
    changes = "names in accelerate_configs/ or files, optionally with changes: fsdp2_size_wrap:fsdp_min_num_params=50000"
    add("--presets", required=True, type=_listed, metavar="A,B,C", help=changes)
    processes = "number of ranks (default: each preset's, at most the GPUs)"
    add("--num-processes", type=_at_least(1), metavar="N", help=processes)
    add("--use-cpu", action="store_true", help="run GPU presets on CPU processes too")
    _add_precision(add, "all runs (default: each preset's)")
    add("--steps", dest="num_steps", type=_at_least(1), default=20, metavar="N", help="optimizer updates per run (default: 20)")
    add("--warmup-steps", type=_at_least(0), default=5, metavar="N", help="first steps that are not timed (default: 5)")
    new = Path("runs", f"compare-{time.strftime('%Y%m%d-%H%M%S')}")
    add("--output", type=Path, default=new, metavar="FOLDER", help="a new folder (default: runs/compare-DATE-TIME)")

    about = "prove on this machine what a run relies on; also takes a recipe's dotted flags"
    add = add_command("verify", "verify.verify:verify", about).add_argument
    add("--model", metavar="FOLDER_OR_ID", help="model to verify with (default: that of --config, else a small T5)")
    add("--config", metavar="RUN.yaml", help="run YAML (default: rows of docstrings)")
    add("--recipe", choices=OF_TEXTS, help="recipe to run (default: by the model)")
    presets = "names or paths of presets, in addition to DDP (default: fsdp2_full_shard)"
    add("--presets", type=_listed, metavar="A,B", help=presets)
    add("--num-processes", type=_at_least(1), help="number of ranks (default: the GPUs of this machine, else 2)")
    add("--use-cpu", action="store_true", help="run on the CPU even if there are GPUs")
    add("--bf16", action="store_true", help="add a run in bf16, compared with fp32 to 5 %%")
    add("--sharded", action="store_true", help="for a model that no process holds alone: compare with FSDP2 on one process fewer")
    add("--tolerance", type=float, default=1e-5, help="largest relative difference of losses and gradients (default: 1e-5)")
    add("--output", type=Path, default=Path("runs/verify"), metavar="FOLDER", help="folder of the table (default: runs/verify)")


def _add_precision(add: Any, of: str) -> None:
    add("--mixed_precision", "--mixed-precision", choices=["no", "bf16"], help=f"precision of {of}")


def _at_least(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"it is {text}: give a whole number, {least} or more")
        return int(text)

    return read


def _listed(names: str) -> list[str]:
    if not (listed := [name for name in names.split(",") if name]):
        raise argparse.ArgumentTypeError("it is empty: give names in accelerate_configs/, as in ddp_cpu,fsdp2_cpu")
    return listed


def _check(file: Path) -> None:
    from toolkit.launch.environment import slow_bf16

    slow = slow_bf16(check_accelerate_yaml(file))
    print(one_line(f"{file} is fine{f', but slow here: {slow}' if slow else ''}"))


def _report(run_folders: list[Path], text: bool, output: Path | None) -> None:
    if text:
        from toolkit.tools.report.terminal import show_runs

        if output is not None:
            raise UserError(f"--output is {output}, but --text writes no page: leave one of them out")
        return show_runs(run_folders)
    from toolkit.tools.report.page import REPORT_FILE, save_page

    path = output or (run_folders[0] / REPORT_FILE if len(run_folders) == 1 else Path(REPORT_FILE))
    save_page(run_folders, path)
    print(one_line(f"{path} shows {', '.join(map(str, run_folders))}: open it in a browser"))
