"""Faults of loading, sharding, saving and resuming, of evaluation and of adapters; as in `update_faults.py`."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytest import MonkeyPatch

from tests.planting.plant import after_sharding


def untied_weight(patch: MonkeyPatch) -> None:
    """The output head has a weight of its own."""
    import torch

    from toolkit.training import model as setup

    load_model = setup.load_model

    def untying(*args: Any) -> Any:
        model, readers = load_model(*args)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        readers["lm_head.weight"] = readers["shared.weight"]
        return model, readers

    patch.setattr(setup, "load_model", untying)


def dropped_slice(patch: MonkeyPatch) -> None:
    """Rank 1 leaves its part of one tensor out of every checkpoint."""
    _change_a_moment(patch, lambda tensors, lost: {name: tensor for name, tensor in tensors.items() if name != lost})


def lost_slice(patch: MonkeyPatch) -> None:
    """Rank 1 writes zeros for its part of one tensor."""
    _change_a_moment(patch, lambda tensors, lost: tensors | {lost: tensors[lost] * 0})


def _change_a_moment(patch: MonkeyPatch, change: Callable[[dict[str, Any], str], dict[str, Any]]) -> None:
    from toolkit.checkpoint import save as checkpoint_writer
    from toolkit.distributed.comm import rank

    save_tensors = checkpoint_writer.save_tensors

    def saving(tensors: dict[str, Any], folder: Path, group: Any) -> list[str]:
        lost = next(name for name in tensors if name.endswith(".exp_avg"))
        return save_tensors(change(tensors, lost) if rank() == 1 else tensors, folder, group)

    patch.setattr(checkpoint_writer, "save_tensors", saving)


def moments_requantized(patch: MonkeyPatch) -> None:
    """Moments in 8 bits are quantized again as a checkpoint is loaded, as where blocks follow from the number of ranks."""
    from toolkit.checkpoint import load
    from toolkit.optimizers import adamw_8bit
    from toolkit.optimizers.adamw_8bit import _decode, _encode
    from toolkit.parallel.units import local_tensor

    load_tensors = load.load_tensors

    def requantizing(tensors: dict[str, Any], *rest: Any) -> None:
        load_tensors(tensors, *rest)
        for name in [name.removesuffix("_scale") for name in tensors if name.endswith(".exp_avg_scale")]:
            state = {"exp_avg": local_tensor(tensors[name]), "exp_avg_scale": local_tensor(tensors[f"{name}_scale"])}
            flat = {key: tensor.view(-1) for key, tensor in state.items()}
            for key, new in _encode(flat, "exp_avg", _decode(flat, "exp_avg")).items():
                flat[key].copy_(new)

    patch.setattr(load, "load_tensors", requantizing)
    patch.setattr(adamw_8bit, "FEWEST_ELEMENTS", 1024)  # the tests' models have no larger weights
    patch.setattr(adamw_8bit, "FEWEST_BLOCK_ELEMENTS", 32)


def random_state_not_restored(patch: MonkeyPatch) -> None:
    """Dropout is drawn from the random state as it stands, as in most loops, and a resume does not restore it."""
    from toolkit.checkpoint import load as checkpoint
    from toolkit.training import loop

    patch.setattr(loop, "seed_all", lambda *parts: None)
    patch.setattr(checkpoint, "load_random_state", lambda folder, saved_world_size: None)


def wrong_start(patch: MonkeyPatch) -> None:
    """FSDP2 starts with one weight that is not the model's."""
    from torch.distributed.fsdp import FSDPModule

    def change(sharded: Any) -> None:
        if isinstance(sharded.model, FSDPModule):
            next(p for p in sharded.model.parameters() if p.requires_grad).data.mul_(1 + 2**-20)

    after_sharding(patch, change)


def silent_ddp(patch: MonkeyPatch) -> None:
    """accelerate takes DDP where the YAML says FSDP, as it does on a CPU."""
    from toolkit.launch import accelerator

    patch.setattr(accelerator, "_put_cpu_in_an_accelerators_place", lambda: None)


def last_evaluation_batch_lost(patch: MonkeyPatch) -> None:
    """The loss leaves out a batch that is not full, as a loader does that drops the last one."""
    from toolkit.evaluation import loop as evaluation

    add, sizes = evaluation._LossSums.add, []

    def add_full(self: Any, model: Any, indices: list[int]) -> None:
        before = copy.deepcopy({name: value for name, value in vars(self).items() if name != "data"})
        add(self, model, indices)
        sizes.append(len(indices))
        if len(indices) != sizes[0]:
            vars(self).update(before)

    patch.setattr(evaluation._LossSums, "add", add_full)


def one_beam(patch: MonkeyPatch) -> None:
    """`generate` is greedy, whatever it is given."""
    _replace_setting_of_generate(patch, "num_beams", 1)


def repeated_ngrams(patch: MonkeyPatch) -> None:
    """`generate` repeats n-grams, whatever it is given."""
    _replace_setting_of_generate(patch, "no_repeat_ngram_size", 0)


def _replace_setting_of_generate(patch: MonkeyPatch, name: str, value: int) -> None:
    from transformers import GenerationMixin

    generate = GenerationMixin.generate
    patch.setattr(GenerationMixin, "generate", lambda self, *args, **settings: generate(self, *args, **settings | {name: value}))


def doubled_alpha(patch: MonkeyPatch) -> None:
    """peft scales an adapter by twice its alpha."""
    from peft.tuners.lora.layer import LoraLayer

    update_layer = LoraLayer.update_layer

    def doubling(self: Any, adapter_name: str, *args: Any, **settings: Any) -> None:
        update_layer(self, adapter_name, *args, **settings)
        self.scaling[adapter_name] *= 2

    patch.setattr(LoraLayer, "update_layer", doubling)


def scales_shifted_by_a_block(patch: MonkeyPatch) -> None:
    """The last rank's shard of one layer's scales begins with the last one's scale."""
    from toolkit.distributed.comm import rank, world_size
    from toolkit.parallel import wrap
    from toolkit.parallel.units import local_tensor

    fill_parameters = wrap.fill_parameters

    def shifting(model: Any, readers: Any) -> None:
        fill_parameters(model, readers)
        if rank() == world_size() - 1 > 0:
            scales = local_tensor(next(p for name, p in model.named_parameters() if name.endswith(".scales")).data)
            scales.copy_(scales.flatten().roll(4).view_as(scales))

    patch.setattr(wrap, "fill_parameters", shifting)


def codes_cast(patch: MonkeyPatch) -> None:
    """What stores frozen parameters in one dtype casts codes too: fp32 holds them exactly, in many times the bytes."""
    from toolkit.training import model as setup

    cast_frozen = setup.cast_frozen

    def casting(model: Any, dtype: Any) -> None:
        cast_frozen(model, dtype)
        for name, parameter in model.named_parameters():
            if name.endswith(".codes"):
                parameter.data = parameter.data.to(dtype)

    patch.setattr(setup, "cast_frozen", casting)
