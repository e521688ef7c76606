"""Sections of the run configs: one frozen dataclass each, with a docstring a field, which is what `--help` prints.

A module of the toolkit gets only its own section.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from toolkit.config.data import DataConfig, LLMDataConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where the run writes."""

    output_dir: str = "runs"
    """Folder that holds run folders."""
    name: str = "run"
    """Name of the run; its folder is `output_dir/name`."""
    timeout_s: PositiveInt = 1800  # type: ignore[valid-type]
    """Seconds without progress after which every rank shows where it stands and exits; more than the longest step or evaluation
    batch takes. Tokenizing, loading, saving and exporting may take longer, as long as a process computes, reads or writes."""


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
    frozen_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What frozen parameters are stored in. `auto`: under an adapter the dtype they are computed in (FSDP1: float32), else
    float32."""
    init_from: str | None = None
    """Start from the weights of another run: its folder, a checkpoint of it, or an exported model."""
    trust_remote_code: bool = False
    """Run model code from the hub. Off unless asked for."""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """A small trainable part on a frozen model (peft)."""

    method: Literal["none", "lora", "rslora", "dora"] = "none"
    """`lora`; `rslora` scales by alpha/sqrt(rank) instead of alpha/rank; `dora` also trains each weight's magnitude."""
    rank: PositiveInt = 16  # type: ignore[valid-type]
    """Inner dimension of the two adapter matrices."""
    alpha: PositiveFloat = 32.0  # type: ignore[valid-type]
    """Scale of the adapter's output, over its rank."""
    dropout: ClosedUnitInterval = 0.0  # type: ignore[valid-type]
    """Dropout of the adapter's input."""
    target_modules: list[str] | str = "all-linear"
    """Ends of the names of the modules to adapt, as in `[q_proj, v_proj]`; `all-linear`: all linear ones but the head."""
    modules_to_save: list[str] = field(default_factory=list)
    """Ends of the names of modules trained whole, as in `[embed_tokens]`, and saved with the adapter."""
    name_or_path: str | None = None
    """An existing adapter (folder or hub id) to go on training; it brings its own rank, alpha and modules."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The global batch is the unit: a step is one optimizer update over `global_batch_size_rows` rows."""

    global_batch_size_rows: PositiveInt = 64  # type: ignore[valid-type]
    """Rows of one optimizer update, over all processes."""
    global_batch_size_tokens: PositiveInt | None = None  # type: ignore[valid-type]
    """Instead of a number of rows: as many rows as have at most so many tokens together."""
    micro_batch_size_rows: PositiveInt = 8  # type: ignore[valid-type]
    """Most rows (packed ones, if they are) in one forward pass of one process. Accumulation is derived from it; it never
    changes the result."""
    max_steps: NonNegativeInt | None = None  # type: ignore[valid-type]
    """Optimizer updates; 0 only evaluates, and merges where `export.merge`. Give this or `num_epochs`."""
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
    max_skipped_steps: PositiveInt = 5  # type: ignore[valid-type]
    """An update whose loss or gradient is not finite is skipped on all ranks; so many in a row stop the run."""
    skip_beyond_sigmas: PositiveFloat | None = None  # type: ignore[valid-type]
    """Skip also an update whose gradient norm is so many standard deviations above the mean of the last `skip_window_steps`;
    unset: never."""
    skip_window_steps: PositiveInt = 100  # type: ignore[valid-type]
    """Steps whose gradient norms `skip_beyond_sigmas` looks back on; it acts once there are so many."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Held-out loss and generation."""

    every_steps: PositiveInt | None = None  # type: ignore[valid-type]
    """Steps between evaluations; unset: once at the end."""
    at_start: bool = True
    """Evaluate before the first step too: the untrained baseline."""
    num_rows: PositiveInt | None = None  # type: ignore[valid-type]
    """Use only so many held-out rows: equally many of each entry of `data.mix`, chosen by a hash of their place in the data."""
    batch_size_rows: PositiveInt = 64  # type: ignore[valid-type]
    """Rows of one evaluation batch of one process. In fp32 it never changes the result."""
    generate: bool = True
    """Generate texts and measure ROUGE."""
    num_beams: PositiveInt = 1  # type: ignore[valid-type]
    """Beams of the search; 1 is greedy."""
    max_new_tokens: PositiveInt = 64  # type: ignore[valid-type]
    """Longest generated text."""
    no_repeat_ngram_size: NonNegativeInt = 0  # type: ignore[valid-type]
    """Generated texts repeat no n-gram of this size; 0: any."""
    unshard: Literal["auto", "never"] = "auto"
    """`auto` gathers the model once per evaluation where it fits, `never` gathers it block by block."""
    best_metric: str = "loss"
    """What `stop_after`, `checkpoint.keep_best` and `export.weights: best` go by: `loss`, `rouge1`, `rougeL`, …; only figures
    of the same rows are compared, of texts also only those generated with the same settings."""
    stop_after: PositiveInt | None = None  # type: ignore[valid-type]
    """Stop after so many evaluations without gain in `best_metric`, compared with the best of the steps before; the evaluation
    at the start does not count."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Sharded checkpoints in the run folder."""

    every_steps: PositiveInt | None = None  # type: ignore[valid-type]
    """Steps between checkpoints; unset: one at the end."""
    async_save: bool = True
    """Train on while a checkpoint is written; costs host memory for a copy of each rank's shards. False: wait for it."""
    keep_last: PositiveInt = 2  # type: ignore[valid-type]
    """Newest checkpoints kept."""
    keep_best: NonNegativeInt = 0  # type: ignore[valid-type]
    """Checkpoints kept beside them for their `eval.best_metric`; where set, a step that
    beats all saved before is saved."""
    resume: str = "auto"
    """`auto` goes on from the newest valid checkpoint of the run folder, `never` starts fresh, a path names a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """The Hugging Face folder written at the end."""

    weights: Literal["last", "best"] = "last"
    """Which weights: after the last step, or of the kept checkpoint with the best `eval.best_metric`; never the start's."""
    max_shard_size: str = "5GB"
    """Largest safetensors file."""
    merge: bool = False
    """Write the model with the adapter merged into it too, to `merged/` of the run folder."""


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
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
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


@dataclass(frozen=True, kw_only=True)
class LLMConfig:
    """What `recipes/llm.py` does."""

    model: ModelConfig
    data: LLMDataConfig
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
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
