"""Tensors on disk: what was saved comes back, and nothing in the files runs. Which host copies of a checkpoint are pinned,
where torch thinks that it has a GPU, and that later ones only copy."""

import contextlib
import pickle
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import ANY, MagicMock, Mock, call, patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _state_dict_stager
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor

from toolkit.checkpoint.dcp import load_tensors, save_tensors, stored_names
from toolkit.checkpoint.save import HostCopier


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"model.weight": torch.randn(5, 3), "optimizer.step": torch.tensor(7.0), "model.half": torch.randn(4).bfloat16()}


@pytest.fixture
def saved(tmp_path) -> Path:
    save_tensors(some_tensors(), tmp_path)
    return tmp_path


def refuse(folder: Path, sentence: str, tensors: dict[str, torch.Tensor] | None = None) -> None:
    """The tensors of `some_tensors`, or others, cannot be loaded."""
    with pytest.raises(ValueError, match=sentence):
        load_tensors(tensors or some_tensors(), folder, "it cannot be loaded")


def test_what_was_saved_comes_back_and_what_is_not_there_is_named(tmp_path):
    tensors = some_tensors()
    names = save_tensors(tensors, tmp_path)
    assert sorted(names) == sorted(path.name for path in tmp_path.iterdir())
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load_tensors(loaded, tmp_path, "it cannot be loaded")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    converted = {"model.half": torch.zeros(4)}
    load_tensors(converted, tmp_path, "it cannot be loaded")
    assert torch.equal(converted["model.half"], tensors["model.half"].float())
    of_integers = {"model.weight": torch.zeros(5, 3, dtype=torch.int64)}
    refuse(tmp_path, "holds model.weight as torch.float32, not torch.int64", of_integers)
    refuse(tmp_path, "Missing key in checkpoint state_dict: model.other", {"model.other": torch.zeros(1)})
    sizes = r"saved torch.Size\(\[5, 3\]\) and current: torch.Size\(\[3, 5\]\) for model.weight"
    refuse(tmp_path, f"Size mismatch between {sizes}", {"model.weight": torch.zeros(3, 5)})
    (tmp_path / "__0_0.distcp").unlink()
    refuse(tmp_path, r"^it cannot be loaded: \[Errno 2\] No such file or directory: '.*/__0_0.distcp'$")


def test_staged_tensors_are_written_without_the_gpu(tmp_path, monkeypatch):
    """DCP's overlapping loader would wait for the GPU's stream, in which training has queued its steps."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    loader = Mock(side_effect=AssertionError("the overlapping loader"))
    monkeypatch.setattr("torch.distributed.checkpoint.filesystem._OverlappingCpuLoader", loader)
    assert save_tensors(some_tensors(), tmp_path)


def test_a_rank_without_a_part_of_fsdp1s_tensor_leaves_gpu_0_alone(tmp_path, monkeypatch):
    """A LoRA matrix of one row on two ranks. Its `device` is GPU 0, and fails here: the thread would take a
    stream there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    written_with: list[int] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dcp, "save", lambda *_, storage_writer, **__: written_with.append(storage_writer.per_thread_copy_ahead))
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        group = dist.group.WORLD
        device = torch.device("cpu")
        here, elsewhere = (_create_chunk_sharded_tensor(torch.ones(n, 3), 1, 2, 2, group, device) for n in (2, 1))
        assert len(here.local_shards()) == 1 and not elsewhere.local_shards()
        save_tensors({**some_tensors(), "model.lora": elsewhere, "model.more": here}, tmp_path)
    finally:
        dist.destroy_process_group()
    assert written_with == [0]


def test_paths_of_python_3_13_are_read(saved):
    """3.13 pickles a path under the name of a module that other versions lack."""
    ours = pickle.dumps(pickle.loads((saved / ".metadata").read_bytes()), protocol=2)
    theirs = re.sub(rb"cpathlib(\._local)?\nPosixPath\n", b"cpathlib._local\nPosixPath\n", ours)
    assert b"pathlib._local" in theirs
    (saved / ".metadata").write_bytes(theirs)
    assert stored_names(saved) == set(some_tensors())


