"""Casts weights to the dtype of an exported folder, one at a time, and counts what that rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from toolkit.errors import UserError
from toolkit.parallel.wrap import copy_on_meta
from toolkit.private import private

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def name_of(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def cast_on_meta(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy on the meta device with parameters in `dtype`, or in fp32 where transformers would load them so (T5's `wo`)."""
    model = copy_on_meta(model)
    plan = private("_get_dtype_plan", model)(dtype)
    kept = private("build_glob_alternation")(list(plan))[0] if plan else None
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if kept is not None and kept.search(name) else dtype)
    return model


class Cast:
    """Casts a model's weights to the dtypes that they are exported in."""

    def __init__(self, dtypes: dict[str, torch.dtype]) -> None:
        """`dtypes` by the weights' names."""
        self._dtypes = dtypes
        self._num_weights = self._num_changed = 0
        self._largest = 0.0

    @torch.no_grad()
    def __call__(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """The weight in its exported dtype.

        Raises:
            UserError: it is finite, and beyond that dtype's range.
        """
        dtype = self._dtypes[name]
        self._num_weights += weight.numel()
        if weight.dtype == dtype:
            return weight
        cast = weight.to(dtype)
        if bool((cast.isinf() & ~weight.isinf()).any()):
            largest = weight.abs().max()
            raise UserError(f"{name} has weights up to {largest:.3g}, more than {name_of(dtype)} can hold: take bfloat16")
        difference = (cast.to(weight.dtype) - weight).abs() if cast.itemsize < weight.itemsize else torch.zeros(1)
        self._num_changed += int((difference > 0).sum())
        self._largest = max(self._largest, float(difference.nan_to_num().max()))
        return cast

    def describe(self) -> str:
        """What was rounded."""
        names = sorted({name_of(dtype) for dtype in self._dtypes.values()})
        share = 100 * self._num_changed / max(1, self._num_weights)
        kept = f" ({' and '.join(names)})" if len(names) > 1 else ""
        return f"rounded {share:.1f} % of {self._num_weights:,} weights, each by at most {self._largest:.1e}{kept}"
