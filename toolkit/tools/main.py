"""`python -m toolkit`: the commands beside a training run.

check FILE.yaml           check an accelerate YAML strictly
checkpoints RUN_FOLDER    list a run's checkpoints and check that each is complete; exits 1 if one is not
compare --presets A,B -- RECIPE …  run a recipe under several presets: time, memory, loss, saving; exits 1 if one fails
export RUN_FOLDER         write any checkpoint of a run as a Hugging Face folder
generate MODEL_OR_RUN …   write summaries or answers with a trained model
plan --model M …          predict the memory that each rank of a run needs, and whether it fits; exits 1 if it does not
preview --config RUN.yaml  show rows, tokens, packs and lengths as the run will take them
report RUN_FOLDER...      write a page that shows a run, or several beside each other; --text prints one table
verify --model M …        prove by short runs on this machine what a run relies on; exits 1 if a check fails
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from toolkit.errors import UserError, exit_on_user_error, one_line
from toolkit.launch.accelerate_yaml import check_accelerate_yaml
from toolkit.launch.log import lost_outputs, start_logging
from toolkit.tools.checkpoints import show_checkpoints
from toolkit.tools.run_flags import add_plan, add_preview, add_verify

EXIT_NOT_VALID = 1
"""Exit code of `checkpoints` if a checkpoint is not valid, of `plan` if a run does not fit, of `compare` if a preset fails, and
of `verify` if a check fails."""
WITH_RUN_FLAGS = ("export", "plan", "preview", "verify")
"""Commands that also take the dotted flags of a recipe."""


def main() -> None:
    """Read the command line and run the command. Each command is a function below that returns whether it succeeded."""
    parser = argparse.ArgumentParser(prog="python -m toolkit", description="Commands beside a training run.")
    jobs = parser.add_subparsers(dest="job", required=True)
    for add in (
        _add_check,
        _add_checkpoints,
        _add_compare,
        _add_export,
        _add_generate,
        add_plan,
        add_preview,
        _add_report,
        add_verify,
    ):
        add(jobs)
    own, recipe = _split_at_recipe(sys.argv[1:])
    arguments, run_flags = parser.parse_known_args(own)
    if run_flags and arguments.job not in WITH_RUN_FLAGS:
        hint = ": write the recipe and its flags after --" if arguments.job == "compare" else ""
        parser.error(f"unrecognized arguments: {' '.join(run_flags)}{hint}")
    with exit_on_user_error():
        start_logging()
        is_well = arguments.do(arguments, recipe if arguments.job == "compare" else run_flags)
        sys.stdout.flush()
        reason = lost_outputs().get("stdout")
        if reason not in (None, os.strerror(errno.EPIPE)):  # a broken pipe is a reader that has seen enough, as `head`
            raise UserError(f"standard output cannot be written ({reason}): make room there, or print to another place")
    if not is_well:
        raise SystemExit(EXIT_NOT_VALID)


def _split_at_recipe(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split `compare`'s arguments at the first `--`, which argparse would interpret itself."""
    if argv[:1] != ["compare"] or "--" not in argv:
        return argv, []
    place = argv.index("--")
    return argv[:place], argv[place + 1 :]


def _add_check(jobs: Any) -> None:
    check = jobs.add_parser("check", help="check an accelerate YAML for unknown keys, wrong values and ignored keys")
    check.add_argument("file", type=Path, help="the accelerate YAML")
    check.set_defaults(do=_check)


def _check(arguments: Namespace, _: list[str]) -> bool:
    check_accelerate_yaml(arguments.file)
    print(one_line(f"{arguments.file} is fine"))
    return True


def _add_checkpoints(jobs: Any) -> None:
    checkpoints = jobs.add_parser("checkpoints", help="list a run's checkpoints; exits 1 if one is not valid")
    checkpoints.add_argument("run_folder", type=Path, metavar="RUN_FOLDER", help="a run's folder, as in runs/t5_docstrings")
    checkpoints.add_argument("--verify", action="store_true", help="also hash every file, instead of only comparing sizes")
    checkpoints.add_argument("--json", action="store_true", help="print a JSON list instead of the table")
    checkpoints.set_defaults(do=lambda arguments, _: show_checkpoints(arguments.run_folder, arguments.verify, arguments.json))


def _add_compare(jobs: Any) -> None:
    compare = jobs.add_parser(
        "compare",
        allow_abbrev=False,
        help="run a recipe under several presets, one after the other; writes a table and a picture",
        usage="%(prog)s --presets A,B,C [options] -- RECIPE.py --config RUN.yaml …",
        description="compare sets the recipe's run folder, length and log_every_steps. Write its other flags after --.",
    )
    compare.add_argument(
        "--presets",
        required=True,
        metavar="A,B,C",
        help="names in accelerate_configs/ or files, optionally with changes: fsdp2_size_wrap:fsdp_min_num_params=50000",
    )
    compare.add_argument(
        "--num-processes", type=int, metavar="N", help="number of ranks (default: each preset's, at most the GPUs)"
    )
    compare.add_argument("--use-cpu", action="store_true", help="run GPU presets on CPU processes too")
    compare.add_argument("--mixed-precision", choices=["no", "bf16"], help="precision of all runs (default: each preset's)")
    compare.add_argument("--steps", type=int, default=20, metavar="N", help="optimizer updates per run (default: 20)")
    compare.add_argument("--warmup-steps", type=int, default=5, metavar="N", help="first steps that are not timed (default: 5)")
    compare.add_argument("--output", type=Path, metavar="FOLDER", help="a new folder (default: runs/compare-DATE-TIME)")
    compare.set_defaults(do=_compare)


