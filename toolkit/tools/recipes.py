"""The recipes, configs and presets of the toolkit: `shardtune ls`, and `shardtune init`, a project with copies; and which recipe
a command line and its run YAMLs are for.

A checkout has them at its top level, a wheel in the package's folder `project` (pyproject.toml).
"""

import os
import shutil
import sys
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import yaml

import toolkit
from toolkit.config.load import split_files_and_flags
from toolkit.config.messages import given_flags
from toolkit.config.paths import find_path
from toolkit.config.python import CONFIGS
from toolkit.errors import UserError, first_line, one_line, refusal_named

PACKAGE_FOLDER = Path(toolkit.__file__).resolve().parent
SHIPPED = PACKAGE_FOLDER / "project" if (PACKAGE_FOLDER / "project").is_dir() else PACKAGE_FOLDER.parent
PARTS = ("recipes", "accelerate_configs")
RECIPES = {"seq2seq": "t5", "causal": "llm"}
"""By the objective."""
OF_PAIRS = {"t5": "dpo_t5", "llm": "dpo"}
"""The recipe of pairs of answers to each of these."""


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


def find_recipe(argv: list[str], recipe: str | None = None, model: str | None = None) -> str:
    """`recipe`, else the run YAMLs' own, else the one that takes the model (`model`, or that of the command line), of pairs where
    they set `preference.loss`. No such recipe, or an ambiguous path of the model, is a `UserError`."""
    if named := recipe or _find_value(argv, "recipe")[0]:
        if named not in CONFIGS:
            raise UserError(f"recipe is {named}: write {' or '.join(CONFIGS)}, or leave it out, and the model chooses")
        return named
    if model is None:
        model, file = _find_value(argv, "model.name_or_path")
        model = find_path(model, file, f"{file}: model.name_or_path") if file else model
    found = RECIPES[name_of_model(model)]
    return OF_PAIRS[found] if _find_value(argv, "preference.loss")[0] else found  # every run folder of pairs has it


def _find_value(argv: list[str], key: str) -> tuple[str, Path | None]:
    """A text of the flags, else of the last run YAML that has it, with that file. Empty if none has: `load_config` reports it."""
    files, flags = split_files_and_flags(argv)
    if given := dict(reversed(given_flags(flags))).get(key):
        return given, None
    for file in reversed(files):
        with suppress(OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
            written: Any = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
            for name in key.split("."):
                written = written[name]
            if isinstance(written, str):
                return written, Path(file)
    return "", None


def name_of_model(name_or_path: str) -> str:
    """The built-in objective that takes the model, by name; for an unreadable folder `causal`: `load_model_config` reports it. A
    hub id out of reach is a `UserError`, without which `load_model_config` would retry for half a minute."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        is_pair = AutoConfig.from_pretrained(name_or_path, trust_remote_code=False).is_encoder_decoder
        return "seq2seq" if is_pair else "causal"
    except (ValueError, StrictDataclassError):
        return "causal"
    except OSError as error:
        if Path(name_or_path).is_dir() or Path(name_or_path).is_absolute() or name_or_path.startswith("."):
            return "causal"
        what = f"model {name_or_path} is not a local folder and could not be read from the hub ({first_line(error)})"
        raise UserError(f"{what}: give a folder with its config.json") from None
