"""What the kind of task decides. Each kind fills the record in a file of `toolkit/tasks/`, which its `data` section names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, kw_only=True)
class Task:
    """A kind of task. No other code asks which one it is."""

    auto_class: str
    """The class of transformers that loads the model."""
    takes: str
    """What that class loads, as the end of an error."""
    pipeline_tag: str
    """The hub's name of the task, for the model card."""
    sides: Mapping[str, str]
    """The lengths of a row in the tensors, by name, with the field of `data` that limits each."""
    lengths: Callable[[Any, Any], tuple[Any, ...]]
    """Arrays of `num_tokens` and `num_label_tokens` → those lengths."""
    choose_columns: Callable[..., Any]
    """As `toolkit.data.rows.columns.choose_columns`."""
    tokens: Any
    """Module with the functions that `toolkit/data/tokens/prepare.py` calls."""
    build_collator: Callable[[Any, int], Any]
    """The model, perhaps on the meta device, and the tokenizer's padding token → the collator."""
    check_model_config: Callable[[PretrainedConfig, str], None]
    """Refuses a config, with the model's name, by a `UserError`: what the task needs beside what `load_model_config` checks."""
    check_model: Callable[[Any, Any, Any], None]
    """Checks the sharded model, with the collator and the run's config, on short rows. Collective."""
    may_draw_head: bool = False
    """Whether a pretrained model may lack the parameters outside its backbone, which are then drawn from `train.seed`."""
