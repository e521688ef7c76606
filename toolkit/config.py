"""The run YAML and its dotted flags, read into frozen dataclasses.

The accelerate YAML says *where* a run happens (processes, sharding, precision); this one says *what* happens. Every field
is also a flag: `--optim.lr 1e-4`. Unknown keys and wrong types are refused with the nearest key that exists.
A module of the toolkit gets only its own section.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings
from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from toolkit.config_checks import check_config
from toolkit.config_errors import Entry, load_entries, sentence
from toolkit.config_flags import split_files_and_flags, unset_counterparts
from toolkit.errors import UserError

set_parsing_settings(docstring_parse_attribute_docstrings=True)

ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where the run writes."""

    output_dir: str = "runs"
    """Folder that holds run folders."""
    name: str = "run"
    """Name of the run; its folder is `output_dir/name`."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and which of its parameters train."""

    name_or_path: str
    """Hub id or local folder of a Hugging Face model; `config.json` alone is enough with `from_scratch`."""
    revision: str | None = None
    """Hub revision (branch, tag or commit)."""
    from_scratch: bool = False
    """Random weights from the model's config, drawn from `train.seed`, instead of its pretrained ones."""
    attn_implementation: str | None = None
    """`sdpa`, `eager`, `flash_attention_2`, …; unset leaves the choice to transformers."""
    dropout: ClosedUnitInterval | None = None  # type: ignore[valid-type]
    """Sets every dropout rate of the model's config; unset keeps the model's own."""
    freeze: list[str] = field(default_factory=list)
    """Regular expressions; a parameter is frozen where one of them matches a whole name of it, tied aliases included."""
    init_from: str | None = None
    """Start from the weights of another run: its folder, a checkpoint of it, or an exported model."""
    trust_remote_code: bool = False
    """Run model code from the hub. Off unless asked for."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which rows, and how they become tokens."""

    source: str
    """`docstrings`, `wikihow`, `csv`, `jsonl`, `parquet`, or the id of a hub dataset."""
    files: list[str] | str | None = None
    """Files of a file source, one or a list."""
    eval_files: list[str] | str | None = None
    """Files with the held-out rows; unset holds out `eval_fraction` of the rows."""
    hub_subset: str | None = None
    """Configuration name of a hub dataset."""
    hub_split: str = "train"
    """Split of a hub dataset."""
    source_column: str | None = None
    """Column with the text to summarize; unset: `source`, or what the source prescribes."""
    target_column: str | None = None
    """Column with the summary; unset: `target`, or what the source prescribes."""
    prefix: str = ""
    """Text put before every source, as in `summarize: `."""
    max_source_length_tokens: PositiveInt = 512  # type: ignore[valid-type]
    """Longer sources are cut (counted and told)."""
    max_target_length_tokens: PositiveInt = 150  # type: ignore[valid-type]
    """Longer targets are cut (counted and told)."""
    num_rows: PositiveInt | None = None  # type: ignore[valid-type]
    """Use only the first so many rows of the source."""
    eval_fraction: ClosedUnitInterval = 0.05  # type: ignore[valid-type]
    """Share of the rows held out, chosen by a hash of each row's group, so that no group is on both sides."""
    num_tokenizer_workers: PositiveInt | None = None  # type: ignore[valid-type]
    """Processes that tokenize; unset: the machine's cores over its ranks, at most 8."""
    num_loader_workers: NonNegativeInt = 0  # type: ignore[valid-type]
    """Processes per rank that collate batches ahead; 0 collates in the training process."""
    cache_dir: str | None = None
    """Tokenized rows and trained tokenizers; unset: `toolkit/` in the Hugging Face cache."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The global batch is the unit: a step is one optimizer update over `global_batch_size_rows` rows."""

    global_batch_size_rows: PositiveInt = 64  # type: ignore[valid-type]
    """Rows of one optimizer update, over all processes."""
    micro_batch_size_rows: PositiveInt = 8  # type: ignore[valid-type]
    """Most rows in one forward pass of one process. Accumulation is derived from it; it never changes the result."""
    max_steps: PositiveInt | None = None  # type: ignore[valid-type]
    """Optimizer updates. Give this or `num_epochs`."""
    num_epochs: PositiveInt | None = None  # type: ignore[valid-type]
    """Passes over the rows. Give this or `max_steps`."""
    seed: NonNegativeInt = 0  # type: ignore[valid-type]
    """Seed of weights, row order and dropout."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its learning-rate schedule."""

    lr: PositiveFloat = 1e-3  # type: ignore[valid-type]
    """Peak learning rate."""
    beta1: ClosedUnitInterval = 0.9  # type: ignore[valid-type]
    """Decay of the first moment."""
    beta2: ClosedUnitInterval = 0.999  # type: ignore[valid-type]
    """Decay of the second moment."""
    eps: PositiveFloat = 1e-8  # type: ignore[valid-type]
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.0  # type: ignore[valid-type]
    """Decoupled weight decay; norms and biases are left out."""
    schedule: Literal["linear", "cosine", "constant", "step"] = "linear"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: NonNegativeInt = 0  # type: ignore[valid-type]
    """Steps over which the learning rate rises linearly to `lr`."""
    min_lr_ratio: ClosedUnitInterval = 0.0  # type: ignore[valid-type]
    """Floor of the linear and cosine schedules, as a share of `lr`."""
    gamma: PositiveFloat = 0.7  # type: ignore[valid-type]
    """`step` schedule: factor of each decay."""
    decay_every_steps: PositiveInt | None = None  # type: ignore[valid-type]
    """`step` schedule: steps between decays; unset: one epoch."""
    max_grad_norm: PositiveFloat | None = 1.0  # type: ignore[valid-type]
    """Gradients are scaled down to this global norm; null: never."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Held-out loss and generation."""

    every_steps: PositiveInt | None = None  # type: ignore[valid-type]
    """Steps between evaluations; unset: once at the end."""
    at_start: bool = True
    """Evaluate before the first step too: the untrained baseline."""
    num_rows: PositiveInt | None = None  # type: ignore[valid-type]
    """Use only the first so many held-out rows."""
    batch_size_rows: PositiveInt = 64  # type: ignore[valid-type]
    """Rows of one evaluation batch of one process. In fp32 it never changes the result."""
    generate: bool = True
    """Generate summaries and measure ROUGE."""
    num_beams: PositiveInt = 1  # type: ignore[valid-type]
    """Beams of the search; 1 is greedy."""
    max_new_tokens: PositiveInt = 64  # type: ignore[valid-type]
    """Longest generated summary."""
    no_repeat_ngram_size: NonNegativeInt = 0  # type: ignore[valid-type]
    """Generated summaries repeat no n-gram of this size; 0: any."""
    unshard: Literal["auto", "never"] = "auto"
    """`auto` gathers the model once per evaluation where it fits, `never` gathers it block by block."""
    best_metric: str = "loss"
    """What `stop_after`, `checkpoint.keep_best` and `export.weights: best` go by: `loss`, `rouge1`, `rougeL`, …"""
    stop_after: PositiveInt | None = None  # type: ignore[valid-type]
    """Stop after so many evaluations without gain in `best_metric`."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Sharded checkpoints in the run folder."""

    every_steps: PositiveInt | None = None  # type: ignore[valid-type]
    """Steps between checkpoints; unset: one at the end."""
    keep_last: PositiveInt = 2  # type: ignore[valid-type]
    """Newest checkpoints kept."""
    keep_best: NonNegativeInt = 0  # type: ignore[valid-type]
    """Checkpoints kept beside them for their `eval.best_metric`."""
    resume: str = "auto"
    """`auto` goes on from the newest valid checkpoint of the run folder, `never` starts fresh, a path names a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """The Hugging Face folder written at the end."""

    weights: Literal["last", "best"] = "last"
    """Which weights: after the last step, or of the best checkpoint kept."""
    max_shard_size: str = "5GB"
    """Largest safetensors file."""


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Where figures go, beside `metrics.jsonl`."""

    log_with: list[str] = field(default_factory=list)
    """Trackers of accelerate: `tensorboard`, `wandb`, …"""
    project_name: str = "toolkit"
    """Project name the trackers get."""


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """A torch profiler window."""

    steps: list[PositiveInt] | None = None  # type: ignore[valid-type]
    """First and last step of the window; its trace goes into the run folder."""


