"""The reference of the mixtures of experts: a few steps of plain transformers, torch and peft on one process, by rows, in fp64.

Nothing of the toolkit is imported here. Experts are computed by the model's own loop, not by grouped products; those with an
adapter with weights that peft has added A·B to.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file

from tests.support.plain_pytorch import Row

NUM_STEPS, LR, BETA1, BETA2, EPS, WEIGHT_DECAY = 3, 1e-2, 0.8, 0.9, 1e-3, 0.1
"""The large eps lets the size of a gradient count, to which Adam is blind without it."""
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
ADAPTER_RANK = 3
"""Ranks share its rows unevenly."""


@dataclass
class Expected:
    losses: list[float] = field(default_factory=list)
    """Without the auxiliary one."""
    auxiliary_losses: list[float] = field(default_factory=list)
    """Times the coefficient; empty if there is none."""
    busiest_shares: list[float] = field(default_factory=list)
    """Shares of the tokens that the busiest expert gets, of any layer."""
    gradients: dict = field(default_factory=dict)
    """Of the first step, numpy, by the names of what trains."""
    files: dict[str, dict] = field(default_factory=dict)
    """What `save_pretrained` writes after the last step, numpy, by the place in a run's folder."""


def load_plain(folder: Path, dtype: torch.dtype = torch.float64):
    """The model of `folder`, with experts in the model's own loop."""
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **how).eval()


def start_adapter(folder: Path, has_experts: bool, to: Path) -> None:
    """Save an adapter with random values on the attention of a model, or on that and the experts, as peft does."""
    torch.manual_seed(0)
    model = load_plain(folder, torch.float32)
    linear = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    targets = sorted({name.rpartition(".")[2] for name in linear if ".self_attn." in name})
    experts = EXPERTS if has_experts else None
    adapted = get_peft_model(model, LoraConfig(r=ADAPTER_RANK, lora_alpha=6, target_modules=targets, target_parameters=experts))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = 0.1 * torch.randn(parameter.shape)
    adapted.save_pretrained(to)


def train_plain(folder: Path, rows: list[Row], frozen: str, auxiliary: str, adapter: Path | None) -> Expected:
    """Train the model of `folder`; each step takes all rows, and the learning rate falls linearly to 0.

    Args:
        frozen: a regular expression of the names of what does not train; empty: nothing.
        auxiliary: `off`, or what has a load-balancing loss: each `document`, or all rows together (`global`).
        adapter: a folder with one, which is all that trains; None: the model.
    """
    model = load_plain(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    adapted = None if adapter is None else PeftModel.from_pretrained(model, adapter, is_trainable=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and not (frozen and re.fullmatch(frozen, name)))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    kept = [name for name in trained if "norm" in name or "bias" in name]
    groups = [
        {
            "params": [p for name, p in trained.items() if (name in kept) is is_kept],
            "weight_decay": 0.0 if is_kept else WEIGHT_DECAY,
        }
        for is_kept in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(BETA1, BETA2), eps=EPS)
    num_labels = sum(len(_encode(tokenizer, row)[1]) for row in rows)
    expected = Expected()
    for step in range(NUM_STEPS):
        loss = auxiliary_loss = 0.0
        with torch.no_grad():
            loads_L = _loads([_forward(model, tokenizer, row)[1] for row in rows])
        num_tokens = len(loads_L[0])
        for row in rows:
            loss_sum, routes = _forward(model, tokenizer, row)
            row_loss = loss_sum / num_labels
            of_routers = _balance_sum(model, routes, loads_L if auxiliary == "global" else _loads([routes])) / num_tokens
            (row_loss + (0 if auxiliary == "off" else of_routers)).backward()
            loss, auxiliary_loss = loss + row_loss.item(), auxiliary_loss + of_routers.item()
        expected.losses.append(loss)
        if auxiliary != "off":
            expected.auxiliary_losses.append(auxiliary_loss)
            expected.busiest_shares.append(max(sent_TE.mean(0).max().item() for sent_TE in loads_L))
        expected.gradients = expected.gradients or {name: p.grad.numpy().copy() for name, p in trained.items()}
        for group in optimizer.param_groups:
            group["lr"] = LR * (NUM_STEPS - step) / NUM_STEPS
        optimizer.step()
        optimizer.zero_grad()
    if adapted is None or adapter is None:
        expected.files["export/model"] = load_saved(model, folder)
    else:
        expected.files["export/adapter_model"] = load_saved(adapted, adapter)
        expected.files["merged/model"] = load_saved(adapted.merge_and_unload(), adapter / "merged")
    return expected


Routes = list[tuple[torch.Tensor, torch.Tensor]]
"""By layer: a router's logits, and the experts that it sends each token to."""


def _encode(tokenizer, row: Row) -> tuple[list[int], list[int]]:
    """Tokens of the prompt, and those that are learned: the completion's and the end token."""
    prompt, whole = (tokenizer(text, add_special_tokens=False).input_ids for text in (row["prompt"], "".join(row.values())))
    return prompt, [*whole[len(prompt) :], tokenizer.eos_token_id]


def _forward(model, tokenizer, row: Row) -> tuple[torch.Tensor, Routes]:
    """-log p of each label, added up, and what the routers did with all tokens."""
    prompt, labels = _encode(tokenizer, row)
    with _watched(model) as routes:
        logits_TV = model(input_ids=torch.tensor([[*prompt, *labels]])).logits[0, len(prompt) - 1 : -1]
    return F.cross_entropy(logits_TV, torch.tensor(labels), reduction="sum"), routes


@contextlib.contextmanager
def _watched(model) -> Iterator[Routes]:
    routes: Routes = []
    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    hooks = [router.register_forward_hook(lambda _, args, output: routes.append((output[0], output[2]))) for router in routers]
    yield routes
    for hook in hooks:
        hook.remove()


def _loads(of_rows: list[Routes]) -> list[torch.Tensor]:
    """By layer, for each token of these rows and each expert: 1 if it is sent there, else 0."""
    return [
        torch.cat([F.one_hot(experts, logits.shape[1]).sum(1) for logits, experts in of_layer]).double()
        for of_layer in zip(*of_rows, strict=True)
    ]


def _balance_sum(model, routes: Routes, loads_L: list[torch.Tensor]) -> torch.Tensor:
    """The load-balancing loss of a row times its tokens, for loads of its group; a mean of the layers, times the coefficient."""
    losses = []
    for (logits_TE, _), sent_TE in zip(routes, loads_L, strict=True):
        if model.config.model_type == "deepseek_v3":
            affinity_TE = torch.sigmoid(logits_TE)
            probability_E = (affinity_TE / affinity_TE.sum(1, keepdim=True)).mean(0)
        else:
            probability_E = torch.softmax(logits_TE, dim=1).mean(0)
        losses.append(logits_TE.shape[1] * torch.dot(sent_TE.mean(0), probability_E.double()) * len(logits_TE))
    return torch.stack(losses).mean() * model.config.router_aux_loss_coef


def load_saved(model, folder: Path) -> dict:
    model.save_pretrained(folder / "trained")
    (file,) = (folder / "trained").glob("*.safetensors")
    return load_file(file)
