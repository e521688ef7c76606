"""The settings of all optimizers, and the optimizers by name. Another one is a file like `lion.py`, and its name here, twice.
torch is not imported here."""

import dataclasses
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, PositiveFloat

from toolkit.errors import UserError
from toolkit.optimizers import adafactor, adamw, adamw_8bit, lion
from toolkit.optimizers.state import Layout, Shape


@dataclasses.dataclass(frozen=True, kw_only=True)
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


class Optimizer(Protocol):
    """What the file of an optimizer has; also `update(settings, …)`, a `stepping.Update`, or `build` if torch has it."""

    TITLE: str
    """Its name in texts."""
    DEFAULTS: dict[str, Any]
    """Those of `OptimizerSettings` that only some optimizers have, with their values if unset."""
    TAKES_FLAT: bool
    """Whether it also updates FSDP1's flat parameters, of which no rank knows the rows."""

    def layout(self, shape: Shape) -> Layout:
        """The state of a weight of this shape. It depends on nothing else, so that any number of ranks can resume it."""

    def write_out(
        self, settings: Any, weight: Any, gradient: Any, state: dict[str, Any], step: int, lr: float, weight_decay: float
    ) -> tuple[Any, dict[str, Any]]:
        """The formula, for checks: the change of a weight in the 1-based `step`, and the state after it.

        Args:
            settings: `OptimizerSettings` that `with_defaults` has completed.
            weight: fp64 array; `gradient` has its shape.
            state: before the step, as `layout` says, in fp64; empty before the first.
        """


OPTIMIZERS: dict[str, Optimizer] = {"adamw": adamw, "adamw_8bit": adamw_8bit, "adafactor": adafactor, "lion": lion}


SettingsT = TypeVar("SettingsT", bound=OptimizerSettings)


def with_defaults(settings: SettingsT) -> SettingsT:
    """The settings with the optimizer's own defaults where they are unset."""
    own = OPTIMIZERS[settings.name].DEFAULTS
    unset: dict[str, Any] = {name: default for name, default in own.items() if getattr(settings, name) is None}
    return dataclasses.replace(settings, **unset)


def build(settings: OptimizerSettings, groups: list[dict[str, Any]]) -> Any:
    """The torch optimizer of these groups of parameters, which are DTensors under FSDP2. `with_defaults` has completed
    the `settings`, which `update` gets too.

    Where its `found_inf` is 1, a step changes no weight and no state, and still makes the state; the host reads nothing.
    """
    from toolkit.optimizers.stepping import ShardedOptimizer

    own: Any = OPTIMIZERS[settings.name]
    if hasattr(own, "build"):
        return own.build(settings, groups)
    return ShardedOptimizer(groups, settings.lr, own.layout, partial(own.update, settings))


def state_bytes(name: str, shape: Shape, of_shard: Shape | None = None) -> int:
    """Bytes of the state of a weight on a rank whose shard of it has the shape `of_shard`; None: all of it."""
    return sum(part.num_bytes(of_shard or shape) for part in OPTIMIZERS[name].layout(tuple(shape)).values())


def check_sharding(name: str, *, is_flat: bool) -> None:
    """Refuse an optimizer that FSDP1 hides the rows from, by a `UserError` with its name."""
    if is_flat and not OPTIMIZERS[name].TAKES_FLAT:
        others = " or ".join(other for other, optimizer in OPTIMIZERS.items() if optimizer.TAKES_FLAT)
        raise UserError(f"optim.name is {name}, which needs the rows that FSDP1 flattens: set fsdp_version: 2, or take {others}")
