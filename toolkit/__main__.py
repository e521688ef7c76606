"""`python -m toolkit`: what is done beside a run.

check FILE.yaml    check an accelerate YAML strictly
"""

from __future__ import annotations

import argparse
from pathlib import Path

from toolkit.accelerate_yaml import check_accelerate_yaml
from toolkit.errors import exit_on_user_error


def main() -> None:
    """Read the command line and do the one job it names."""
    parser = argparse.ArgumentParser(prog="python -m toolkit", description="What is done beside a run.")
    jobs = parser.add_subparsers(dest="job", required=True)
    check = jobs.add_parser("check", help="check an accelerate YAML: unknown keys, wrong values, keys that are ignored")
    check.add_argument("file", type=Path, help="the accelerate YAML")
    arguments = parser.parse_args()
    with exit_on_user_error():
        check_accelerate_yaml(arguments.file)
        print(f"{arguments.file} is fine")


if __name__ == "__main__":
    main()
