"""Norms and activations by torch's kernels: the same formulas as transformers', and only where the code is the same."""

import pytest
import torch
from transformers.activations import NewGELUActivation
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.models.umt5.modeling_umt5 import UMT5LayerNorm

from toolkit.models.patches import fused
from toolkit.tools.plan.kernels import kernels_of_cuda


@pytest.mark.parametrize("kind", [T5LayerNorm, UMT5LayerNorm, LlamaRMSNorm, Qwen3RMSNorm, NewGELUActivation])
def test_the_kernel_has_the_values_and_gradients_of_transformers(kind):
    module = kind() if kind is NewGELUActivation else kind(24, eps=1e-5)
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    hidden = torch.randn(3, 5, 24, dtype=torch.float64)
    module.double()

    def compute() -> list[torch.Tensor]:
        module.zero_grad()
        inputs = hidden.clone().requires_grad_()
        (output := module(inputs)).square().sum().backward()
        return [output.detach(), *(each.grad.clone() for each in (inputs, *module.parameters()) if each.grad is not None)]

    theirs = compute()
    fused.install(module)
    ours = compute()
    assert "forward" in vars(module) and len(ours) == len(theirs) == 2 + len(list(module.parameters()))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


def test_other_code_stays_and_the_planner_keeps_what_the_kernel_keeps():
    other = Gemma2RMSNorm(8)  # multiplies by 1 + weight
    fused.install(other)
    assert "forward" not in vars(other)
    fused.install(norm := LlamaRMSNorm(8).bfloat16())
    kept: list[torch.Tensor] = []
    hidden = torch.randn(2, 3, 8, dtype=torch.bfloat16, requires_grad=True)
    with kernels_of_cuda(), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        norm(hidden).sum().backward()
    assert [(t.dtype, tuple(t.shape)) for t in kept] == [
        (torch.bfloat16, (2, 3, 8)), (torch.bfloat16, (8,)), (torch.float32, (2, 3, 1))
    ]  # fmt: skip
    assert hidden.grad is not None and norm.weight.grad is not None


def test_without_the_source_of_transformers_every_module_stays(monkeypatch):
    monkeypatch.setattr(fused, "_code", lambda kind: "")
    fused.install(model := torch.nn.Sequential(LlamaRMSNorm(8), torch.nn.Linear(8, 8)))
    assert not any("forward" in vars(module) for module in model.modules())
