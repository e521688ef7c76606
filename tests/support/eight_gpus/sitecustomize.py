"""Put on PYTHONPATH: torch sees 8 GPUs that answer what they are, and the first call that would use one ends the process.

That call is a line of the file `$REACHED`, and each question before it one of `$ASKED`: process, CUDA_VISIBLE_DEVICES, call.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from typing import Any

NAME, BYTES, CAPABILITY = "NVIDIA H100 80GB HBM3", 85_017_493_504, (9, 0)


def note(file: str, call: str) -> None:
    with open(os.environ[file], "a", encoding="utf-8") as log:
        log.write(f"{os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES', 'all')} {call}\n")


def install(torch: Any) -> None:
    """Replace what of torch asks for a GPU or uses one."""
    properties = types.SimpleNamespace(name=NAME, total_memory=BYTES, major=9, minor=0, multi_processor_count=132, uuid="0")

    def seen() -> int:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return 8 if visible is None else len([number for number in visible.split(",") if number])

    def asks(call: str, answer: Any) -> Any:
        """A question that starts CUDA: from then on CUDA_VISIBLE_DEVICES is no longer read."""

        def ask(*_: Any, **__: Any) -> Any:
            note("ASKED", call)
            return answer

        return ask

    def uses(call: str) -> Any:
        def use(*_: Any, **__: Any) -> Any:
            note("REACHED", call)
            raise RuntimeError(f"the rehearsal ends at the first CUDA call: {call}")

        return use

    torch.cuda.is_available, torch.cuda.device_count = (lambda: seen() > 0), seen
    torch.cuda.get_device_capability = asks("get_device_capability", CAPABILITY)
    torch.cuda.get_device_name = asks("get_device_name", NAME)
    torch.cuda.get_device_properties = asks("get_device_properties", properties)
    torch.cuda.current_device = asks("current_device", 0)
    torch.cuda.is_bf16_supported = asks("is_bf16_supported", True)
    torch.accelerator.is_available = lambda: seen() > 0
    for call in ("_lazy_init", "set_device", "mem_get_info", "synchronize"):
        setattr(torch.cuda, call, uses(call))
    torch.Stream = type("Stream", (torch.Stream,), {"__new__": uses("Stream")})  # stays a class: annotations name it
    start = torch.distributed.distributed_c10d.init_process_group

    def init_process_group(backend: str | None = None, **options: Any) -> None:
        if "nccl" in (backend or ""):
            uses("init_process_group")()
        start(backend, **options)

    torch.distributed.init_process_group = torch.distributed.distributed_c10d.init_process_group = init_process_group


class Finder:
    """Finds torch as Python does, and changes it once it is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                run(module)
                install(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "REACHED" in os.environ:
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
