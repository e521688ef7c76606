"""`python -m toolkit preview`: reads, tokenizes and plans as the run will, without process group or weights, and shows it."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console

from toolkit.errors import UserError, one_line
from toolkit.files.durable import written_beside
from toolkit.tools.preview.facts import collect
from toolkit.tools.preview.page import render_page
from toolkit.tools.preview.terminal import print_preview


def preview(
    run_arguments: list[str],
    *,
    config: list[str],
    accelerate_config: Path | None,
    recipe: str | None,
    num_rows: int,
    row_id: int | None,
    html: Path | None,
) -> None:
    """Print the view, or write it as a page.

    Args:
        run_arguments: dotted flags, as for a recipe.
        config: run YAMLs.
        accelerate_config: the accelerate YAML, for its number of processes; None: one process.
        recipe: `llm` or `t5`; None: by the model.
        num_rows: rows of the first step to show.
        row_id: show this row alone, in full length.
        html: the page.

    Raises:
        UserError: whatever the run itself would raise of its data; a row that is not there; a page that cannot be written.
    """
    run_arguments = [*(f"--config={file}" for file in config), *run_arguments]
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "preview runs as several processes: start it without accelerate launch, and give its YAML as --accelerate-config"
        )
    if num_rows < 0:
        raise UserError(f"--rows is {num_rows}: give 0 or more")
    if html is not None:
        _check_page(html)
    if html is None:
        return print_preview(collect(run_arguments, accelerate_config, recipe, num_rows, row_id), Console())
    found = collect(run_arguments, accelerate_config, recipe, num_rows, row_id)
    try:
        with written_beside(html) as beside:
            beside.write_text(render_page(found), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--html {html} cannot be written ({error.strerror}): make room there, or take another place") from None
    print(one_line(f"the page is {html}"))


def _check_page(html: Path) -> None:
    if html.is_dir() or not html.parent.is_dir() or not os.access(html.parent, os.W_OK):
        reason = "it is a folder" if html.is_dir() else f"{html.parent} is not a folder that can be written"
        raise UserError(f"--html {html} cannot be written ({reason}): give a file in a folder that exists")
