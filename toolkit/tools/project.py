"""`shardtune init` and `shardtune ls`: the recipes, configs and presets of the toolkit, and a project with copies.

A checkout has them at its top level, a wheel in the package's folder `project` (pyproject.toml).
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import toolkit
from toolkit.errors import UserError, one_line, refusal_named

PACKAGE_FOLDER = Path(toolkit.__file__).resolve().parent
SHIPPED = PACKAGE_FOLDER / "project" if (PACKAGE_FOLDER / "project").is_dir() else PACKAGE_FOLDER.parent
PARTS = ("recipes", "accelerate_configs")


def find_shipped(part: str, name: str) -> Path:
    """The file in the folder `part` of the working directory, as after `init`, or else that which comes with the toolkit."""
    own = Path.cwd() / part / name
    return own if own.is_file() else SHIPPED / part / name


def recipes() -> list[str]:
    """The names of the recipes that come with the toolkit."""
    return sorted(path.stem for path in (SHIPPED / "recipes").glob("*.py") if "_" not in path.stem)


def init(folder: Path, recipe: str) -> None:
    """Copy a recipe with its configs, models, row sources and chat templates, and the presets, into a project. A project that has
    one of them already, or hides the toolkit from Python, is a `UserError`."""
    for part in PARTS:
        if os.path.lexists(folder / part):
            raise UserError(f"{folder / part} exists already: name another folder, or remove it")
    check_import(folder)

    def others(_: str, names: list[str]) -> list[str]:
        """What is named after another recipe; and what Python leaves in a folder."""
        prefixes = [name for name in recipes() if name != recipe]
        return [n for n in names if n == "__pycache__" or n.split(".")[0].split("_")[0] in prefixes]

    with refusal_named(f"{folder} cannot be made a project", "name another folder"):
        for part in PARTS:
            shutil.copytree(SHIPPED / part, folder / part, ignore=others)
    configs = ", ".join(sorted(path.stem for path in (folder / "recipes" / "configs").iterdir()))
    print(one_line(f"{folder} has recipes/{recipe}.py, the presets, and the configs {configs}. On the CPU, train there by"))
    command = f"accelerate launch --config_file accelerate_configs/fsdp2_cpu.yaml recipes/{recipe}.py"
    print(f"{command} --config recipes/configs/CONFIG.yaml")


def list_shipped() -> None:
    """Print each recipe, config and preset with its first line."""
    for title, paths in {
        "recipes": [SHIPPED / "recipes" / f"{name}.py" for name in recipes()],
        "configs": sorted((SHIPPED / "recipes" / "configs").iterdir()),
        "presets": sorted((SHIPPED / "accelerate_configs").glob("*.yaml")),
    }.items():
        print(f"{title} in {paths[0].parent}:")
        for path in paths:
            about = path.read_text(encoding="utf-8").splitlines()[0].strip('#" ')
            print(one_line(f"  {path.stem}: {about}"))


def check_import(folder: Path) -> None:
    """Refuse a folder from which Python would import another `toolkit` than this one, by a `UserError` with its file."""
    found = PathFinder.find_spec("toolkit", [str(folder), *sys.path[1:], os.fspath(PACKAGE_FOLDER.parent)])
    if found is not None and found.origin is not None and not PACKAGE_FOLDER.samefile(Path(found.origin).parent):
        raise UserError(f"{found.origin} hides the installed toolkit from a recipe in {folder}: rename it")
