"""Sections of the run configs: one frozen dataclass each. `--help` prints the docstrings of the fields.

Each module of the toolkit gets only its own section.
"""

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

from jsonargparse.typing import (
    ClosedUnitInterval,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    restricted_number_type,
)

from toolkit.config.data import DataConfig, LLMDataConfig, PreferenceDataConfig, Seq2SeqPreferenceDataConfig
from toolkit.config.facts import stated
from toolkit.optimizers import OptimizerSettings

HalfOpenUnitInterval = restricted_number_type("HalfOpenUnitInterval", float, [(">=", 0), ("<", 1)])
NumEpochs = restricted_number_type("NumEpochs", float, [(">", 0), ("<", math.inf)])
Checkpointing = Literal["none", "full", "selective"]
"""What is computed again in the backward: `TrainConfig.activation_checkpointing`."""
TrainedDtype = Literal["float32", "bfloat16_stochastic"]
"""`ModelConfig.trained_dtype`."""


def as_written(number: float) -> Fraction:
    """The decimal number as it was written: 0.1 is a tenth, not the nearest binary number, of which three are more than 0.3."""
    return Fraction(str(number))


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where the run writes, and when it counts as hung."""

    output_dir: str = stated("runs", per_rank=True)
    """Parent folder of all run folders."""
    name: str = "run"
    """Name of the run. It writes into `output_dir/name`."""
    timeout_s: PositiveInt = 1800  # type: ignore[valid-type]
    """Seconds without progress after which every rank prints its stack and exits. Give more than the longest step or evaluation
    batch takes. Tokenizing, loading, saving and exporting may take longer: there, CPU time and IO count as progress."""
    num_threads: PositiveInt | None = stated(None, per_rank=True)  # type: ignore[valid-type]
    """Threads of each process for work on the host. If unset, its share of the node's cores with a GPU, else what the launcher
    has set."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and which of its parameters train."""

    name_or_path: str = stated(path="path", export=True, in_card=False)
    """Hub id or local folder of a Hugging Face model. With `from_scratch`, a folder needs only `config.json`."""
    revision: str | None = stated(None, export=True)
    """Hub revision (branch, tag or commit)."""
    from_scratch: bool = False
    """Initialize weights randomly from the model's config and `train.seed` instead of loading pretrained ones."""
    tokenizer: str | None = stated(None, path="path", resume=True, export=True)
    """Hub id or local folder of the tokenizer, if it is not that of `name_or_path`."""
    train_tokenizer: bool = False
    """Train a tokenizer on the rows, for a model that Python code has built, or with `from_scratch`, which does so anyway for a
    folder without one. Pretrained weights need their own."""
    attn_implementation: str | None = None
    """Attention kernel: `sdpa`, `eager`, `flash_attention_2`, … If unset, transformers chooses. Packed rows are attended
    to document by document where model and device allow it. The first lines of a run say so."""
    cudnn_attention: bool = False
    """Let `sdpa` take cuDNN's kernel in training, where a GPU prefers it. It plans each new shape for tens of milliseconds, so it
    is for rows of one length. Generation never takes it: its shape is new at every token."""
    add_tokens: list[str] | None = None
    """Special tokens to add to the tokenizer, as `[<|im_start|>, <|im_end|>]` of a chat template on a base model. Their rows of
    the embedding and of the head train, with an adapter too. A special token that the tokenizer has is used as it is. Texts
    keep those that targets hold, such as tags or `"\\n"`."""
    dropout: ClosedUnitInterval | None = None  # type: ignore[valid-type]
    """Set every dropout rate in the model's config. If unset, the model keeps its own."""
    freeze: list[str] = field(default_factory=list)
    """Regular expressions. A parameter is frozen if one of them matches its full name or that of a tied alias."""
    frozen_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Storage dtype of frozen parameters. With an adapter, `auto` means the compute dtype (FSDP1: float32); otherwise it means
    float32."""
    trained_dtype: TrainedDtype = "float32"
    """Storage dtype of trainable parameters. `bfloat16_stochastic`: bf16 without fp32 masters. An update is rounded up or down at
    random, by bits of `train.seed`, the step, the parameter and the position. Gradients are bf16 too, and add up in fp32 over
    micro-batches. For `adamw_8bit`, `adafactor` and `lion`, on one process or under FSDP2."""
    init_from: str | None = stated(None, path="path")
    """Start from the weights of another run. Give its folder, one of its checkpoints, or an exported model."""
    trust_remote_code: bool = False
    """Run model code from the hub."""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """A LoRA adapter on a frozen base model (peft)."""

    method: Literal["none", "lora", "rslora", "dora"] = "none"
    """Kind of adapter. `rslora` scales by alpha/sqrt(rank) instead of alpha/rank; `dora` also trains each weight's magnitude."""
    rank: PositiveInt = 16  # type: ignore[valid-type]
    """Rank of the two adapter matrices."""
    alpha: PositiveFloat = 32.0  # type: ignore[valid-type]
    """Numerator of the scale of the adapter's output, alpha/rank."""
    dropout: HalfOpenUnitInterval = 0.0  # type: ignore[valid-type]
    """Dropout rate on the adapter's input."""
    target_modules: list[str] | str = "all-linear"
    """Name suffixes of the modules to adapt, as in `[q_proj, v_proj]`, or a regular expression of their full names. `all-linear`
    means all linear modules except the head and, in a mixture of experts, experts and routers. Of a model that also takes images
    or sound, the text part is adapted."""
    exclude_modules: list[str] | str | None = None
    """Name suffixes, or a regular expression, of modules that get no adapter. Nor do layers that `model.freeze` names."""
    experts: bool = False
    """Also adapt the experts of a mixture, each with matrices of its own. For experts alone, set `target_modules` to `[]`."""
    modules_to_save: list[str] = field(default_factory=list)
    """Name suffixes of modules to train fully, as in `[embed_tokens]`, and to save with the adapter."""
    name_or_path: str | None = stated(None, path="path", export=True)
    """An existing adapter (folder or hub id) to continue training. It brings its own rank, alpha and modules."""
    base_dtype: Literal["nf4", "int8"] | None = None
    """Quantize adapted linear layers and experts, in blocks of 64, while they are read from their files: `nf4` (QLoRA) takes 0.56
    bytes a weight, `int8` 1.06. By default the base stays as `model.frozen_dtype` says."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Batch sizes, length and seed. A step is one optimizer update over `global_batch_size_rows` rows."""

    global_batch_size_rows: PositiveInt = 64  # type: ignore[valid-type]
    """Rows per optimizer update, summed over all processes."""
    global_batch_size_tokens: PositiveInt | None = None  # type: ignore[valid-type]
    """Tokens per optimizer update, instead of rows: a step takes as many rows as fit into this number."""
    micro_batch_size_rows: PositiveInt = stated(8, resume=True)  # type: ignore[valid-type]
    """Maximum rows (packed rows, with packing) in one forward pass of one process. Gradient accumulation follows from it; the
    result does not depend on it."""
    max_steps: NonNegativeInt | None = stated(None, resume=True)  # type: ignore[valid-type]
    """Number of optimizer updates. 0 only evaluates, and merges if `export.merge` is set. Give this or `num_epochs`."""
    num_epochs: NumEpochs | None = stated(None, resume=True, excludes="max_steps")  # type: ignore[valid-type]
    """Number of passes over the rows, as in 2.5. A part of an epoch is rounded up to whole steps. Give this or `max_steps`."""
    seed: NonNegativeInt = 0  # type: ignore[valid-type]
    """Seed of the weight initialization, row order and dropout."""
    activation_checkpointing: Checkpointing = stated("none", resume=True)
    """What each block computes again in the backward instead of keeping it, with the same dropout. `full`: all but its input, for
    about a third more time. `selective`: what is cheap; results of linear layers and of attention without dropout are kept. The
    accelerate YAML's `fsdp_activation_checkpointing: true` is `full`; a run sets one of the two."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig(OptimizerSettings):
    """The optimizer, its learning-rate schedule, and which updates are clipped or skipped."""

    schedule: Literal["linear", "cosine", "constant", "step"] = "linear"
    """Shape of the learning-rate schedule after the warm-up."""
    warmup_steps: NonNegativeInt = 0  # type: ignore[valid-type]
    """Steps over which the learning rate rises linearly to `lr`. Give this or `warmup_ratio`."""
    warmup_ratio: HalfOpenUnitInterval = stated(0.0, excludes="warmup_steps")  # type: ignore[valid-type]
    """Warm-up as a fraction of the run's steps, rounded up. Give this or `warmup_steps`."""
    min_lr_ratio: ClosedUnitInterval = 0.0  # type: ignore[valid-type]
    """Final learning rate of the linear and cosine schedules, as a fraction of `lr`."""
    gamma: PositiveFloat = 0.7  # type: ignore[valid-type]
    """Factor of each decay in the `step` schedule."""
    decay_every_steps: PositiveInt | None = None  # type: ignore[valid-type]
    """Steps between decays in the `step` schedule. If unset, decay once per epoch."""
    label_smoothing: HalfOpenUnitInterval = 0.0  # type: ignore[valid-type]
    """Share of each label's probability that is spread evenly over the vocabulary. It changes the training loss, also as it is
    logged; the evaluation's loss is never smoothed."""
    router_aux_loss: Literal["off", "document", "global"] = "off"
    """Auxiliary loss that evens out the load of a mixture's experts, times `router_aux_loss_coef` of the model's config.
    `document` balances each document (DeepSeek-V3's), `global` the global batch, whose routing a forward without gradient counts
    first, for about a third more time. Both are exact for any micro-batch. It is logged beside the loss, not in it."""
    max_grad_norm: PositiveFloat | None = 1.0  # type: ignore[valid-type]
    """Clip gradients to this global norm. null disables clipping."""
    max_skipped_steps: PositiveInt = stated(5, resume=True)  # type: ignore[valid-type]
    """Stop the run after this many skipped updates in a row. All ranks skip an update with a non-finite loss or gradient."""
    skip_beyond_sigmas: PositiveFloat | None = None  # type: ignore[valid-type]
    """Also skip an update whose gradient norm is this many standard deviations above the mean of the last `skip_window_steps`.
    If unset, only non-finite updates are skipped."""
    skip_window_steps: PositiveInt = 100  # type: ignore[valid-type]
    """Number of past gradient norms that `skip_beyond_sigmas` compares with. It takes effect once there are that many."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Loss and generated texts on the evaluation split."""

    every_steps: PositiveInt | None = None  # type: ignore[valid-type]
    """Steps between evaluations. If this and `every_epochs` are unset, evaluate once at the end."""
    every_epochs: NumEpochs | None = stated(None, excludes="every_steps")  # type: ignore[valid-type]
    """Epochs between evaluations, as in 0.5, instead of `every_steps`. A part of an epoch is rounded up to whole steps."""
    at_start: bool = True
    """Also evaluate before the first step, as the untrained baseline."""
    num_rows: PositiveInt | None = None  # type: ignore[valid-type]
    """Evaluate only this many rows, chosen by a hash of their position; each named set gets an equal number."""
    batch_size_rows: PositiveInt = 64  # type: ignore[valid-type]
    """Rows per evaluation batch of one process. In fp32 the result does not depend on it."""
    generate: bool = True
    """Generate texts and measure ROUGE."""
    num_beams: PositiveInt | None = stated(None, export=True)  # type: ignore[valid-type]
    """Number of beams. 1 means greedy decoding. If unset, that of the base's generation config; 1 if it has none."""
    max_new_tokens: PositiveInt = stated(64, export=True)  # type: ignore[valid-type]
    """Maximum tokens per generated text."""
    no_repeat_ngram_size: NonNegativeInt | None = stated(None, export=True)  # type: ignore[valid-type]
    """Forbid repeated n-grams of this size in generated texts. 0 allows all. If unset, that of the base's generation config."""
    metrics: list[str] = stated(default_factory=list, path="named")
    """More metrics of generated texts: modules of `evaluate` by their name on the hub (`sacrebleu`), or folders with a script
    (`./my_metric`). They are code, and it runs. Figures are named `sacrebleu/score`: module, slash, key of its result."""
    unshard: Literal["auto", "never"] = "auto"
    """`auto` gathers the full model once per evaluation if it fits in memory; `never` gathers it block by block."""
    best_metric: str = "loss"
    """Metric for `early_stopping_patience`, `checkpoint.keep_best` and `export.weights: best`: `loss`, `rouge1`, `rougeL`, …,
    or of a named evaluation set `news/loss`, … Only values measured on the same rows and, for text metrics, with the same
    generation settings and code are compared."""
    higher_is_better: bool | None = None
    """Whether a higher `best_metric` is better. Needed for a figure of `metrics`; the toolkit's own figures have a direction."""
    early_stopping_patience: PositiveInt | None = None  # type: ignore[valid-type]
    """Early stopping: stop after this many evaluations in a row that do not improve on the best `best_metric` so far. The
    evaluation before the first step does not count."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Sharded checkpoints in the run folder."""

    every_steps: PositiveInt | None = None  # type: ignore[valid-type]
    """Steps between checkpoints. If this and `every_epochs` are unset, save one at the end."""
    every_epochs: NumEpochs | None = stated(None, excludes="every_steps")  # type: ignore[valid-type]
    """Epochs between checkpoints, as in 0.5, instead of `every_steps`. A part of an epoch is rounded up to whole steps."""
    async_save: bool = True
    """Save asynchronously: training continues while the checkpoint, staged in host memory, is written. false waits for it."""
    keep_last: PositiveInt = 2  # type: ignore[valid-type]
    """Number of newest checkpoints to keep."""
    keep_best: NonNegativeInt = 0  # type: ignore[valid-type]
    """Number of checkpoints to keep in addition for their `eval.best_metric`. If set, a step that beats all saved ones is
    saved."""
    resume: str = stated("auto", path="path")
    """`auto` resumes from the newest valid checkpoint in the run folder, `never` starts fresh, a path names a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """The Hugging Face model folder written at the end."""

    weights: Literal["last", "best"] = "last"
    """Weights to export: those of the last step, or of the kept checkpoint with the best `eval.best_metric`, never of step 0."""
    max_shard_size: str = stated("5GB", export=True)
    """Maximum size of one safetensors file."""
    merge: bool = False
    """Also write the model with the adapter merged into it, to `merged/` in the run folder."""
    merge_into: Literal["dequantized", "original"] = stated("dequantized", export=True)
    """The base that a merge starts from if `adapter.base_dtype` has quantized it: the dequantized one, on which the adapter was
    trained, or the original one of the files, which the exported adapter names."""
    push_to_hub: str | None = None
    """Repository of the Hugging Face hub, `NAMESPACE/NAME`, to upload the export to at the end: the model, merged if
    `export.merge` is set, else the adapter. A new one is private. A token that may not write there is refused at the start."""


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Experiment trackers that get the metrics, in addition to `metrics.jsonl`; see docs/tracking.md."""

    log_with: list[str] = field(default_factory=list)
    """Trackers by name: `tensorboard` (into the run folder), `wandb`, `trackio`, `mlflow`, or another that accelerate knows."""
    project_name: str = "toolkit"
    """Project of the trackers; in it the run is `run.name`. TensorBoard has none."""


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """A torch profiler window."""

    steps: list[PositiveInt] | None = None  # type: ignore[valid-type]
    """First and last step to profile. The trace goes into the run folder."""


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """What the configs of all recipes of language models share: everything except the type of `data`."""

    model: ModelConfig
    data: Any
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = stated(default_factory=EvalConfig, resume=True)
    checkpoint: CheckpointConfig = stated(default_factory=CheckpointConfig, resume=True)
    export: ExportConfig = stated(default_factory=ExportConfig, resume=True)
    tracking: TrackingConfig = stated(default_factory=TrackingConfig, resume=True)
    profile: ProfileConfig = stated(default_factory=ProfileConfig, resume=True)
    run: RunConfig = stated(default_factory=RunConfig, resume=True)
    log_every_steps: PositiveInt = stated(10, resume=True)  # type: ignore[valid-type]
    """Steps between two lines with loss, learning rate, tokens/s and time left, which a terminal shows in its bar. Each reads the
    loss and so waits for the device."""
    log_row_ids: bool = stated(False, resume=True)
    """Write the row ids of every micro-batch to `rows-<rank>.jsonl` in the run folder."""
    objective: str | None = stated(None, resume=True)
    """Name of what the run trains for, which it writes itself: that of its recipe (`seq2seq`, `causal`, `preference`), or one
    that Python code has given to `finetune`."""
    recipe: str | None = stated(None, resume=True)
    """The recipe of this run YAML, for `python -m toolkit train` and the other tools. If unset, the model chooses."""

    @property
    def has_own_objective(self) -> bool:
        """Whether Python code has given the objective, which no command can find."""
        return self.objective not in (None, self.data.objective)

    @property
    def packs(self) -> bool:
        """Whether rows are packed, or may be: with `data.packing` auto, the model decides."""
        return bool(self.data.packing)


