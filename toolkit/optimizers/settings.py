"""The settings of all optimizers, which are a base of the run config's section `optim`; torch is not imported here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, PositiveFloat


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Settings that an optimizer does not have are None, or refused."""

    name: Literal["adamw", "adamw_8bit", "adafactor", "lion"] = "adamw"
    """`adamw`; `adamw_8bit` (its moments in 8 bits); `adafactor` (T5's: row and column statistics in place of moments); `lion`
    (one moment, steps of one size). docs/configuration.md says which to take."""
    lr: PositiveFloat = 1e-3  # type: ignore[valid-type]
    """Peak learning rate."""
    beta1: ClosedUnitInterval | None = None  # type: ignore[valid-type]
    """Decay rate of the first moment. If unset, 0.9; `adafactor` has none."""
    beta2: ClosedUnitInterval | None = None  # type: ignore[valid-type]
    """Decay rate of the second moment, or of Lion's one. If unset, 0.999, for `lion` 0.99; `adafactor` has its own."""
    eps: PositiveFloat | None = None  # type: ignore[valid-type]
    """Term added to the root of the second moment. If unset, 1e-8; `adafactor` and `lion` have none."""
    weight_decay: NonNegativeFloat = 0.0  # type: ignore[valid-type]
    """Decoupled weight decay. Norms and biases are excluded."""
    scale_by_weight: bool = False
    """Of `adafactor`: multiply the learning rate by the root mean square of each weight, as T5's papers do."""