PLACE = MetadataIndex("model.weight", [0, 0])
ELSEWHERE = ("../elsewhere.distcp", "/tmp/__0_0.distcp", "..", "a/__0_0.distcp", ".metadata")
CHANGES = [
    *(
        (
            lambda m, name=name: setattr(m.storage_data[PLACE], "relative_path", name),
            f"it names {name}, which is no shard of the checkpoint",
        )
        for name in ELSEWHERE
    ),
    (lambda m: m.state_dict_metadata["model.weight"].chunks.clear(), "does not say where all of model.weight is"),
    (
        lambda m: setattr(m.state_dict_metadata["model.weight"].chunks[0], "offsets", torch.Size([1, 0])),
        "a part of model.weight lies outside it, or in no file",
    ),
    (lambda m: m.storage_data.pop(PLACE), "a part of model.weight lies outside it, or in no file"),
    (lambda m: setattr(m.storage_data[PLACE], "transform_descriptors", ["stream.zstd/1"]), "as transformed"),
    (lambda m: delattr(m, "state_dict_metadata"), "no attribute 'state_dict_metadata'"),
]


@pytest.mark.parametrize(("change", "reason"), CHANGES)
def test_metadata_that_does_not_hang_together_is_refused(saved, change, reason):
    with edited_metadata(saved) as metadata:
        change(metadata)
    refuse(saved, f"is not a checkpoint metadata: .*{re.escape(reason)}")


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"ctorch\ndevice\n(S'nowhere'\ntR.", b"I1\n."])
def test_bytes_that_are_no_metadata_are_refused(saved, content):
    (saved / ".metadata").write_bytes(content)
    refuse(saved, "is not a checkpoint metadata: ")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.zeros(2, 3), r"with shape \(2, 3\) as torch.float32, not \(5, 3\) as torch.float32"),
        (torch.zeros(5, 3, dtype=torch.int64), r"with shape \(5, 3\) as torch.int64, not \(5, 3\) as torch.float32"),
        (torch.zeros(5, 3, device="meta"), "no plain tensor for model.weight"),
        (torch.zeros(5, 3).to_sparse(), "no plain tensor for model.weight"),
        (torch.nn.Parameter(torch.zeros(5, 3)), "no plain tensor for model.weight"),
        ({"weight": 1}, "no plain tensor for model.weight"),
        (slice(1), r"no tensor for model.weight \(UnpicklingError\)"),
    ],
)
def test_a_shard_that_holds_something_else_is_refused(saved, value, reason):
    with edited_metadata(saved) as metadata:
        info = metadata.storage_data[PLACE]
        with (saved / info.relative_path).open("ab") as file:
            info.offset = file.tell()
            torch.save(value, file)
            info.length = file.tell() - info.offset
    refuse(saved, f"__0_0.distcp holds (model.weight )?{reason}$")


def test_entries_that_are_no_tensors_are_refused(tmp_path):
    """DCP would read them with torch.load(weights_only=False)."""
    dcp.save({"model.weight": torch.zeros(1), "note": "text"}, storage_writer=dcp.FileSystemWriter(tmp_path))
    refuse(tmp_path, r"is not a tensor|is not allowed", {"model.weight": torch.zeros(1)})


@contextlib.contextmanager
def edited_metadata(folder: Path) -> Iterator[Metadata]:
    """The metadata, written back at the end."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    yield metadata
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_disk_that_is_full_anywhere_in_a_shard_is_what_is_raised(tmp_path):
    """torch's zip writer raises a RuntimeError about positions in the file, except at a few of its own writes."""
    tensors = {f"model.{number}": torch.randn(5_000) for number in range(3)}
    [name, _] = save_tensors(tensors, tmp_path / "whole")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for num_bytes in range(0, (tmp_path / "whole" / name).stat().st_size, 997):
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                save_tensors(tensors, tmp_path / str(num_bytes))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


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
    assert [name for name, tensor in copied.items() if tensor.data_ptr() in pinned] == ["weight", "two steps"]
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
