"""Which host copies of a checkpoint are pinned, where torch thinks that it has a GPU, and that later ones only copy."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint import _state_dict_stager

from toolkit.checkpoint.save import HostCopier


def test_all_copies_are_pinned_but_those_of_less_than_5_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: dict[int, int] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(_state_dict_stager.pin_memory_utils, "pin_memory", lambda address, size: pinned.update({address: size}))
    monkeypatch.setattr(_state_dict_stager.pin_memory_utils, "unpin_memory", lambda address: None)
    monkeypatch.setattr(torch, "Stream", lambda device: None)
    copier = HostCopier(torch.device("cuda"))
    copied = copier.copy({"weight": torch.ones(1000), "two steps": torch.ones(2), "step": torch.ones(())})
    assert {name: tensor.data_ptr() in pinned for name, tensor in copied.items()} == {
        "weight": True,
        "two steps": True,
        "step": False,
    }
    assert sorted(pinned.values()) == [8, 4000]
    copier.close()


def test_later_copies_build_no_tensors_again() -> None:
    copier, whole = HostCopier(torch.device("cpu")), torch.arange(8.0)
    tensors = {"whole": whole, "a part": whole[2:6:2], "step": torch.ones(())}
    first = copier.copy(tensors)
    places = {name: tensor.data_ptr() for name, tensor in first.items()}
    for tensor in (whole, tensors["step"]):
        tensor += 1
    with patch.object(copier.stager, "stage") as build:
        later = copier.copy(tensors)
        build.assert_not_called()
    assert all(torch.equal(later[name], tensor) and later[name].data_ptr() == places[name] for name, tensor in tensors.items())
    whole += 1
    assert not torch.equal(later["whole"], whole)
    assert copier.copy({"step": tensors["step"]}).keys() == {"step"}
    copier.close()


def test_later_copies_run_beside_training_and_the_next_update_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Event:
        def synchronize(self) -> None:
            calls.append("the host waits for the copy")

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            calls.append("copies begin")

        def __exit__(self, *_: object) -> None:
            calls.append("copies end")

        def wait_stream(self, other: Stream) -> None:
            calls.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event: Event) -> None:
            calls.append(f"{self.name} waits for the copy")

        def record_event(self) -> Event:
            return Event()

    training: Any = Stream("training")
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: training)
    copier, tensors = HostCopier(torch.device("cpu")), {"weight": torch.arange(8.0)}
    copier.stream = Stream("the copier")  # type: ignore[assignment]
    copier.copy(tensors)
    copier.make_device_wait()
    assert calls == [], "the first copy is complete"
    tensors["weight"] += 1
    later = copier.copy(tensors)
    assert torch.equal(later["weight"], tensors["weight"])
    assert calls == ["the copier waits for training", "copies begin", "copies end"], "the host waits for nothing"
    copier.make_device_wait()
    copier.wait()
    assert calls[3:] == ["training waits for the copy", "the host waits for the copy"]
    copier.close()
