"""RMS norms and tanh GELU by one kernel of torch each, on a GPU.

Replaces: the forward of modules with the very code of T5's or Llama's norm, or of `gelu_new`.
Why: transformers writes them as eight elementwise operations, and autograd as many again or more: half the launches of a step of
T5-base. On a CPU torch has no such kernel for norms, and results would differ in last bits for nothing.
Until: transformers calls torch's functions (5.24 does not).
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def install(model: nn.Module) -> None:
    """Let the model's norms and activations compute by torch's kernels, in place: the same formulas, rounded once to bf16."""
    from transformers.activations import NewGELUActivation
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    by_code: dict[str, Callable[..., torch.Tensor]] = {_code(kind): _rms_norm for kind in (LlamaRMSNorm, T5LayerNorm)}
    by_code[_code(NewGELUActivation)] = _tanh_gelu
    by_code.pop("", None)  # transformers without its source: no code is known
    for module in model.modules():
        kind: Any = type(module)
        if (twin := by_code.get(_code(kind))) is not None:
            module.forward = functools.partial(twin, module)


@functools.cache
def _code(kind: Any) -> str:
    """The body of a class's forward, without comments; empty if there is no source."""
    try:
        tree: Any = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward))))
    except (OSError, TypeError, SyntaxError):
        return ""
    return "\n".join(map(ast.dump, tree.body[0].body))


def _rms_norm(norm: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(hidden_states, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _tanh_gelu(_: nn.Module, input: torch.Tensor) -> torch.Tensor:
    return F.gelu(input, approximate="tanh")
