"""Weights of the shapes that optimizers treat differently, and gradients that are the same on any number of ranks."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

SHAPES = [(7, 1024), (2, 2048), (65, 96), (33, 320), (5,), (3, 4), (4, 16, 64), (9, 1), (300, 256), (2, 36, 64)]
"""Of few and uneven rows, in 8 bits by blocks of 256 or 64 or not at all, a vector, and two of three dimensions: the last are
experts, fewer than ranks."""
NUM_EXPERTS = 2


class WeightsOf(nn.Module):
    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        for place, shape in enumerate(shapes):
            self.register_parameter(f"weight_{place}", nn.Parameter(torch.randn(shape, generator=random)))


def give_gradients(model: nn.Module, step: int) -> None:
    """Give each weight the gradient of this step, of another size for each, or this rank's shard of it."""
    random = torch.Generator().manual_seed(1000 + step)
    for place, parameter in enumerate(model.parameters()):
        gradient = torch.randn(parameter.shape, generator=random) * 10.0 ** (place - 6)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = gradient
