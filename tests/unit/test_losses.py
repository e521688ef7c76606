"""The loss is a sum; dividing it by the global count makes it exact."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from toolkit.losses import IGNORED_LABEL, share_of_global_mean, summed_cross_entropy


def test_sum_over_label_tokens_in_fp32() -> None:
    torch.manual_seed(0)
    logits_BTV = torch.randn(3, 4, 11, dtype=torch.bfloat16)
    labels_BT = torch.randint(0, 11, (3, 4))
    labels_BT[1, 2:] = IGNORED_LABEL
    expected = F.cross_entropy(logits_BTV.float().view(-1, 11), labels_BT.view(-1)) * (labels_BT != IGNORED_LABEL).sum()
    actual = summed_cross_entropy(logits_BTV, labels_BT)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected)


def test_a_batch_without_labels_gives_zero_loss_and_zero_gradient() -> None:
    logits_BTV = torch.randn(2, 3, 5, requires_grad=True)
    loss = summed_cross_entropy(logits_BTV, torch.full((2, 3), IGNORED_LABEL))
    loss.backward()
    assert loss.item() == 0
    assert (logits_BTV.grad == 0).all()


def test_shares_average_to_the_global_mean() -> None:
    sums, num_label_tokens = [torch.tensor(6.0), torch.tensor(1.0)], 14
    averaged = sum(share_of_global_mean(s, num_label_tokens, world_size=2) for s in sums) / 2
    torch.testing.assert_close(averaged, torch.tensor(0.5))
