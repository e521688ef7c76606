"""The model card, `README.md` of an exported folder: data, metrics beside their baselines, settings, base, licence, versions."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from toolkit.config.facts import facts_of
from toolkit.config.load import RecipeConfig, dotted_keys
from toolkit.config.paths import replace_local_paths
from toolkit.errors import escape_controls, one_line
from toolkit.evaluation.generate import BASELINE, SHOWN_FIGURES
from toolkit.evaluation.metrics import OUR_FIGURES
from toolkit.evaluation.rows import hashes_of_sets, list_by_set
from toolkit.export.run_data import RunData
from toolkit.launch.rank_consistency import installed_versions
from toolkit.models.lora import is_enabled

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData
    from transformers import PretrainedConfig

Kind = Literal["model", "adapter", "merged"]
CARD_FILE = "README.md"
_ALWAYS_SHOWN = ("train.seed", "optim.lr", "optim.schedule", "preference.loss", "preference.beta")


@dataclass(frozen=True)
class Origin:
    """Which weights are exported, and what is known about them beside the run's config."""

    step: int = 0
    computed_in: str = "float32"
    """Dtype of the run's forward passes."""
    num_processes: int = 1
    data: RunData | None = None
    lines: list[dict[str, Any]] = field(default_factory=list)
    """Of `metrics.jsonl`."""
    versions: dict[str, str] | None = None
    """Of the libraries that trained; None: those of this process."""
    frozen_hashes: dict[str, str] = field(default_factory=dict)
    """Of its frozen parameters, by name, as a checkpoint records them; empty: not known."""
    remarks: list[str] = field(default_factory=list)
    """On what others than transformers 5 read otherwise."""


def save_card(
    folder: Path,
    config: RecipeConfig,
    model_config: PretrainedConfig,
    origin: Origin,
    kind: Kind,
    weights_dtype: str,
    use: str,
    tag: str | None,
) -> None:
    """Write the card, with Python to `use` the model and its pipeline's `tag`. It needs no network: what the hub's cache does not
    have is not stated."""
    from huggingface_hub import ModelCard

    named = replace_local_paths(config, lambda _, path: os.path.basename(os.path.normpath(path)))
    terms = {} if config.model.from_scratch else _licence_of_base(config, model_config)
    name, revision = config.model.name_or_path, config.model.revision
    base = f"[{name}](https://huggingface.co/{name})" if is_hub_id(name) else f"`{_cell(Path(name).name)}`"
    card = ModelCard.from_template(
        _metadata(config, kind, terms, tag),
        str(Path(__file__).with_name("card.md.j2")),
        cell=_cell,
        name=named.run.name,
        kind="from scratch" if config.model.from_scratch else kind,
        base=base + (f" at revision {_cell(revision)}" if revision else ""),
        base_name=named.model.name_or_path,
        adapter=config.adapter.method,
        weights_dtype=weights_dtype,
        origin=origin,
        terms=terms,
        use=use,
        data=_list_data(named, origin),
        metrics=_list_metrics(origin),
        settings=_list_settings(named, origin),
        versions={**installed_versions(), **(origin.versions or {})}.items(),
    )
    card.save(folder / CARD_FILE)


def is_hub_id(name: str) -> bool:
    """Whether a name is a repository's id rather than a folder here."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists() and not name.startswith((".", "~"))


def _metadata(config: RecipeConfig, kind: Kind, licence: dict[str, Any], tag: str | None) -> ModelCardData:
    """The fields that the hub reads. Ids only: it refuses folders."""
    from huggingface_hub import ModelCardData

    base: dict[str, Any] = {}
    if is_hub_id(config.model.name_or_path) and not config.model.from_scratch:
        base = {"base_model": config.model.name_or_path}
        base["base_model_relation"] = "adapter" if kind == "adapter" else "finetune"
    sources = [config.data.source, *(entry.source for entry in getattr(config.data, "mix", []))]
    return ModelCardData(
        library_name="peft" if kind == "adapter" else "transformers",
        pipeline_tag=tag,
        datasets=[source for source in sources if source and "/" in source and is_hub_id(source)] or None,
        tags=["lora"] if is_enabled(config.adapter) else None,
        **{"license": "unknown", **licence, **base},
    )


def _licence_of_base(config: RecipeConfig, model_config: PretrainedConfig) -> dict[str, str]:
    """The licence fields of the base's own card, else of its config; empty if neither names one."""
    from huggingface_hub import ModelCard, try_to_load_from_cache
    from yaml import YAMLError

    name = config.model.name_or_path
    card: Any = Path(name) / CARD_FILE
    if is_hub_id(name):
        card = try_to_load_from_cache(name, CARD_FILE, revision=config.model.revision)
    stated: dict[str, Any] = {}
    if isinstance(card, str | Path) and Path(card).is_file():
        try:
            stated = ModelCard.load(card, ignore_metadata_errors=True).data.to_dict()
        except (OSError, ValueError, YAMLError):  # a card that is none
            stated = {}
    if not stated.get("license"):
        stated = {"license": getattr(model_config, "license", None)}
    named = {key: stated.get(key) for key in ("license", "license_name", "license_link")}
    is_stated = isinstance(named["license"], str) and named["license"] != "unknown"
    if not re.fullmatch(r"https?://[a-zA-Z0-9.~:/?#@!$&*+,;=%_-]+|LICENSE[a-zA-Z0-9._-]*", str(named["license_link"])):
        named["license_link"] = None  # the hub makes a link of it, whatever it is, `javascript:` too
    return {key: one_line(value) for key, value in named.items() if isinstance(value, str)} if is_stated else {}


