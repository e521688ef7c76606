"""The log of a program and of a library, its level, its ranks, and its lines beside a progress bar. What a run changes in its
process and in libraries is put back at its end, also after an error."""

import datetime
import errno
import io
import logging
import os
import subprocess
import sys
import warnings
from contextlib import suppress
from unittest.mock import Mock

import datasets
import pytest
import torch
from transformers.utils import logging as of_transformers

from tests.support.process_state import changes_since, state_of_the_process
from tests.support.workbench import call_toolkit
from toolkit.distributed.comm import limit_groups
from toolkit.distributed.rng import seed_all
from toolkit.launch.accelerator import _disable_tf32, bound_primitive_cache
from toolkit.launch.log import Output, lost_outputs, start_logging
from toolkit.launch.process_state import process_state_kept

logger = logging.getLogger("toolkit")


def log_three() -> None:
    logger.info("a \x1b[2J% remark")
    logger.warning("something\nis lost")
    logger.warning("a damaged cache", extra={"concerns_this_rank": True})


@pytest.mark.parametrize(
    ("rank", "level", "out", "err"),
    [
        (None, None, "a \\x1b[2J% remark\n", "WARNING: something\\nis lost\nWARNING: a damaged cache\n"),
        ("0", "warning", "", "WARNING: something\\nis lost\nWARNING: a damaged cache\n"),
        ("1", "INFO", "", "WARNING: rank 1: a damaged cache\n"),
        ("1", "ERROR", "", ""),
    ],
)
def test_rank_and_level_decide_what_is_printed(rank, level, out, err, monkeypatch, capsys):
    given = {"RANK": rank, "TOOLKIT_LOG_LEVEL": level}
    monkeypatch.setattr(os, "environ", {name: value for name, value in given.items() if value is not None})
    start_logging()
    log_three()
    assert capsys.readouterr() == (out, err)


def test_handlers_of_the_program_get_the_records_instead(monkeypatch, capsys, caplog):
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)
    monkeypatch.setenv("RANK", "1")
    caplog.set_level(logging.INFO)
    start_logging()
    log_three()
    assert logger.handlers == [] and logger.level == logging.NOTSET and logger.propagate
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("WARNING", "rank 1: a damaged cache")]
    assert capsys.readouterr() == ("", "")


def test_an_import_changes_nothing():
    code = "import logging; before = logging.getLogger('toolkit').__dict__.copy(); import toolkit.launch.log; "
    code += "assert vars(logging.getLogger('toolkit')) == before and not logging.root.handlers"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_a_level_that_is_none_is_refused_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setenv("TOOLKIT_LOG_LEVEL", "LOUD")
    assert call_toolkit("check", "x.yaml") == 2
    sentence = "error: TOOLKIT_LOG_LEVEL is LOUD, which is not a level: set one of INFO, WARNING, ERROR, or unset it\n"
    assert capsys.readouterr().err == sentence


def test_an_output_whose_reader_is_slow_is_not_lost():
    """Of a pipe or terminal that another program has made non-blocking, which it is for all that share it."""
    reader, writer = os.pipe()
    for descriptor in (reader, writer):
        os.set_blocking(descriptor, False)
    with open(writer, "w", buffering=1) as stream:
        output = Output(stream)
        for _ in range(2000):
            output.write("x" * 99 + "\n")
        assert not output.lost
        os.read(reader, 2**20)
        output.write("later\n")
        with suppress(BlockingIOError):
            while text := os.read(reader, 2**20):
                last = text
        assert last.endswith(b"later\n")
    os.close(reader)


PRINTS = """
import logging, sys
from toolkit.launch.log import lost_outputs, start_logging
start_logging()
{change}
for _ in range(3):
    logging.getLogger("toolkit").info("evaluated")
    print("a table", flush=True)
    sys.stdout.writelines(["a", "b"])
    print("another", file=sys.stderr)
from tqdm import tqdm
for _ in tqdm(range(3), delay=0, mininterval=0):
    pass
from rich.console import Console
Console().print("coloured")
print("kept until Python ends", end="")
open(sys.argv[1], "w").write(repr(lost_outputs()))
"""


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ("import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1)", {"stdout": os.strerror(errno.ENOSPC)}),
        (
            "import os; read, write = os.pipe(); os.close(read); os.dup2(write, 1); os.dup2(write, 2)",
            {"stdout": os.strerror(errno.EPIPE), "stderr": os.strerror(errno.EPIPE)},
        ),
        ("import os; os.close(1)", {"stdout": os.strerror(errno.EBADF)}),
        ("sys.stdout.close()", {"stdout": "I/O operation on closed file."}),
    ],
)
@pytest.mark.parametrize("options", [[], ["-u"]])
def test_an_output_that_fails_ends_no_program(tmp_path, change, lost, options):
    (script := tmp_path / "script.py").write_text(PRINTS.format(change=change))
    command = [sys.executable, *options, str(script), str(tmp_path / "lost")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (done.returncode, (tmp_path / "lost").read_text()) == (0, repr(lost)), done.stderr
    assert "Error" not in done.stderr


def test_streams_that_are_no_files_are_lost_too(monkeypatch):
    tee = Mock(spec=["write", "flush"])
    tee.write.side_effect = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(sys, "stdout", tee)
    start_logging()
    logger.info("a remark")
    print("a table")
    assert lost_outputs() == {"stdout": "No space left on device"} and len(tee.mock_calls) == 1


def test_what_an_encoding_lacks_is_printed_as_escapes(monkeypatch):
    for encoding, printed in {
        "ascii": r"caf\xe9 \u8fd8 \udce9 \ud800",
        "latin-1": r"café \u8fd8 \udce9 \ud800",
        "utf-8": r"café 还 \udce9 \ud800",
    }.items():
        monkeypatch.setattr(sys, "stdout", Output(io.TextIOWrapper(content := io.BytesIO(), encoding)))
        print("café 还 \udce9 \ud800")
        logger.info("café 还 \udce9 \ud800")
        assert content.getvalue().decode(encoding) == f"{printed}\n" * 2 and lost_outputs() == {}


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


def test_the_allocator_of_a_gpu_gets_its_setting_back(monkeypatch):
    settings: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: settings[-1])
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    off = "expandable_segments:False"
    for before, after in (("", off), (off, off), ("max_split_size_mb:64", f"max_split_size_mb:64,{off}")):
        settings[:] = [before]
        with process_state_kept():
            pass
        assert settings == [before], "what was not changed is not set again"
        with process_state_kept():
            settings.append("expandable_segments:True")
        assert settings[-1] == after
