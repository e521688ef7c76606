"""Renders the section "Which preset?" of the presets' README.md from the planner's results.

Planning takes minutes, so its results are kept in `which_preset.json` with a hash of everything they depend on. The page can then
be checked within a second, and outdated results are reported.
"""

from __future__ import annotations

import ast
import hashlib
import json
from pathlib import Path
from typing import Any

from toolkit.errors import UserError

CHOICE_FILE = "which_preset.json"
CHOICE_BEGIN, CHOICE_END = "<!-- begin: made from which_preset.json -->\n", "<!-- end -->"
PLANNED_PRESETS = (
    "single", "ddp", "fsdp2_shard_grad_op", "fsdp2_full_shard", "fsdp2_activation_checkpointing", "fsdp2_offload",
)  # fmt: skip
"""Presets that the section chooses among. Its meshes over several machines are derived from them."""
_SOURCES = ("cli/presets/choice", *(f"planning/{name}" for name in ("kernels", "peak", "strategy", "subject", "trace")))


def update_choice(folder: Path, *, write: bool) -> None:
    """Write the section between its two marks in the folder's README.md, or, without `write`, check that it is up to date. Does
    nothing in a folder without results.

    Raises:
        UserError: the results are out of date, the marks are missing or, without `write`, the section is out of date.
    """
    found, page = folder / CHOICE_FILE, folder / "README.md"
    if not found.is_file():
        return
    choice = json.loads(found.read_text(encoding="utf-8"))
    if choice["inputs"] != hash_inputs(folder):
        raise UserError(
            f"{found}: the planner or a preset has changed since; run `python -m toolkit presets --write --plan {folder}`, which "
            "takes minutes"
        )
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    before, begin, rest = text.partition(CHOICE_BEGIN)
    _, end, after = rest.partition(CHOICE_END)
    if not end:
        raise UserError(f"{page}: has no lines {CHOICE_BEGIN.strip()} and {CHOICE_END}, between which the section stands")
    updated = before + begin + choice_table(choice["cells"]) + end + after
    if write:
        page.write_text(updated, encoding="utf-8")
    elif updated != text:
        raise UserError(f"{page}: its section is not that of {CHOICE_FILE}; run `python -m toolkit presets --write {folder}`")


def choice_table(cells: list[dict[str, Any]]) -> str:
    """A Markdown table with a row per model and way of training, and a column per number of GPUs."""
    columns = sorted({cell["num_gpus"] for cell in cells})
    names = list(dict.fromkeys((cell["model"], cell["way"]) for cell in cells))
    by_place = {(cell["model"], cell["way"], cell["num_gpus"]): cell for cell in cells}
    lines = [
        ["Model", "Trained", *(f"{num} GPU{'s' if num > 1 else ''}" for num in columns)],
        ["---"] * (2 + len(columns)),
        *([model, way, *(_cell(by_place[model, way, num]) for num in columns)] for model, way in names),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def hash_inputs(folder: Path) -> str:
    """sha256 of the planner's code, without comments and docstrings, and of the settings of the presets it chooses among."""
    import yaml

    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update(_code_of(Path(__file__).parents[2] / f"{name}.py").encode())
    for path in (folder / f"{preset}.yaml" for preset in PLANNED_PRESETS):
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
        digest.update(json.dumps([path.name, settings], sort_keys=True).encode())
    return digest.hexdigest()


def _cell(cell: dict[str, Any]) -> str:
    if cell["preset"] is None:
        return "does not fit"
    rows = f"{cell['rows']:,} row{'' if cell['rows'] == 1 else 's'}"
    return f"{cell['preset']}: {cell['peak_bytes'] / 2**30:.1f} GiB; {rows}"


def _code_of(path: Path) -> str:
    """The code of a Python file without comments and docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [line for line in body if not _is_docstring(line)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
