"""What a run trains for: rows → features → a batch → a summed loss; what that is divided by; what the tools must know.

No other code asks which objective it has. Some of the built-in ones' parts lie in lower folders: the tokens of rows, the loss in
chunks. Shapes: `B` rows, `T` positions, `N` labels that count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from toolkit.config.schema import ModelConfig, RecipeConfig
from toolkit.data.collate import Batch, Collator
from toolkit.data.rows.columns import Columns, choose_columns
from toolkit.data.rows.example import Example
from toolkit.data.rows.load import TextRows
from toolkit.errors import UserError
from toolkit.evaluation.metrics import describe_code
from toolkit.export.run_data import RunData
from toolkit.export.usage import TextUsage, Usage
from toolkit.models.patches.chunked_loss import summed_loss
from toolkit.parallel.wrap import ShardedModel

if TYPE_CHECKING:
    import numpy as np
    import torch
    from datasets import Dataset
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from toolkit.data.tokens.prepare import TokenizedRows
    from toolkit.evaluation.rows import EvaluationRows


class Objective:
    """An objective; an object of a subclass. What is here is that of a number or the like for one text."""

    name: ClassVar[str]
    """As a run folder names it."""
    auto_class: ClassVar[str]
    """The class of transformers that loads the model."""
    takes: ClassVar[str]
    """What that class loads, as the end of an error."""
    kind: ClassVar[str] = "a model of texts"
    """The same in a title."""
    limits: ClassVar[Mapping[str, str]] = {"row": "max_length_tokens"}
    """The sides of a row, in order: those that have a length of their own, with the field of `data` that limits each."""
    inputs: ClassVar[tuple[str, ...]] = ("input_ids",)
    """Names of the tensors that hold the sides."""
    label_side: ClassVar[str] = ""
    """The side that is all labels."""
    can_pack: ClassVar[bool] = False
    """Whether several rows may be packed into one row of the tensors."""
    may_draw_head: ClassVar[bool] = False
    """Whether a pretrained model may lack the parameters outside its backbone, which are then drawn from `train.seed`."""
    reported_columns: ClassVar[tuple[str, ...]] = ("odd", "held")
    """Columns of `tokenize` that `report` and `prepare.py` read, and that are not stored."""
    drops_unlabelled: ClassVar[bool] = False
    """Whether rows without a label that counts are left out; `report` says so."""
    trained: ClassVar[str] = ""
    """Name in the cache of the tokenizer that `train` makes for a model that brings none."""
    counts_tokens: ClassVar[bool] = False
    """Whether labels are the tokens of the rows, which n-grams can predict."""
    takes_chats: ClassVar[bool] = False
    """Whether a prompt may be a chat."""
    counted: ClassVar[str] = "label token"
    """What a step's loss is divided by the number of."""
    num_documents: ClassVar[int] = 1
    """Documents of a row, each within the limit; a pack holds as many times the tokens."""
    num_second_sums: ClassVar[int] = 1
    """How many sums `loss` returns beside the loss."""
    logs_metrics: ClassVar[bool] = False
    """Whether the lines of training steps have all of `metrics`."""
    default_dropout: ClassVar[float | None] = None
    """Dropout where `model.dropout` is unset; None: the model's own."""
    continues_prompt: ClassVar[bool] = False
    """Whether a generated text takes the positions after its prompt."""

    def loader(self, model_config: Any) -> Any:
        """The class of transformers that loads a model of this config, or class of configs: `auto_class`."""
        import transformers

        return getattr(transformers, self.auto_class)

    # --- From the columns of a row to features.

    def choose_columns(self, where: object, existing: Any, config: Any, *, has_chat_template: bool = False) -> Columns:
        """As `toolkit.data.rows.columns.choose_columns`."""
        return choose_columns(where, existing, config, has_chat_template=has_chat_template)

    def set_up(self, tokenizer: PreTrainedTokenizerBase, config: Any, model: ModelConfig) -> None:
        """Set what the tokenizer must know, in place; one that does not fit is a `UserError`."""

    def list_settings(self, config: Any, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
        """What decides the features, beside the rows and the tokenizer; part of the cache's name."""
        settings: dict[str, Any] = {limit: getattr(config, limit) for limit in self.limits.values()}
        return settings | {"objective": describe_code(type(self))}

    def train(self, rows: Dataset, vocab_size: int, config: Any) -> PreTrainedTokenizerBase:
        """A tokenizer from the training rows, for a model that brings none."""
        raise UserError(f"objective {self.name} trains no tokenizer: set model.tokenizer")

    def describe(self, tokenizer: PreTrainedTokenizerBase, rows: TextRows) -> list[str]:
        """What to print about a tokenizer."""
        return []

    def features(self, rows: dict[str, list], tokenizer: PreTrainedTokenizerBase, config: Any) -> dict[str, list]:
        """The columns `input_ids` and `labels`, a list for each row. Rows have `prompt` and `completion`, or `text`."""
        raise UserError(f"objective {self.name} has no features: define them")

    def tokenize(
        self, rows: dict[str, list], tokenizer: PreTrainedTokenizerBase, config: Any, origins: list[tuple[str, int]]
    ) -> dict[str, list]:
        """The columns of `TokenizedRows`, and `reported_columns`, of `features` alone."""
        features, num_rows = self.features(rows, tokenizer, config), len(rows["row_id"])
        columns = [features.get(name, ()) for name in ("input_ids", "labels")]
        if any(len(column) != num_rows or not all(isinstance(cell, Sized) for cell in column) for column in columns):
            what = f"the features of objective {self.name} are {', '.join(features) or 'none'}"
            raise UserError(f"{what}: return input_ids and labels, each with a list for every one of the {num_rows} rows")
        return {
            "row_id": rows["row_id"],
            "source_index": rows["mix_entry"],
            "num_tokens": list(map(len, features["input_ids"])),
            "num_label_tokens": list(map(len, features["labels"])),
            **{name: [""] * num_rows for name in ("target", "lead_text", "odd", "held")},
            **{name: [0] * num_rows for name in ("prompt_length", "target_bytes")},
            **features,
        }

    def report(self, counts: dict[str, np.ndarray], config: Any, name: str, origins: list[tuple[str, int]]) -> list[str]:
        """Sentences about the rows of `train` or `evaluation`, by the columns with one number for each and `reported_columns`."""
        return []

    def loss_settings(self) -> dict[str, Any]:
        """What decides an evaluation's loss besides its rows: of runs that differ in it, reports compare no figures."""
        from toolkit.objectives import BUILT_IN

        return {} if self.name in BUILT_IN else {"objective": self.name}

    def lengths(self, num_tokens: Any, num_labels: Any) -> tuple[Any, ...]:
        """Arrays of `num_tokens` and `num_label_tokens` → the lengths of `limits`. The number of labels, which a step's loss is
        divided by, is known from these before the step."""
        return (num_tokens,)

    def side_lengths(self, rows: Dataset) -> dict[str, np.ndarray]:
        """The lengths of `limits` by side, of all rows: arrays of their number."""
        columns = rows.with_format("numpy")
        return dict(zip(self.limits, self.lengths(columns["num_tokens"][:], columns["num_label_tokens"][:]), strict=True))

    def documents(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """The features of each of a row's `num_documents`."""
        return [row]

    def computed_lengths(self, rows: Dataset) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each text that a row of `build_row` is computed as: tokens and labels, or source and target tokens, of all rows."""
        return [(next(iter(self.side_lengths(rows).values())), rows.with_format("numpy")["num_label_tokens"][:])]

    # --- From features to the loss.

    def build_collator(self, model: PreTrainedModel, pad_token_id: int) -> Collator:
        """What makes a batch of features. The model may be on the meta device."""
        raise UserError(f"objective {self.name} has no build_collator: define it")

    def build_row(self, num_tokens: int, num_labels: int, token: int) -> dict[str, Any]:
        """The features of a made-up row of these lengths, or of a source and target of them, to plan with: each document has
        them."""
        return {"input_ids": [token] * num_tokens, "labels": [-100] * (num_tokens - num_labels) + [token] * num_labels}

    def loss(self, model: nn.Module, batch: Batch, label_smoothing: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss summed over the labels of a collator's batch, a scalar on the device; and a second sum for `metrics`, or
        several in one tensor. Collective under FSDP."""
        return summed_loss(model, batch, label_smoothing)

    def metrics(self, loss_sum: float, second_sum: Any, num_labels: float, num_bytes: float, /) -> dict[str, float]:
        """The figures of an evaluation, of the sums over all ranks of `loss`, labels and bytes of their text. The second sum is a
        float, or a list of `num_second_sums`."""
        return {"loss": loss_sum / num_labels}

    def name_metrics(self) -> list[str]:
        """The names of `metrics`."""
        num = self.num_second_sums
        return [*self.metrics(1.0, 1.0 if num == 1 else [1.0] * num, 1.0, 1.0)]

    # --- Checks.

    def check_model_config(self, model_config: PretrainedConfig, config: ModelConfig) -> None:
        """Refuse a model, by a `UserError`, beside what `load_model_config` checks; it may change the config in place."""

    def check_model(self, sharded: ShardedModel, collator: Collator, config: RecipeConfig) -> None:
        """Check the sharded model on short rows, before it trains. Collective."""

    def complete_evaluation(
        self,
        config: RecipeConfig,
        sharded: ShardedModel,
        rows: TokenizedRows,
        evaluation: EvaluationRows,
        folder: Path,
        goes_on: bool,
    ) -> EvaluationRows:
        """The evaluation rows, with a collator that knows what the model computes as it starts, before a checkpoint is loaded; of
        a run that goes on, from the run folder if that has it. Collective."""
        return evaluation

    def describe_first_pass(self, config: RecipeConfig) -> str:
        """What `complete_evaluation` takes, for a memory plan; empty if nothing."""
        return ""

    # --- Generation, and what the tools must know.

    def start_generation(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, collator: Any) -> None:
        """Set the generation config so that texts begin as in training."""

    @contextmanager
    def forward_kept(self, model: PreTrainedModel) -> Iterator[dict[str, Any]]:
        """Context whose forward leaves in the dict what `generate` can take from it."""
        yield {}

    def set_languages(self, tokenizer: PreTrainedTokenizerBase, name: str, usage: Usage) -> None:
        """Set the languages of an exported translation model; `name` is the model's."""

    def encode_prompts(
        self, tokenizer: PreTrainedTokenizerBase, texts: list[str], are_chats: list[bool], usage: Usage
    ) -> tuple[list[list[int]], list[int]]:
        """The tokens of prompts, as in training, and how many tokens each has lost."""
        raise NotImplementedError

    def task_params(self, config: RecipeConfig) -> dict[str, Any] | None:
        """The `task_specific_params` of an exported config, which pipelines of transformers 4 read."""
        return None

    def write_usage(self, config: RecipeConfig, tokenizer: PreTrainedTokenizerBase, data: RunData | None) -> TextUsage | None:
        """How an exported model takes texts, for Python that is shown; None: it generates none."""
        return None

    def list_commands(self, config: RecipeConfig, skeleton: PreTrainedModel, folder: Path, *, is_adapter: bool) -> list[str]:
        """A line for each tool that takes the exported model."""
        return []

    def pipeline_tag(self, config: RecipeConfig) -> str | None:
        """The hub's name of what the model does, for the model card."""
        return None

    def show_texts(self, example: Example, tokenizer: Any, config: Any, where: str) -> dict[str, str]:
        """The text of each side of a row, for `preview`."""
        return {"row": example.text if example.text is not None else str(example.prompt)}
