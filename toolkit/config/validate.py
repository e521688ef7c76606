"""Checks of run-config fields that exclude or need each other, which the type of a single field cannot express; and the names of
evaluation sets: of files in `data.eval_files`, entries of `data.mix`, and a dataset's own split."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from toolkit.config.facts import exclusive_pairs
from toolkit.errors import UserError
from toolkit.optimizers import OPTIMIZERS

FILE_SOURCES = ("csv", "tsv", "json", "jsonl", "parquet", "arrow", "txt")


def check_config(config: Any, *, needs_source: bool = True) -> None:
    """Refuse fields that exclude or need each other, by a `UserError` with both names. `needs_source`: the rows must be named;
    false if they may be given to `toolkit.finetune`."""
    train, profile, data, evaluation, optim = config.train, config.profile, config.data, config.eval, config.optim
    check_length_and_name(config)
    for first, second in exclusive_pairs(type(config)):
        values = [getattr(getattr(config, section), name) for section, name in (first.split("."), second.split("."))]
        if values[0] and values[1]:
            raise UserError(f"{first} is {values[0]} and {second} is {values[1]}: give one of them")
    if profile.steps is not None and (len(profile.steps) != 2 or profile.steps[0] > profile.steps[1]):
        raise UserError(f"profile.steps is {profile.steps}: give the first and the last step, as in [10, 12]")
    if train.max_steps is not None:
        check_num_steps(config, train.max_steps)
    if needs_source or data.source or data.mix:
        _check_sources(data)
    if evaluation.early_stopping_patience is not None and evaluation.every_steps is evaluation.every_epochs is None:
        raise UserError(
            f"eval.early_stopping_patience is {evaluation.early_stopping_patience}, but only the end is evaluated: set "
            "eval.every_steps or eval.every_epochs too"
        )
    if config.export.weights == "best" and config.checkpoint.keep_best == 0:
        raise UserError("export.weights best needs checkpoint.keep_best of 1 or more")
    if config.model.add_tokens and config.model.from_scratch:
        raise UserError("model.add_tokens is for weights that are there: with model.from_scratch, put them into the tokenizer")
    own = OPTIMIZERS[optim.name].DEFAULTS
    for name in sorted({name for other in OPTIMIZERS.values() for name in other.DEFAULTS} - set(own)):
        if value := getattr(optim, name):  # a setting of another optimizer
            unset = "false" if value is True else "null"
            has_none = f"optim.{name} is {value}, but optim.name is {optim.name}, which does not have it"
            raise UserError(f"{has_none}: leave it out, or set it to {unset}")
    if config.model.trained_dtype != "float32" and optim.name == "adamw":
        reason = "but torch's AdamW rounds to nearest, where small updates are lost"
        raise UserError(
            f"model.trained_dtype is {config.model.trained_dtype}, {reason}: take optim.name adamw_8bit, or leave it out"
        )
    if optim.skip_beyond_sigmas is not None and optim.skip_window_steps < 2:
        raise UserError("optim.skip_window_steps is 1, and one step has no standard deviation: give 2 or more, as in 100")


def check_length_and_name(config: Any) -> None:
    """Refuse a run without a length that is given in one way, or a plain folder name, by a `UserError` with the fields."""
    train, name = config.train, config.run.name
    if (train.max_steps is None) == (train.num_epochs is None):
        given = "both are given" if train.max_steps is not None else "neither is given"
        raise UserError(f"give train.max_steps or train.num_epochs, one of them: {given}")
    if Path(name).name != name or name in ("", ".", ".."):
        raise UserError(f"run.name {name!r} is not a plain folder name: take one without slashes")


def _check_sources(data: Any) -> None:
    """Check that each file source has its files, and that `data.mix` stands alone: it replaces the fields of a single source."""
    mix = data.mix
    for name in ("source", "files", "hub_subset", "hub_eval_split"):
        if mix and getattr(data, name):
            raise UserError(f"data.{name} is given beside data.mix: move it into an entry of data.mix")
    if not mix and not data.source and not data.files:
        of_several = ", or data.mix for several sources" if "mix" in vars(data) else ""
        raise UserError(f"give data.files or data.source{of_several}: none is given")
    for place, source in enumerate(mix or [data]):
        where = f"data.mix[{place}]" if mix else "data"
        if not source.source and not source.files:
            raise UserError(f"{where} has no source and no files: give one of them")
        if source.source in FILE_SOURCES and not source.files:
            raise UserError(f"{where}.source {source.source} needs {where}.files")


def check_num_steps(config: Any, num_steps: int) -> None:
    """Refuse a warm-up or profile window beyond the end of the run, by a `UserError` with both numbers.

    The number of steps is known at once with `max_steps`, else once the rows are counted.
    """
    warmup_steps, window = config.optim.warmup_steps, config.profile.steps
    if warmup_steps >= max(1, num_steps):
        raise UserError(f"optim.warmup_steps is {warmup_steps}, but the run has only {num_steps} steps: warm up for fewer")
    if window is not None and window[1] > num_steps:
        raise UserError(f"profile.steps is {window}, but the run has only {num_steps} steps: end the window by then")


def check_evaluation_rows(config: Any, num_rows: int) -> None:
    """Once the rows are counted, refuse fields that need evaluation rows where there are none: a `UserError` with the field."""
    needed_by = {
        "export.weights best": config.export.weights == "best",
        "eval.early_stopping_patience": config.eval.early_stopping_patience is not None,
    }
    for name, is_set in needed_by.items():
        if is_set and num_rows == 0:
            raise UserError(f"{name} needs held-out rows, but there are none: raise data.eval_fraction, or give data.eval_files")


def name_entries(data: Any) -> list[str]:
    """The set of the evaluation rows of each entry of `data.mix`, or of the only source; an empty name is none."""
    if len(data.mix) < 2:
        split = data.hub_eval_split if isinstance(data.eval_files, dict) else ""
        return [data.mix[0].name or "" if data.mix else split or ""]
    names = [entry.name or Path(entry.source).name for entry in data.mix]
    is_clear = [bool(entry.name or (name and names.count(name) == 1)) for entry, name in zip(data.mix, names, strict=True)]
    return [name if clear else f"mix[{place}]" for place, (name, clear) in enumerate(zip(names, is_clear, strict=True))]


def list_sets(data: Any) -> list[str]:
    """The names of the sets that rows are evaluated in."""
    named, entries = data.eval_files if isinstance(data.eval_files, dict) else {}, data.mix or [data]
    is_held_out = not data.eval_files and not any(entry.hub_eval_split for entry in entries)
    of_entries = zip(name_entries(data), entries, strict=True)
    return list(dict.fromkeys([*named, *(name for name, of in of_entries if name and (is_held_out or of.hub_eval_split))]))


def check_set_names(data: Any, figures: Collection[str]) -> None:
    """Check that a figure `NAME/loss` says whose it is, and that every name in `data.eval_files` has files.

    A `UserError` has the name. `figures` are names of figures and metrics, which no set may have.
    """
    named = data.eval_files if isinstance(data.eval_files, dict) else {}
    for name in list_sets(data):
        where = "data.eval_files" if name in named else "data.mix" if data.mix else "data.hub_eval_split"
        if not isinstance(name, str) or not name.strip() or not name.isprintable() or "/" in name:
            raise UserError(f"{where} names an evaluation set {name!r}: take a text without slashes, as in news or '2024'")
        if name in figures:
            raise UserError(f"{where} names an evaluation set {name}, which is the name of a metric: take another")
        if name in named and not named[name]:
            raise UserError(f"{where} has no file under the name {name}: give one, or leave the name out")