@dataclass(frozen=True, kw_only=True)
class SummarizationConfig:
    """What `recipes/t5.py` does."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    run: RunConfig = field(default_factory=RunConfig)
    log_every_steps: PositiveInt = 10  # type: ignore[valid-type]
    """Steps between two reads of the loss (each read waits for the device)."""
    log_row_ids: bool = False
    """Write the row ids of every micro-batch to `rows-<rank>.jsonl`: which rank trained on what."""


def load_config(config_class: type[ConfigT], argv: list[str] | None = None, *, description: str | None = None) -> ConfigT:
    """Read `--config FILE` and dotted flags (flags win, wherever they stand) into `config_class`.

    Raises:
        UserError: an unknown key (the nearest one is suggested), a wrong type, a missing or broken file.
    """
    # No abbreviations: a flag that is nearly right would be taken for another, and for a third one in the next version.
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False, description=description)
    parser.add_argument("--config", action="config", help="Run YAML; flags given beside it win.")
    parser.add_class_arguments(config_class, None)
    files, flags = split_files_and_flags(sys.argv[1:] if argv is None else argv)
    entries: dict[str, Entry] = {}
    for file in files:
        entries |= load_entries(Path(file), config_class)
    file_arguments = [f"--config={file}" for file in files]
    try:
        parser.parse_args(file_arguments)  # alone, so that an error is theirs
    except ArgumentError as error:
        if "arguments are required" not in str(error):  # flags may give them
            raise UserError(sentence(str(error), config_class, [], entries)) from None
    try:
        namespace = parser.parse_args([*file_arguments, *unset_counterparts(flags), *flags])
        namespace.pop("config")
        config = parser.instantiate(namespace)
    except ArgumentError as error:
        raise UserError(sentence(str(error), config_class, flags, {})) from None
    built = _with_plain_numbers(config_class(**{name: config[name] for name in field_names(config_class)}))
    check_config(built)
    return built


def field_names(config_class: type) -> list[str]:
    """Names of a config dataclass's own fields."""
    return [f.name for f in dataclasses.fields(config_class)]


def dotted_keys(config: Any, prefix: str = "") -> dict[str, Any]:
    """`{"optim.lr": 1e-3, …}` of a config, in the order of its fields."""
    flat: dict[str, Any] = {}
    for name in field_names(type(config)):
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            flat.update(dotted_keys(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def save_config(config: Any, path: Path) -> None:
    """Write the resolved config as YAML that `--config` reads again."""
    import yaml

    path.write_text(yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True))


def _with_plain_numbers(config: Any) -> Any:
    """jsonargparse's restricted types are subclasses of int and float, which YAML cannot write."""
    plain = {}
    for name in field_names(type(config)):
        value: Any = getattr(config, name)
        if dataclasses.is_dataclass(value):
            plain[name] = _with_plain_numbers(value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            plain[name] = int(value) if isinstance(value, int) else float(value)
        elif isinstance(value, list):
            plain[name] = [int(item) if isinstance(item, int) else item for item in value]
    return dataclasses.replace(config, **plain)
