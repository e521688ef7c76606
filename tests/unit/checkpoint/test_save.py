"""Which host copies of a checkpoint are pinned, where torch thinks that it has a GPU, and that later ones only copy."""

from unittest.mock import ANY, MagicMock, call, patch

import torch
from torch.distributed.checkpoint import _state_dict_stager

from toolkit.checkpoint.save import HostCopier


def test_all_copies_are_pinned_but_those_of_less_than_5_bytes(monkeypatch):
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


def test_later_copies_build_no_tensors_again():
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


def test_later_copies_run_beside_training_and_the_next_update_waits_for_them(monkeypatch):
    streams = MagicMock()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: streams.training)
    copier, tensors = HostCopier(torch.device("cpu")), {"weight": torch.arange(8.0)}
    copier.stream = streams.copier
    copier.copy(tensors)
    copier.make_device_wait()
    assert streams.mock_calls == [], "the first copy is complete"
    tensors["weight"] += 1
    later = copier.copy(tensors)
    assert torch.equal(later["weight"], tensors["weight"])
    begins = [call.copier.wait_stream(streams.training), ANY, call.copier.__enter__()]  # ANY: whether it is there
    assert streams.mock_calls == [*begins, ANY, call.copier.record_event()], "the host waits for nothing"
    copier.make_device_wait()
    copier.wait()
    copied = streams.copier.record_event()
    assert streams.mock_calls[5:7] == [call.training.wait_event(copied), call.copier.record_event().synchronize()]
    copier.close()
