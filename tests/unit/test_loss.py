"""The loss is a sum. That it is divided by the global count: tests/distributed/test_absolute.py."""

import pytest
import torch
import torch.nn.functional as F

from toolkit.loss import IGNORED_LABEL, chunked_cross_entropy, summed_cross_entropy


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_sum_over_label_tokens_in_fp32_and_zero_without_any(smoothing):
    torch.manual_seed(0)
    logits_BTV = torch.randn(3, 4, 11, dtype=torch.bfloat16)
    labels_BT = torch.randint(0, 11, (3, 4))
    labels_BT[1, 2:] = IGNORED_LABEL
    # The cross-entropy with probabilities: the label's, and an equal share of each token.
    is_label_BT = labels_BT != IGNORED_LABEL
    wanted_NV = F.one_hot(labels_BT[is_label_BT], 11) * (1 - smoothing) + smoothing / 11
    expected = -(wanted_NV * logits_BTV[is_label_BT].float().log_softmax(-1)).sum()
    actual = summed_cross_entropy(logits_BTV, labels_BT, smoothing)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
    logits_BTV.requires_grad_()
    loss = summed_cross_entropy(logits_BTV, torch.full((3, 4), IGNORED_LABEL), smoothing)
    loss.backward()
    assert loss.item() == 0
    assert (logits_BTV.grad == 0).all()


@pytest.mark.parametrize("max_logits", [1, 4 * 11, 10**6])
@pytest.mark.parametrize(("cap", "smoothing"), [(None, 0.0), (2.0, 0.0), (2.0, 0.1)])
def test_chunks_give_the_loss_and_the_gradients_of_whole_logits(max_logits, cap, smoothing):
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 11, dtype=torch.float64)
    hidden_ND = torch.randn(13, 8, dtype=torch.float64, requires_grad=True)
    labels_N = torch.randint(0, 11, (13,))
    labels_N[3] = IGNORED_LABEL
    most_logits = 0

    def logits_of(hidden_nD: torch.Tensor) -> torch.Tensor:
        nonlocal most_logits
        logits_nV = head(hidden_nD)
        most_logits = max(most_logits, logits_nV.numel())
        return logits_nV if cap is None else cap * torch.tanh(logits_nV / cap)

    parameters = [hidden_ND, *head.parameters()]
    how = {"ignore_index": IGNORED_LABEL, "reduction": "sum", "label_smoothing": smoothing}
    expected = F.cross_entropy(logits_of(hidden_ND), labels_N, **how)
    expected_gradients = torch.autograd.grad(expected, parameters)
    most_logits = 0
    actual, _ = chunked_cross_entropy(hidden_ND, labels_N, logits_of, 11, max_logits, smoothing)
    gradients = torch.autograd.grad(actual, parameters)
    assert most_logits <= max(max_logits, 11)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=0)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-7)


def test_correct_tokens_are_counted_without_gradients_only():
    hidden_ND, labels_N = torch.eye(4), torch.tensor([0, 1, 3, IGNORED_LABEL])
    assert chunked_cross_entropy(hidden_ND, labels_N, lambda hidden: hidden, 4, max_logits=8)[1] == 0
    with torch.no_grad():
        assert chunked_cross_entropy(hidden_ND, labels_N, lambda hidden: hidden, 4, max_logits=8)[1] == 2
