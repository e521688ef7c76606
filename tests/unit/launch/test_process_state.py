"""What a run changes in its process and in libraries is put back at its end, also after an error."""

import datetime
import logging
import os
import sys
import warnings

import datasets
import pytest
import torch
from transformers.utils import logging as of_transformers

from tests.support.process_state import changes_since, state_of_the_process
from toolkit.distributed.comm import limit_groups
from toolkit.distributed.rng import seed_all
from toolkit.launch.accelerator import _disable_tf32, bound_primitive_cache
from toolkit.launch.log import start_logging
from toolkit.launch.process_state import process_state_kept


def change_everything() -> None:
    bound_primitive_cache(10)
    os.environ.pop("PATH")
    start_logging()
    warnings.filterwarnings("ignore", message="of a test")
    datasets.disable_progress_bars()
    of_transformers.disable_progress_bar()
    seed_all("a test")
    torch.set_num_threads(torch.get_num_threads() + 1)
    _disable_tf32()
    limit_groups(datetime.timedelta(seconds=7))
    sys.excepthook = lambda *_: None


def test_a_program_finds_its_process_as_it_was(monkeypatch):
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    with process_state_kept():
        logging.getLogger("toolkit").filters.clear()
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        datasets.enable_progress_bars()
        of_transformers.enable_progress_bar()
        before = state_of_the_process()
        with pytest.raises(ZeroDivisionError), process_state_kept():
            change_everything()
            changed = changes_since(before)
            raise ZeroDivisionError
        assert not changes_since(before)
        assert before.keys() - changed == {"signal handlers"}  # which `StopRequests` and `finetune` put back


@pytest.mark.parametrize(
    "allow",
    [
        "", "torch.backends.cuda.matmul.allow_tf32 = True", "torch.set_float32_matmul_precision('high')",
        "torch.set_float32_matmul_precision('medium')", "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "torch.backends.fp32_precision = 'tf32'", "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
    ],
)  # fmt: skip
def test_the_precision_of_products_is_put_back_whichever_way_set_it(allow):
    backends = torch.backends
    with process_state_kept():
        exec(allow)
        before = {name: value for name, value in state_of_the_process().items() if name.startswith("fp32")}
        with process_state_kept():
            _disable_tf32()
        after = state_of_the_process()
        backends.fp32_precision = "none"
    assert {name: after[name] for name in before} == before


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "expandable_segments:False"),
        ("expandable_segments:False", "expandable_segments:False"),
        ("max_split_size_mb:64", "max_split_size_mb:64,expandable_segments:False"),
    ],
)
def test_the_allocator_of_a_gpu_gets_its_setting_back(monkeypatch, before, after):
    settings = [before]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: settings[-1])
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    with process_state_kept():
        pass
    assert settings == [before], "what was not changed is not set again"
    with process_state_kept():
        settings.append("expandable_segments:True")
    assert settings[-1] == after
