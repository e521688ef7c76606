"""Tiny causal models in this process, rows for them, and an `Accelerator` of one process. Imports torch and transformers."""

from types import SimpleNamespace

import torch
import transformers
from accelerate.utils import DynamoBackend

from tests.families.kinds import tiny_config
from tests.support.model_folders import CAUSAL_FAMILIES, MIXTURES

VOCAB_SIZE = 256
LENGTHS = (5, 9, 14, 3)


def causal_config(family: str, **settings):
    if family not in CAUSAL_FAMILIES | MIXTURES:
        return tiny_config(family, **settings)
    config_class, sizes = (CAUSAL_FAMILIES | MIXTURES)[family]
    return getattr(transformers, config_class)(**{"vocab_size": VOCAB_SIZE, **sizes, **settings})


def build_causal(family: str, dtype: torch.dtype = torch.float32, **settings):
    """The same model each time, in evaluation mode."""
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(causal_config(family, **settings), dtype=dtype).eval()


def causal_skeleton(family: str, **settings):
    """The model on the meta device."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(causal_config(family, **settings))


def build_rows(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[dict[str, list[int]]]:
    """Rows of random tokens, all of which count but the first."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in rows]


def take_gradients(model) -> dict[str, torch.Tensor]:
    """The gradients by the names of their parameters, which have none from then on."""
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return gradients


def one_process():
    """The attributes of an `Accelerator` of one process that `shard_model` and an evaluation read."""
    state = SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=DynamoBackend.NO))
    kind, device = SimpleNamespace(value="NO"), torch.device("cpu")
    return SimpleNamespace(
        distributed_type=kind, mixed_precision="no", device=device, state=state, prepare_model=lambda model: model
    )
