"""`record.json` in the run folder: what a report needs and only the run itself knows.

These are the versions, the command, the shard units, the data in figures, and the sources of the evaluated rows, whose
predictions are files already.
"""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from toolkit.config.load import RecipeConfig
from toolkit.data.preview.summary import summarize
from toolkit.data.tokens.prepare import TokenizedRows
from toolkit.distributed.comm import rank, world_size
from toolkit.evaluation.rows import EvaluationRows, even_places
from toolkit.files.durable import save_json, written_beside
from toolkit.launch.accelerate_yaml import find_accelerate_yaml
from toolkit.launch.same_run import installed_versions
from toolkit.parallel.units import ShardUnit

logger = logging.getLogger("toolkit")

RECORD_FILE = "record.json"
MOST_PREDICTIONS = 1000
"""Rows whose texts a page shows, at even distances."""
MOST_TOKENS_SUMMARIZED = 10**9
"""Counting these takes seconds, before the first step."""
LONGEST_TEXT = 4000
"""Characters of a text on a page."""


def save_record(run_folder: Path, units: Sequence[ShardUnit], about_rows: Callable[[], dict[str, Any]] = dict) -> None:
    """Write `record.json` on rank 0. What fails there is a warning: a run is worth more than its report.

    Args:
        about_rows: its part about the rows, `describe_rows`.
    """
    if rank() != 0:
        return
    try:
        record = {
            "versions": installed_versions(),
            "command": _command(),
            "num_processes": world_size(),
            "units": _describe_units(units),
            **about_rows(),
        }
        with written_beside(run_folder / RECORD_FILE) as beside:
            save_json(beside, record)
    except Exception as error:
        logger.warning(f"{run_folder / RECORD_FILE} could not be written ({error}): the report lacks what it holds")


def describe_rows(config: RecipeConfig, rows: TokenizedRows, evaluation: EvaluationRows) -> dict[str, Any]:
    """What `preview` says of all rows, but examples of duplicates, and the sources of the rows that texts are generated for."""
    num_tokens = rows.train.with_format("numpy")["num_tokens"][:].sum()
    about: dict[str, Any] = {"data": {}, "sources": {}}
    if 0 < num_tokens <= MOST_TOKENS_SUMMARIZED:
        summary = summarize(rows, evaluation.rows, config.data, config.model.name_or_path, finds_duplicates=False)
        about["data"] = summary.as_dict()
    if config.eval.generate and evaluation.prompted:
        about["sources"] = _sources(evaluation)
    return about


def _sources(evaluation: EvaluationRows) -> dict[str, str]:
    """The source text of each row that a page shows, by its `row_id`."""
    places = [evaluation.prompted[i] for i in even_places(len(evaluation.prompted), MOST_PREDICTIONS)]
    columns = evaluation.rows.select(places).select_columns(["row_id", "lead_text"])
    # A character more than a page shows, so that it is seen to be cut.
    return {str(row["row_id"]): row["lead_text"][: LONGEST_TEXT + 1] for row in columns}


def _command() -> str | None:
    """The command that began this process; None in a notebook or another program."""
    if not sys.argv[0].endswith(".py") or Path(sys.argv[0]).name == "ipykernel_launcher.py":
        return None
    preset = find_accelerate_yaml()
    launch = ["accelerate", "launch", "--config_file", str(preset)] if preset else ["python"]
    return shlex.join([*launch, *sys.argv])


def _describe_units(units: Sequence[ShardUnit]) -> list[dict[str, Any]]:
    """The kinds of units; equal ones share an entry."""
    kinds: dict[tuple, list[ShardUnit]] = {}
    for unit in units:
        kinds.setdefault((unit.class_name, unit.num_parameters, unit.num_trainable, unit.dtypes), []).append(unit)
    return [
        {
            "unit": class_name if len(equal) > 1 else f"{class_name} {equal[0].name or '(the rest)'}",
            "count": len(equal),
            "num_parameters": num,
            "num_trainable": num_trainable,
            "dtypes": list(dtypes),
            "bytes_on_rank_0": sum(unit.local_bytes() for unit in equal),
        }
        for (class_name, num, num_trainable, dtypes), equal in kinds.items()
    ]
