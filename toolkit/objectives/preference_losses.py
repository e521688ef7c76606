"""The losses of a pair of answers, each with its paper. An added one is a function here and its name in `LOSSES`.

Shapes: `P` pairs, with the chosen answer before the rejected one where a 2 follows.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from toolkit.config.schema import PreferenceLossConfig


class Answers(NamedTuple):
    """What a loss is computed from."""

    logps_P2: torch.Tensor
    """log p(answer | prompt), summed over its tokens."""
    reference_P2: torch.Tensor
    """The same of the reference; zeros for a loss without one."""
    lengths_P2: torch.Tensor
    """Tokens of each answer, its end token included."""

    @property
    def ratios_P2(self) -> torch.Tensor:
        return self.logps_P2 - self.reference_P2

    @property
    def means_P2(self) -> torch.Tensor:
        return self.logps_P2 / self.lengths_P2


Loss = Callable[[Answers, PreferenceLossConfig], torch.Tensor]
"""→ the loss of each pair, (P,)."""


def sigmoid(answers: Answers, settings: PreferenceLossConfig) -> torch.Tensor:
    """DPO (Rafailov et al., arXiv:2305.18290, equation 7), with label smoothing its conservative form (Mitchell, 2023).

    TRL's `DPOTrainer` has this without smoothing as `sigmoid`; its version 1 smooths only `robust` and others.
    """
    return _smoothed(settings.beta * difference(answers.ratios_P2), settings.label_smoothing)


def robust(answers: Answers, settings: PreferenceLossConfig) -> torch.Tensor:
    """Robust DPO (Chowdhury et al., arXiv:2403.00409, equation 9): unbiased where that share of pairs is the wrong way round."""
    margins_P, share = settings.beta * difference(answers.ratios_P2), settings.label_smoothing
    return (share * F.logsigmoid(-margins_P) - (1 - share) * F.logsigmoid(margins_P)) / (1 - 2 * share)


def ipo(answers: Answers, settings: PreferenceLossConfig) -> torch.Tensor:
    """IPO (Azar et al., arXiv:2310.12036, equation 17), of ratios per token, as in TRL: the paper does not speak of lengths, and
    its authors have confirmed to TRL that its results are those of this form."""
    return (difference(answers.ratios_P2 / answers.lengths_P2) - 1 / (2 * settings.beta)) ** 2


def simpo(answers: Answers, settings: PreferenceLossConfig) -> torch.Tensor:
    """SimPO (Meng et al., arXiv:2405.14734, equation 6): rewards per token, without a reference, that differ by a margin.

    TRL has it as `CPOTrainer` with `loss_type simpo` and `cpo_alpha 0`.
    """
    return _smoothed(settings.beta * difference(answers.means_P2) - settings.margin, settings.label_smoothing)


def orpo(answers: Answers, settings: PreferenceLossConfig) -> torch.Tensor:
    """ORPO (Hong et al., arXiv:2403.07691, equations 6 and 7): cross-entropy of the chosen answer, mean of its tokens, and the
    odds ratio of both answers.

    As in the paper, the cross-entropy counts the answer. TRL's counts the tokens of the prompt too, and takes the mean over the
    tokens of a micro-batch, so that its loss depends on that.
    """
    means_P2 = answers.means_P2
    log_odds_P2 = means_P2 - torch.log(-torch.expm1(means_P2.clamp(max=-1e-6)))
    return -means_P2[:, 0] - settings.beta * F.logsigmoid(difference(log_odds_P2))


LOSSES: dict[str, Loss] = {"sigmoid": sigmoid, "robust": robust, "ipo": ipo, "simpo": simpo, "orpo": orpo}
WITHOUT_REFERENCE = ("simpo", "orpo")
SMOOTHED = ("sigmoid", "robust", "simpo")


def difference(values_P2: torch.Tensor) -> torch.Tensor:
    return values_P2[:, 0] - values_P2[:, 1]


def _smoothed(margins_P: torch.Tensor, share: float) -> torch.Tensor:
    return -(1 - share) * F.logsigmoid(margins_P) - share * F.logsigmoid(-margins_P)
