"""Renders the presets' README.md: a table of their headers, and the section "Which preset?" from the planner's results.

    python -m benchmarks.presets.page accelerate_configs [--write [--plan]]

Planning takes minutes, so its results are kept in `which_preset.json` with a hash of everything they depend on. The page can then
be checked within a second, and outdated results are reported.
"""

import argparse
import ast
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.tools import plan

CHOICE_FILE = "which_preset.json"
HEADER_FIELDS = ("What it shards", "When to pick it", "Cost", "Needs")
TABLE_BEGIN = "<!-- begin: made from the headers of the presets -->\n"
CHOICE_BEGIN = "<!-- begin: made from which_preset.json -->\n"
END = "<!-- end -->"
PLANNED_PRESETS = ("single", "ddp", "fsdp2_shard_grad_op", "fsdp2_full_shard", "fsdp2_offload")
"""Presets that the section chooses among. Its meshes over several machines are derived from them."""
_PLANNER = Path(plan.__file__).parent
_SOURCES = (
    Path(__file__).with_name("choice.py"),
    *(_PLANNER / f"{name}.py" for name in ("kernels", "search", "strategy", "subject", "trace")),
)


def update_page(folder: Path, *, write: bool) -> None:
    """Write the table of presets and the section "Which preset?" between their marks in the folder's README.md, or, without
    `write`, check that they are up to date. A folder without planned results has no such section.

    Raises:
        UserError: a preset's header or the marks are missing, or the planned results, or, without `write`, the page, are out of
            date.
    """
    page, found = folder / "README.md", folder / CHOICE_FILE
    _update_section(page, TABLE_BEGIN, preset_table(folder), "the table of the presets' headers", write=write)
    if not found.is_file():
        return
    choice = json.loads(found.read_text(encoding="utf-8"))
    if choice["inputs"] != hash_inputs(folder):
        raise UserError(
            f"{found}: the planner or a preset has changed: run `python -m benchmarks.presets.page --write --plan {folder}`, "
            "which takes minutes"
        )
    _update_section(page, CHOICE_BEGIN, choice_table(choice["cells"]), f"the section made from {CHOICE_FILE}", write=write)


def preset_header(path: Path) -> dict[str, str]:
    """The fixed fields of a preset's header comment, and its `Usage` line.

    Raises:
        UserError: a field is missing.
    """
    header = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, text = line.removeprefix("# ").partition(": ")
        if line.startswith("# accelerate launch "):
            header["Usage"] = line.removeprefix("# ")
        elif line.startswith("# ") and name in HEADER_FIELDS and text:
            header[name] = text
    if missing := [name for name in (*HEADER_FIELDS, "Usage") if name not in header]:
        raise UserError(f"{path}: the header comment has no `# {missing[0]}: …` line")
    return header


def preset_table(folder: Path) -> str:
    """The presets of a folder as a Markdown table, built from their headers."""
    rows = [("Preset", *HEADER_FIELDS), ("---",) * (1 + len(HEADER_FIELDS))]
    for path in sorted(folder.glob("*.yaml")):
        header = preset_header(path)
        rows.append((f"[{path.stem}]({path.name})", *(header[name] for name in HEADER_FIELDS)))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def choice_table(cells: list[dict[str, Any]]) -> str:
    """A Markdown table with a row per model and way of training, and a column per number of GPUs."""
    columns = list(dict.fromkeys((cell["num_gpus"], cell["gpu_gib"]) for cell in cells))
    names = list(dict.fromkeys((cell["model"], cell["way"]) for cell in cells))
    by_place = {(cell["model"], cell["way"], cell["num_gpus"], cell["gpu_gib"]): cell for cell in cells}
    lines = [
        ["Model", "Trained", *(f"{num} × {gib} GiB" for num, gib in columns)],
        ["---"] * (2 + len(columns)),
        *([model, way, *(_cell(by_place[model, way, *column]) for column in columns)] for model, way in names),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def hash_inputs(folder: Path) -> str:
    """sha256 of the planner's code, as `_code_of` has it, and of the settings of the presets it chooses among."""
    import yaml

    digest = hashlib.sha256()
    for path in _SOURCES:
        digest.update(_code_of(path).encode())
    for path in (folder / f"{preset}.yaml" for preset in PLANNED_PRESETS):
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
        digest.update(json.dumps([path.name, settings], sort_keys=True).encode())
    return digest.hexdigest()


def _update_section(page: Path, begin: str, content: str, what: str, *, write: bool) -> None:
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    before, opening, rest = text.partition(begin)
    _, closing, after = rest.partition(END)
    if not closing:
        raise UserError(f"{page}: has no lines {begin.strip()} and {END}, between which {what} stands")
    updated = before + opening + content + closing + after
    if write:
        page.write_text(updated, encoding="utf-8")
    elif updated != text:
        raise UserError(f"{page}: {what} is out of date; run `python -m benchmarks.presets.page --write {page.parent}`")


def _cell(cell: dict[str, Any]) -> str:
    if cell["preset"] is None:
        return "does not fit"
    rows = f"{cell['rows']:,} row{'' if cell['rows'] == 1 else 's'}"
    return f"{cell['preset']}: {cell['peak_bytes'] / 2**30:.1f} GiB; {rows}"


def _code_of(path: Path) -> str:
    """The code of a Python file without comments, docstrings and imports, which change where a file is moved."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [  # type: ignore[attr-defined]
                line for line in body if not (_is_docstring(line) or isinstance(line, ast.Import | ast.ImportFrom))
            ]
    return str(_nodes(tree))


def _nodes(node: Any) -> Any:
    """What `ast.dump` shows, without empty fields: each version of Python adds some."""
    if isinstance(node, list):
        return [_nodes(part) for part in node]
    if not isinstance(node, ast.AST):
        return node
    return [type(node).__name__, *((name, _nodes(value)) for name, value in ast.iter_fields(node) if value not in (None, []))]


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def main() -> None:
    """The command line. `--plan` plans the section again, which takes minutes."""
    parser = argparse.ArgumentParser(description="Check or write the tables of presets in a folder's README.md.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of presets, as in accelerate_configs")
    parser.add_argument("--write", action="store_true", help="write the table and the section 'Which preset?'")
    parser.add_argument("--plan", action="store_true", help="with --write: plan that section again, which takes minutes")
    arguments = parser.parse_args()
    if arguments.plan and not arguments.write:
        parser.error("--plan is given without --write: add it, a new plan is written")
    if arguments.plan:
        from benchmarks.presets.choice import save_choice  # torch takes seconds to import

        save_choice(arguments.folder)
    try:
        update_page(arguments.folder, write=arguments.write)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
