"""How a `UserError` reaches the user: one line from one process, exit code 2; anything else keeps its traceback."""

import errno
import itertools
import logging
import os
import signal
import subprocess
import sys
import tempfile

import pytest

from tests.support.launch import REPOSITORY
from toolkit.errors import EXIT_STOPPED, EXIT_USER_ERROR, UserError, as_user_error, exit_on_user_error, refused


def run_python(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), **environment}
    return subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(
    ("rank", "local_rank", "agreed", "speaks"),
    [
        (None, None, False, True),
        (0, 0, False, True),
        (1, 1, False, False),
        (8, 0, False, True),  # a second node's first process: what is wrong there may be known there alone
        (0, 0, True, True),
        (8, 0, True, False),
        (1, 1, True, False),
    ],
)
def test_who_speaks(monkeypatch, capsys, rank, local_rank, agreed, speaks):
    launched = {} if rank is None else {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
    monkeypatch.setattr(os, "environ", launched)
    error = UserError("a is 3: write 4", printed_by="run" if agreed else "node")
    with pytest.raises(SystemExit) as end, exit_on_user_error():
        raise error
    assert end.value.code == EXIT_USER_ERROR == 2
    assert capsys.readouterr().err == ("error: a is 3: write 4\n" if speaks else "")


def test_under_torch_elastic_the_first_of_a_node_speaks(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("signal.signal", lambda number, handler: None)  # this is pytest's process
    printed = []
    for node, local_rank, agreed in ((0, 1, False), (0, 0, False), (1, 3, False), (1, 0, False), (2, 1, True), (3, 0, True)):
        folder = tmp_path / f"node_{node}" / "attempt_0" / str(local_rank)
        folder.mkdir(parents=True)
        ranks = {"GROUP_RANK": node, "LOCAL_RANK": local_rank, "RANK": 8 * node + local_rank, "LOCAL_WORLD_SIZE": 1}
        launched = {"TORCHELASTIC_ERROR_FILE": folder / "error.json", **ranks}
        monkeypatch.setattr(os, "environ", {name: str(value) for name, value in launched.items()})
        error = UserError("a is 3: write 4", printed_by="run" if agreed else "node")
        with pytest.raises(SystemExit), exit_on_user_error():
            raise error
        printed.append(capsys.readouterr().err != "")
    assert printed == [True, False, True, False, False, False]


def test_under_the_real_launcher_each_rank_ends_with_2_and_the_last_lines_carry_the_sentence(tmp_path):
    """It sends SIGTERM to the others as soon as one has failed; the first process is slower than anybody waits for it."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\n"
        "from toolkit.errors import UserError, exit_on_user_error\n"
        "with exit_on_user_error():\n"
        "    time.sleep(9 if os.environ['LOCAL_RANK'] == '0' else 0)\n"
        "    raise UserError('a is 3: write 4')\n"
    )
    preset = f"{REPOSITORY}/accelerate_configs/ddp_cpu.yaml"
    done = run_python("-m", "accelerate.commands.launch", "--config_file", preset, str(script))
    assert done.returncode != 0
    lines = done.stderr.split("\n")
    assert lines.count("error: a is 3: write 4") == 1, done.stderr
    exits = [line.split("(")[0].strip() for line in lines if line.startswith("  exitcode  :")]
    assert exits == ["exitcode  : 2"] * 2, done.stderr
    assert "  traceback : error: a is 3: write 4" in lines[-4:], done.stderr


THREADS_IN_THE_STORE = """
import threading, time
import torch.distributed as dist
from toolkit.errors import UserError, exit_on_user_error
dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
store = dist.TCPStore('127.0.0.1', 0, is_master=True)
def ask():
    while True:
        store.set('key', 'value')
for _ in range(4):
    threading.Thread(target=ask, daemon=True).start()
time.sleep(0.3)
with exit_on_user_error():
    raise UserError('a is 3: write 4')
"""


def test_a_thread_that_comes_back_from_torch_does_not_abort_the_end():
    """As the watchdog's does when rank 0, with the store, has ended: Python's finalization ended this script by SIGABRT."""
    done = run_python("-c", THREADS_IN_THE_STORE)
    assert (done.returncode, done.stderr) == (EXIT_USER_ERROR, "error: a is 3: write 4\n")


HOSTILE = "a\x1b]0;owned\x07b\x9b2J\x7f\r\u202ec\u2066\nerror: \ud800"
HARMLESS = r"a\x1b]0;owned\x07b\x9b2J\x7f\r\u202ec\u2066\nerror: \ud800"


def test_control_characters_of_a_row_do_not_reach_the_terminal(monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", {})
    with pytest.raises(SystemExit), exit_on_user_error():
        raise UserError(f"row 3 is {HOSTILE}:\n\twrite é, 还")
    logging.getLogger("toolkit").info(f"the template says {HOSTILE}")
    printed = capsys.readouterr()
    assert printed.err == f"error: row 3 is {HARMLESS}:\\n\twrite é, 还\n"
    assert printed.out == f"the template says {HARMLESS}\n"


def raised(chain: list[BaseException], link: str) -> BaseException:
    """The first error, whose cause or context is the next, and so on."""
    for error, before in itertools.pairwise(chain):
        setattr(error, link, before)
    return chain[0]


FULL = OSError(errno.ENOSPC, "No space left on device", "/run/shard")


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (FULL, errno.ENOSPC),
        (raised([RuntimeError("unexpected pos 1024 vs 918"), FULL], "__context__"), errno.ENOSPC),
        (raised([RuntimeError("x"), ValueError("y"), FULL], "__cause__"), errno.ENOSPC),
        (Exception("No space left on device (os error 28)"), errno.ENOSPC),
        (RuntimeError("I/O error: Disk quota exceeded (os error 122)"), errno.EDQUOT),
        (RuntimeError("[enforce fail at gloo/transport/tcp/device.cc:94] rv != -1. socket: Too many open files"), errno.EMFILE),
        (RuntimeError("DefaultCPUAllocator: no 9 bytes. Error code 12 (Cannot allocate memory)"), errno.ENOMEM),
        (OSError("Caught OSError in DataLoader worker process 0.\nOSError: [Errno 5] Input/output error"), errno.EIO),
        (MemoryError(), errno.ENOMEM),
        (raised([RuntimeError("x"), MemoryError()], "__context__"), errno.ENOMEM),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), errno.ENOENT),  # of a socket
        (FileNotFoundError(errno.ENOENT, "x", f"{tempfile.gettempdir()}/nothing/here"), errno.ENOENT),
        (FileNotFoundError(errno.ENOENT, "x", f"{tempfile.gettempdir()}/nothing"), None),
        (FileNotFoundError(errno.ENOENT, "x", "/nothing/here"), None),
        (Exception("no such file (os error 2)"), None),
        (PermissionError(errno.EACCES, "Permission denied"), None),
        (ValueError("28"), None),
        (raised([cycle := ValueError("x"), ValueError("y"), cycle], "__context__"), None),
    ],
)  # fmt: skip
def test_what_the_system_refused_is_found_behind_the_errors_of_libraries(error, number):
    found = refused(error)
    assert (found and found.errno) == number
    assert (as_user_error(error) is None) == (number is None)


def test_what_the_system_refuses_is_a_sentence_with_its_path():
    remedy = "make room on the disk, or in /dev/shm (docker run --shm-size 1g, or data.num_loader_workers 0)"
    for sentence, error in {
        f"No space left on device; {remedy}, and start the same command again": OSError(
            errno.ENOSPC, "No space left on device"
        ),  # of a semaphore, or of NCCL's buffers
        "No space left on device (/run/shard); make room there, and start the same command again": FULL,
        "Permission denied (/run/a); ask its owner, or chmod": PermissionError(errno.EACCES, "Permission denied", "/run/a"),
    }.items():
        assert str(as_user_error(error)).startswith(f"the system refuses: {sentence}")


def test_what_the_system_refuses_ends_a_program_and_other_errors_pass(capsys, monkeypatch):
    monkeypatch.setattr(os, "environ", {"LOCAL_RANK": "1"})  # which may be the only rank that knows
    with pytest.raises(SystemExit) as end, exit_on_user_error():
        raise raised([RuntimeError("unexpected pos 1024 vs 918"), FULL], "__context__")
    assert end.value.code == EXIT_USER_ERROR
    assert capsys.readouterr().err.startswith("error: the system refuses: No space left on device (/run/shard); ")
    with pytest.raises(ValueError, match="not for users"), exit_on_user_error():
        raise ValueError("not for users")


WITHIN = "import os, signal, sys, tokenizers\nfrom toolkit.errors import exit_on_user_error\nwith exit_on_user_error():\n    "


def test_names_are_read_as_utf_8_in_every_locale(tmp_path):
    """In a C locale without UTF-8 mode a name has halves of surrogate pairs, which libraries in Rust refuse with a traceback."""
    save = "tokenizers.Tokenizer(tokenizers.models.BPE()).save(sys.argv[1])"
    done = run_python("-c", WITHIN + save, str(tmp_path / "läufe_日本"), LC_ALL="C", PYTHONUTF8="0")
    assert (tmp_path / "läufe_日本").is_file(), done.stderr


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_signal_ahead_of_a_time_limit_asks_for_another_start(rank):
    ended = run_python("-c", f"{WITHIN}os.kill(os.getpid(), signal.SIGUSR1)", RANK=rank, WORLD_SIZE="2")
    said = "stopped by SIGUSR1 outside of the training steps: the same command goes on\n" if rank == "0" else ""
    assert (ended.returncode, ended.stderr) == (EXIT_STOPPED, said)


def test_the_signal_ahead_of_a_time_limit_is_the_callers_again_after_the_block():
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with exit_on_user_error():
        assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_IGN
    assert signal.signal(signal.SIGUSR1, before) is signal.SIG_IGN
