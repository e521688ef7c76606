"""What a run trains for, one file each, and one function that turns a name into a built-in one.

An objective of a user's own is only ever given by code (`finetune(config, objective=…)`), never found by its name.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from toolkit.errors import UserError

if TYPE_CHECKING:
    from toolkit.config.schema import RecipeConfig
    from toolkit.objectives.objective import Objective

BUILT_IN = ("causal", "seq2seq", "preference", "preference_seq2seq")


def built_in(name: str, config: RecipeConfig | None = None) -> Objective:
    """The built-in objective of this name, with the settings of a config."""
    from toolkit.objectives.causal import Causal
    from toolkit.objectives.preference import Preference, Seq2SeqPreference
    from toolkit.objectives.seq2seq import Seq2Seq

    of_pairs = {"preference": Preference, "preference_seq2seq": Seq2SeqPreference}
    return of_pairs[name](config) if name in of_pairs else {"causal": Causal, "seq2seq": Seq2Seq}[name]()


def objective_of(config: RecipeConfig) -> Objective:
    """The built-in objective of a run's config; a `UserError` for a run whose objective was given by code."""
    if config.has_own_objective:
        raise _given_by_code(config.objective)
    return built_in(config.data.objective, config)


def check_run_folder(folder: Path) -> None:
    """Refuse a run folder as `objective_of` does its config."""
    name = None
    with suppress(OSError, ValueError, KeyError, TypeError, yaml.YAMLError):  # of an older run, or none
        name = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["objective"]
    if name not in (None, *BUILT_IN):
        raise _given_by_code(name)


def _given_by_code(name: str | None) -> UserError:
    return UserError(f"objective is {name}, which Python code has given to finetune(): call that again; no command can find it")


def name_objective(config: RecipeConfig, given: Objective | None) -> tuple[RecipeConfig, Objective]:
    """The config that names the objective of its run, and the objective: `given` by code, else the config's own."""
    import transformers

    from toolkit.objectives.objective import Objective

    objective = objective_of(config) if given is None else given
    if not isinstance(objective, Objective) or not all(getattr(objective, key, "") for key in ("name", "auto_class", "takes")):
        shown = repr(objective) if isinstance(objective, (str, type)) else type(objective).__name__
        kind = "a class that inherits from Objective and sets name, auto_class and takes"
        raise UserError(f"objective is {shown:.60}: give an object of {kind}")
    if not hasattr(transformers, objective.auto_class):
        raise UserError(f"auto_class of objective {objective.name} is {objective.auto_class}, which transformers does not have")
    if objective.name in BUILT_IN and type(objective) is not type(built_in(objective.name)):
        raise UserError(f"objective is {type(given).__name__}, with the name {objective.name} of a built-in one: give it another")
    if lacking := [limit for limit in objective.limits.values() if not hasattr(config.data, limit)]:
        what = f"objective {objective.name} limits its rows by data.{lacking[0]}, and a {type(config).__name__} has none"
        raise UserError(f"{what}: load the config as that of the other recipe")
    if config.packs and not objective.can_pack:
        if config.data.packing is True:
            raise UserError(f"data.packing is true, and objective {objective.name} takes rows one by one: leave it out")
        config = replace(config, data=replace(config.data, packing=False))
    if config.model.dropout is None and objective.default_dropout is not None:
        config = replace(config, model=replace(config.model, dropout=objective.default_dropout))
    return replace(config, objective=objective.name), objective
