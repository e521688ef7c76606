"""A clock for the parts of a training step, which sees where forward, loss, backward, FSDP and clipping begin and end."""

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from benchmarks.measuring import Figures

REST = "the rest of ours"
NO_LAUNCH = ("empty", "new_empty", "_unsafe_view", "resize", "set_", "_record_function")


class Clock:
    """Processor time and launches by part: each part without those inside it."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.restart()

    def restart(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.since = time.thread_time()

    def read(self) -> Figures:
        self._book()
        return {"ms": sum(self.seconds.values()) * 1e3, **{part: spent * 1e3 for part, spent in self.seconds.items()}}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._book()
        self.open.append(name)
        try:
            yield
        finally:
            self._book()
            self.open.pop()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def in_part(*args: Any, **more: Any) -> Any:
            with self.part(name):
                return function(*args, **more)

        return in_part

    def launch(self) -> None:
        self.launches[self.open[-1] if self.open else REST] += 1

    def counting(self) -> Any:
        from torch.distributed.tensor import DTensor
        from torch.utils._python_dispatch import TorchDispatchMode

        clock = self

        class Counting(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if any(issubclass(t, DTensor) for t in types):
                    return NotImplemented  # the call comes again with the local tensors
                if is_launch(func):
                    clock.launch()
                return func(*args, **(kwargs or {}))

        return Counting()

    def _book(self) -> None:
        now = time.thread_time()
        self.seconds[self.open[-1] if self.open else REST] += now - self.since
        self.since = now


def is_launch(func: Any) -> bool:
    """Whether an operation starts a kernel or a collective: it neither returns a view nor only allocates."""
    name = func._schema.name.partition("::")[2]
    is_view = any(returned.alias_info is not None and not returned.alias_info.is_write for returned in func._schema.returns)
    return not is_view and not name.startswith(NO_LAUNCH)


@contextlib.contextmanager
def kernels() -> Iterator[Clock]:
    """Context with CUDA's kernels in place of CPUs', in which a clock sees the parts of a step."""
    import torch
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    from toolkit.models.patches import chunked_loss
    from toolkit.tools.plan import kernels as stand_ins
    from toolkit.tools.plan.kernels import kernels_of_cuda
    from toolkit.training import loop

    clock = Clock()

    def seen(owner: Any, name: str, part: str, *, is_static: bool = False) -> Any:
        function = clock.timed(part, getattr(owner, name))
        return mock.patch.object(owner, name, staticmethod(function) if is_static else function)

    def launching(kernel: Any, name: str) -> Any:
        function = getattr(kernel, name)

        def launched(*args: Any) -> Any:
            clock.launch()
            return function(*args)

        return mock.patch.object(kernel, name, staticmethod(launched))

    with contextlib.ExitStack() as stack:
        for name in ("_pre_forward", "_post_forward", "_pre_backward", "_root_post_backward_final_callback"):
            stack.enter_context(seen(FSDPState, name, "FSDP"))
        stack.enter_context(seen(RegisterPostBackwardFunction, "backward", "FSDP", is_static=True))
        stack.enter_context(seen(torch.Tensor, "backward", "backward"))
        stack.enter_context(seen(chunked_loss, "chunked_cross_entropy", "loss"))
        stack.enter_context(seen(chunked_loss, "_hidden_states", "forward"))
        stack.enter_context(seen(loop, "clip_gradients", "clipping"))
        for kernel in (stand_ins._Attention, stand_ins._Norm):
            stack.enter_context(launching(kernel, "forward"))
            stack.enter_context(launching(kernel, "backward"))
        stack.enter_context(kernels_of_cuda())
        yield clock