def _list_data(config: RecipeConfig, origin: Origin) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    if origin.data is not None:
        counts = origin.data
        how = f"a fraction of {config.data.eval_fraction} by a hash"
        if config.data.eval_files or any(entry.hub_eval_split for entry in (config.data, *config.data.mix)):
            how = "files of their own" if config.data.eval_files else "a split of their own"
        held_out = f"{counts.num_held_out_rows:,} ({how}), of which {counts.num_evaluated_rows:,} are evaluated"
        rows = [("training rows", f"{counts.num_training_rows:,}"), ("held-out rows", held_out)]
    return [*rows, *_changed(config, ("data.",))]


def _list_metrics(origin: Origin) -> dict[str, Any]:
    """The evaluation of these weights, else the last one before them, beside the baselines of its rows; empty without one."""
    evaluations = {line["step"]: line for line in origin.lines if line["kind"] == "eval" and line["step"] <= origin.step}
    if not evaluations:
        return {}
    last = evaluations[max(evaluations)]
    measured_on = last.get("measured_on")
    named = {
        str(line["name"]): line for line in origin.lines if line["kind"] == BASELINE and line.get("measured_on") == measured_on
    }
    if 0 in evaluations and origin.step > 0 and evaluations[0].get("measured_on") == measured_on:
        named["before training"] = evaluations[0]
    these = "these weights" if last["step"] == origin.step else f"step {last['step']:,}; these weights were not evaluated"
    named[these] = last
    named = list_by_set(named, hashes_of_sets(last))
    numbers = {name for line in named.values() for name, value in line.items() if type(value) in (int, float)}
    columns = [name for name in SHOWN_FIGURES if name in numbers] + sorted(numbers.difference(SHOWN_FIGURES, OUR_FIGURES))
    cells = [[line.get(column) for column in columns] for line in named.values()]
    numbered = [[f"{value:.4g}" if isinstance(value, int | float) else "–" for value in of_line] for of_line in cells]
    rows = [[name, *of_line] for name, of_line in zip(named, numbered, strict=True)]
    return {"num_rows": last.get("num_rows", "?"), "words": last.get("rouge_tokenizer"), "columns": columns, "rows": rows}


def _list_settings(config: RecipeConfig, origin: Origin) -> Iterable[tuple[str, Any]]:
    keys = dotted_keys(config)
    budget = "train.global_batch_size_tokens" if config.train.global_batch_size_tokens else "train.global_batch_size_rows"
    shown = {key: keys[key] for key in (budget, *_ALWAYS_SHOWN) if key in keys}
    sections = ("model.", *(["adapter."] if is_enabled(config.adapter) else []), "train.", "optim.", "preference.")
    not_here = {*shown, "train.global_batch_size_rows"}
    changed = {key: value for key, value in _changed(config, sections) if key not in not_here}
    generated = {key: keys[key] for key in ("eval.max_new_tokens", "eval.num_beams", "eval.no_repeat_ngram_size")}
    of_launch = {"computed in": origin.computed_in, "processes": origin.num_processes}
    return {**shown, **changed, **generated, **of_launch}.items()


def _changed(config: RecipeConfig, sections: tuple[str, ...]) -> list[tuple[str, Any]]:
    """Keys of these sections whose values are not the defaults."""
    known = facts_of(type(config))
    shown = ((key, value) for key, value in dotted_keys(config).items() if key.startswith(sections) and known[key].in_card)
    return [(key, value) for key, value in shown if value != known[key].default]


def _cell(value: Any) -> str:
    """A value as a cell of Markdown, whatever text is in it."""
    text = " ".join(escape_controls(str(value)).split())
    for mark in "\\|[]*`":
        text = text.replace(mark, f"\\{mark}")
    return text.replace("<", "&lt;")
