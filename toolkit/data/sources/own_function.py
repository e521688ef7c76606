"""A source of one's own: `data.source: my_rows.py:load_rows` names a Python file and a function in it that gives rows as dicts.

The function gets the run's data section. The file runs only because the user named it, and only on the first process of each
node. It is compiled from the bytes that are hashed, so that no outdated `.pyc` runs in its place.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.config.data import DataConfig, LLMDataConfig
from toolkit.config.paths import split_own_source
from toolkit.data.sources.files import find_files, hash_file
from toolkit.data.sources.hub import read_hub_rows
from toolkit.data.sources.row import check_text
from toolkit.errors import UserError

logger = logging.getLogger("toolkit")

IDENTIFY = "identify"
"""Name of a function, `(config) -> str`, that a file may have: it says what decides the rows, at less cost than reading them."""
_MAX_REASON_CHARACTERS = 300


def load_own_source(config: DataConfig | LLMDataConfig, setting: str) -> tuple[Callable[[], Iterator[dict[str, Any]]], str, bool]:
    """Run the file that `config.source` names, find its function, and call its `identify`. No such file or function, or an error
    in the file, is a `UserError`.

    Args:
        config: the data section; for an entry of `data.mix`, with the source and the files of the entry.
        setting: where the source is given, for messages: `data` or `data.mix[i]`.

    Returns:
        What yields the rows of the function, which gets `config` with `files` and `eval_files` as lists of paths that exist; hex
        sha256 of the file, those beside it that it imports, the function's name, the files in `config`, and what `identify`
        returned; whether the file has `identify`, so that the rows need not be hashed.
    """
    label = config.source or ""
    file, name = split_own_source(label) or ("", "")
    if not name:
        raise UserError(f"{setting}.source {label} names no function: write it behind the file, as in {file}:load_rows")
    (path,) = find_files(file, f"{setting}.source")
    digests = [hash_file(path, is_text=True), name]
    found = {key: find_files(getattr(config, key) or [], f"{setting}.{key}") for key in ("files", "eval_files")}
    digests += [f"{key} {hash_file(path, is_text=False)}" for key, paths in found.items() for path in paths]
    files, eval_files = ([str(path) for path in paths] for paths in found.values())
    config = dataclasses.replace(config, files=files, eval_files=eval_files)

    module, beside = run_file(path, label)
    digests += [hash_file(file, is_text=False) for file in beside]
    function = getattr(module, name, None)
    if not callable(function):
        defined = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise UserError(f"{label}: the file has no function {name}: name one that it defines ({', '.join(defined) or 'none'})")
    identify = getattr(module, IDENTIFY, None)
    if identify is not None:
        with _errors_of(path, label):
            identity = identify(config)
        check_text(identity, f"{label}: the result of {IDENTIFY}")
        digests.append(f"{IDENTIFY} {identity}")
    identity = hashlib.sha256(json.dumps(digests).encode()).hexdigest()
    return partial(read_own_rows, function, config, path, label), identity, identify is not None


def read_own_rows(function: Callable[[Any], Any], config: Any, path: Path, label: str) -> Iterator[dict[str, Any]]:
    """Call the function and yield its rows, of which each must be a dict; an error in it is a `UserError`."""
    with _errors_of(path, label):
        rows = function(config)
    if isinstance(rows, dict):  # a DatasetDict is one
        raise UserError(
            f"{label} returns a {type(rows).__name__} with the keys {', '.join(map(str, rows))}: return the rows of one of "
            "them, or of all, with a column split (train or eval)"
        )
    datasets: Any = sys.modules.get("datasets")
    if datasets and isinstance(rows, datasets.Dataset) and rows.format["type"] is None:
        rows = read_hub_rows(rows, rows.column_names)  # without the null keys that it gives to structs
    with _errors_of(path, label):
        iterator = iter(rows) if hasattr(rows, "__iter__") else None
    if iterator is None:
        raise UserError(f"{label} returns {rows!r:.60}, which holds no rows: yield dicts, or return a list or a Dataset")
    end = object()
    for number in itertools.count(1):
        with _errors_of(path, label):
            row = next(iterator, end)
        if row is end:
            return
        if not isinstance(row, dict):
            trouble = f"{row!r:.60} is of type {type(row).__name__}, not a dict"
            raise UserError(f"{label}, row {number}: {trouble}: yield {{column: value, ...}}")
        yield row


def read_options(row: dict[str, Any], where: str) -> dict[str, Any]:
    """The optional columns of a row that are given: `group`, `lead_text`, `skip`, and `split` as `held_out`. A wrong value is a
    `UserError`."""
    fields = {name: row[name] for name in ("group", "lead_text", "skip") if row.get(name) is not None}
    for name, value in fields.items():
        check_text(value, f"{where}, column {name}")
    if not fields.get("skip", "with a reason").strip():
        raise UserError(f"{where}, column skip is empty: give the reason to leave the row out, or None to keep it")
    if (split := row.get("split")) is not None:
        if not isinstance(split, str) or split not in ("train", "eval"):
            raise UserError(f"{where}, column split: {split!r:.60} is neither train nor eval: write one of them, or leave it out")
        fields["held_out"] = split == "eval"
    return fields


def run_file(path: Path, label: str) -> tuple[types.ModuleType, list[Path]]:
    """Run the file; return its module, and the files beside it that it imported, before which anything installed comes."""
    content = path.read_bytes()
    # Its own name, which no import statement can hit, in sys.modules: dataclasses look themselves up there.
    module = types.ModuleType(f"{path.stem}-{hashlib.sha256(content).hexdigest()[:12]}")
    module.__file__ = str(path.absolute())
    sys.modules[module.__name__] = module
    before, folder = set(sys.modules), path.absolute().parent
    sys.path.append(str(folder))
    try:
        with _errors_of(path, label):
            exec(compile(content, str(path), "exec"), module.__dict__)
    finally:
        sys.path.remove(str(folder))
        # They are forgotten again: the next file may lie beside other ones of the same names.
        beside = {}
        for name in [name for name in sys.modules if name.partition(".")[0] not in before]:
            file, place = Path(getattr(sys.modules[name], "__file__", None) or "/"), folder / name.partition(".")[0]
            if file == place.with_suffix(".py") or file.is_relative_to(place):
                beside[name] = file
                del sys.modules[name]
    return module, sorted(beside.values())


@contextmanager
def _errors_of(path: Path, label: str) -> Iterator[None]:
    """Turn an exception of the user's code into one sentence with the line of their file."""
    try:
        yield
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        message: object = error
        if isinstance(error, SyntaxError) and error.filename == str(path):
            lines, message = [error.lineno], error.msg
        where = f"line {lines[-1]} of the file" if lines else "the file"
        reason = " ".join(f"{type(error).__name__}: {message}".split())
        logger.debug(f"{label}: {where} raised", exc_info=True)
        raise UserError(f"{label}: {where} raised {reason[:_MAX_REASON_CHARACTERS].rstrip(': .')}: correct it there") from None
