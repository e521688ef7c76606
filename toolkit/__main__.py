"""`python -m toolkit`: what is done beside a run.

check FILE.yaml           check an accelerate YAML strictly
checkpoints RUN_FOLDER    one table of a run's checkpoints and whether each is whole; exits 1 where one is not
presets [--write] FOLDER  check the table of presets in the folder's README.md against their headers, or write it
results RUN_FOLDER...     one table of what several runs came to
"""

from __future__ import annotations

import argparse
from pathlib import Path

from toolkit.accelerate_yaml import check_accelerate_yaml, update_preset_table
from toolkit.checkpoint_table import show_checkpoints
from toolkit.errors import exit_on_user_error

EXIT_NOT_VALID = 1
"""What `checkpoints` exits with where a folder named like a checkpoint is not valid."""


def main() -> None:
    """Read the command line and do the one job it names."""
    parser = argparse.ArgumentParser(prog="python -m toolkit", description="What is done beside a run.")
    jobs = parser.add_subparsers(dest="job", required=True)
    check = jobs.add_parser("check", help="check an accelerate YAML: unknown keys, wrong values, keys that are ignored")
    check.add_argument("file", type=Path, help="the accelerate YAML")
    checkpoints = jobs.add_parser("checkpoints", help="one table of a run's checkpoints; exits 1 where one is not valid")
    checkpoints.add_argument("run_folder", type=Path, metavar="RUN_FOLDER", help="as in runs/t5_docstrings")
    checkpoints.add_argument("--verify", action="store_true", help="hash every file again, not only compare its size")
    checkpoints.add_argument("--json", action="store_true", help="print a JSON list instead of the table")
    presets = jobs.add_parser("presets", help="see that the table in a folder's README.md is that of its presets' headers")
    presets.add_argument("folder", type=Path, metavar="FOLDER", help="as in accelerate_configs")
    presets.add_argument("--write", action="store_true", help="write the table")
    results = jobs.add_parser("results", help="one table of the first and the last evaluation of several runs")
    results.add_argument("run_folders", nargs="+", type=Path, metavar="RUN_FOLDER", help="as in runs/t5_docstrings")
    arguments = parser.parse_args()
    with exit_on_user_error():
        if arguments.job == "check":
            check_accelerate_yaml(arguments.file)
            print(f"{arguments.file} is fine")
        elif arguments.job == "presets":
            update_preset_table(arguments.folder, write=arguments.write)
        elif arguments.job == "checkpoints":
            if not show_checkpoints(arguments.run_folder, arguments.verify, arguments.json):
                raise SystemExit(EXIT_NOT_VALID)
        else:
            from toolkit.results import show_runs  # torch takes seconds to import

            show_runs(arguments.run_folders)


if __name__ == "__main__":
    main()
