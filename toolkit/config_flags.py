"""What jsonargparse leaves undone about flags of the command line."""

from __future__ import annotations

import argparse

from toolkit.config_errors import sentence
from toolkit.errors import UserError


def unset_counterparts(flags: list[str]) -> list[str]:
    """A run length given as a flag wins over the other kind of length in the YAML."""
    lengths = {"--train.max_steps", "--train.num_epochs"}
    given = {flag.split("=")[0] for flag in flags} & lengths
    return [f"{other}=null" for other in lengths - given] if len(given) == 1 else []


def split_files_and_flags(argv: list[str]) -> tuple[list[str], list[str]]:
    """The values of `--config`, and the rest: jsonargparse lets a file win over flags that stand before it."""
    splitter = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    splitter.add_argument("--config", action="append", default=[])
    try:
        known, flags = splitter.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(sentence(str(error), object, [], {})) from None
    return known.config, flags