def _compare(arguments: Namespace, recipe: list[str]) -> bool:
    from toolkit.tools.compare.runs import Conditions, compare

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


def _add_export(jobs: Any) -> None:
    export = jobs.add_parser(
        "export", allow_abbrev=False, help="write a checkpoint as a Hugging Face folder; also under accelerate launch -m"
    )
    export.add_argument("run_folder", type=Path, metavar="RUN_FOLDER", help="a run's folder, as in runs/t5_docstrings")
    export.add_argument("--checkpoint", metavar="STEP|best|last", help="which one (default: as the run's export.weights)")
    export.add_argument("--merge", action="store_true", help="the model with the adapter merged into it, not the adapter")
    export.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of the files (default: as it was trained)")
    export.add_argument("--to", type=Path, metavar="FOLDER", help="a new folder (default: export-STEP in the run's)")
    export.set_defaults(do=_export)


def _export(arguments: Namespace, run_flags: list[str]) -> bool:
    from toolkit.tools.export.choose import Options  # torch takes seconds to import
    from toolkit.tools.export.export import export

    export(Options(flags=run_flags, **{name: value for name, value in vars(arguments).items() if name not in ("job", "do")}))
    return True


def _add_generate(jobs: Any) -> None:
    generate = jobs.add_parser(
        "generate", allow_abbrev=False, help="write summaries or answers with a trained model; also under accelerate launch -m"
    )
    generate.add_argument("model", metavar="MODEL_OR_RUN", help="a run's folder, an export, or a folder or id of transformers")
    given = generate.add_mutually_exclusive_group(required=True)
    given.add_argument("--file", metavar="FILE", help="a file of a kind that runs read; - for standard input, one text per line")
    given.add_argument("--text", action="append", default=[], metavar="TEXT", help="a text; may be given several times")
    given.add_argument("--chat", action="store_true", help="talk to a causal model in the terminal")
    generate.add_argument("--column", metavar="NAME", help="column of --file (default: the run's, else a usual name)")
    generate.add_argument("--csv-delimiter", metavar="C", help="between the cells of a .csv (default: the run's, else a comma)")
    generate.add_argument("--encoding", metavar="NAME", help="of --file (default: UTF-8 if the file is that, else the run's)")
    generate.add_argument("--plain", action="store_true", help="a text is the prompt itself, not a user's turn of a chat")
    generate.add_argument("--output", type=Path, metavar="OUT.jsonl", help="file of the texts (default: print them)")
    generate.add_argument("--batch-size-rows", type=int, metavar="N", help="rows at once (default: the run's evaluations')")
    generate.add_argument("--max-new-tokens", type=int, metavar="N", help="longest text (default: the run's)")
    generate.add_argument("--num-beams", type=int, metavar="N", help="beams (default: the run's)")
    generate.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the model (default: the run's)")
    generate.set_defaults(do=_generate)


def _generate(arguments: Namespace, _: list[str]) -> bool:
    from toolkit.tools.generate.chat import chat
    from toolkit.tools.generate.generate import Options, generate

    given = {"max_new_tokens": arguments.max_new_tokens, "num_beams": arguments.num_beams}
    for name, number in (*given.items(), ("batch_size_rows", arguments.batch_size_rows)):
        if number is not None and number < 1:
            raise UserError(f"--{name.replace('_', '-')} is {number}: give at least 1")
    settings = {name: value for name, value in given.items() if value is not None}
    if arguments.chat:
        chat(arguments.model, arguments.dtype, settings)
        return True
    names = ("model", "file", "column", "csv_delimiter", "encoding", "plain", "output", "batch_size_rows", "dtype")
    generate(Options(texts=arguments.text, settings=settings, **{name: getattr(arguments, name) for name in names}))
    return True


def _add_report(jobs: Any) -> None:
    report = jobs.add_parser(
        "report", help="write a page that shows a run, or several beside each other; --text prints one table"
    )
    report.add_argument("run_folders", nargs="+", type=Path, metavar="RUN_FOLDER", help="runs' folders, as in runs/t5_docstrings")
    report.add_argument(
        "--text", action="store_true", help="print first and last evaluations and planned beside measured memory, write no page"
    )
    report.add_argument(
        "--output", type=Path, metavar="FILE.html", help="the page (default: report.html, in the folder of one run)"
    )
    report.set_defaults(do=_report)


def _report(arguments: Namespace, _: list[str]) -> bool:
    folders, output = arguments.run_folders, arguments.output
    if arguments.text:
        from toolkit.tools.report.text import show_runs

        if output is not None:
            raise UserError(f"--output is {output}, but --text writes no page: leave one of them out")
        show_runs(folders)
        return True
    from toolkit.tools.report.page import REPORT_FILE, save_page

    path = output or (folders[0] / REPORT_FILE if len(folders) == 1 else Path(REPORT_FILE))
    save_page(folders, path)
    print(one_line(f"{path} shows {', '.join(map(str, folders))}: open it in a browser"))
    return True