@dataclass(frozen=True, kw_only=True)
class SummarizationConfig(RecipeConfig):
    """Config of `recipes/t5.py`."""

    data: DataConfig
    recipe: Literal["t5"] | None = stated(None, resume=True)


@dataclass(frozen=True, kw_only=True)
class LLMConfig(RecipeConfig):
    """Config of `recipes/llm.py`."""

    data: LLMDataConfig
    recipe: Literal["llm"] | None = stated(None, resume=True)


@dataclass(frozen=True, kw_only=True)
class PreferenceLossConfig:
    """How a pair of answers becomes a loss."""

    loss: str = "sigmoid"
    """`sigmoid` (DPO), `robust`, `ipo`, or, without a reference, `simpo` and `orpo`; `toolkit/objectives/preference_losses.py`
    has each with its formula and paper."""
    reference: str | None = stated(None, path="path")
    """Hub id or local folder of the reference model, with the same tokenizer; it is loaded for one pass before the first step. If
    unset, the model as it starts: with a new adapter the base."""
    beta: PositiveFloat = 0.1  # type: ignore[valid-type]
    """Scale of the rewards; of `ipo` its tau, of `orpo` the weight of the odds ratio (lambda). SimPO's paper takes 2 to 2.5."""
    label_smoothing: HalfOpenUnitInterval = 0.0  # type: ignore[valid-type]
    """Assumed share of pairs whose answers are the wrong way round, below 0.5: of `sigmoid` (conservative DPO), `robust` and
    `simpo`."""
    margin: NonNegativeFloat = 0.5  # type: ignore[valid-type]
    """Margin that `simpo` asks for between the two rewards (its gamma)."""


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(RecipeConfig):
    """Config of `recipes/dpo.py`. Dropout is off unless `model.dropout` sets it."""

    data: PreferenceDataConfig
    preference: PreferenceLossConfig = field(default_factory=PreferenceLossConfig)
    recipe: Literal["dpo"] | None = stated(None, resume=True)


@dataclass(frozen=True, kw_only=True)
class Seq2SeqPreferenceConfig(RecipeConfig):
    """Config of `recipes/dpo_t5.py`. Dropout is off unless `model.dropout` sets it."""

    data: Seq2SeqPreferenceDataConfig
    preference: PreferenceLossConfig = field(default_factory=PreferenceLossConfig)
    recipe: Literal["dpo_t5"] | None = stated(None, resume=True)
