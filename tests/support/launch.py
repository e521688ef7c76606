"""Run a script, or one test function, as N distributed processes without paying the imports N times.

A fork server imports torch, transformers and the like once per test run; every rank is a fork of it, so a launch costs
tens of milliseconds where `accelerate launch` costs 5 to 10 s a process. The environment of a rank is what
`accelerate launch` would set from the same preset: accelerate's own parser and functions compute it.

What differs from `accelerate launch` (see `toolkit/tools/forks.py`) matters to few tests, which take the real launcher. Here also
C++ destructors do not run, as ranks leave by `os._exit`; and a run draws a page only for a launch that asks for it.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import random
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from unittest.mock import patch

import yaml

from tests.support.rank import SERVER_ENVIRONMENT, call, run_script
from toolkit.errors import EXIT_USER_ERROR
from toolkit.tools.forks import Ranks, World

REPOSITORY = Path(__file__).resolve().parents[2]

_ON_CPU = {"use_cpu": True, "num_processes": 2, "mixed_precision": "no"}
_ON_ONE_MACHINE = {"num_machines": 1, "main_process_ip": None, "main_process_port": 0, "same_network": True}
_TWO_BY_TWO = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2}
# FSDP1 broadcasts module states through an accelerator only ("no available devices found").
_FSDP1 = {"fsdp_config": {"fsdp_sync_module_states": False}}
GPU_PRESET_OVERRIDES_ON_CPU = {
    "ddp": _ON_CPU,
    "fsdp2_full_shard": _ON_CPU,
    "fsdp2_shard_grad_op": _ON_CPU,
    "fsdp2_activation_checkpointing": _ON_CPU,
    # Inductor would compile with a C++ compiler, for minutes; what is traced and sharded is the same. The first also makes graphs
    # of the backward.
    "fsdp2_compile": {**_ON_CPU, "dynamo_config": {"dynamo_backend": "AOT_EAGER"}},
    "single_compile": {"use_cpu": True, "dynamo_config": {"dynamo_backend": "EAGER"}},
    "fsdp2_offload": _ON_CPU,  # pinned memory has no key in the YAML; `toolkit.launch.accelerator` turns it off on CPU
    "fsdp2_size_wrap": _ON_CPU,
    "fsdp2_multi_node": {**_ON_CPU, **_ON_ONE_MACHINE},
    "fsdp2_hsdp": {**_ON_CPU, **_ON_ONE_MACHINE, "num_processes": 4, "parallelism_config": _TWO_BY_TWO},
    "fsdp2_100b": {**_ON_CPU, **_ON_ONE_MACHINE, "num_processes": 4, "parallelism_config": _TWO_BY_TWO},
    "fsdp1_full_shard": {**_ON_CPU, **_FSDP1},
    "fsdp1_shard_grad_op": {**_ON_CPU, **_FSDP1},
}
"""Per GPU preset: all that changes when a test runs it on CPU. In fp32, as many CPUs emulate bf16: what is about bf16 asks."""
GPU_CHECKS = {"fsdp1_hybrid_shard": "tests/gpu/test_hybrid_shard.py", "fsdp2_fp8": "tests/gpu/test_on_gpus.py"}
"""Presets that nothing can run on CPU, and the check that runs them on GPUs."""

PRELOADED = [
    "torch", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict",
    "accelerate", "accelerate.commands.launch", "transformers", "transformers.generation",
    "transformers.models.auto.modeling_auto", "transformers.models.t5.modeling_t5", "transformers.models.bart.modeling_bart",
    "transformers.tokenization_utils_tokenizers", "datasets", "evaluate", "rouge_score.rouge_scorer", "tokenizers",
    "jsonargparse", "peft", "psutil", "pandas", "pyarrow.parquet", "pytest", "sklearn.datasets", "docstring_parser", "attrs",
    "transformers.trainer", "toolkit.training.finetune", "toolkit.tools.preview", "toolkit.tools.preview.summary",
    "toolkit.tools.report.page", "toolkit.tools.report.terminal",
    "tests.support.frozen_libraries",  # the last
]  # fmt: skip
READ_AT_IMPORT = (
    "OMP_NUM_THREADS", "PYTHONHASHSEED", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE",
    "TRANSFORMERS_OFFLINE",
)  # fmt: skip
"""Variables that the preloaded libraries have read already: a launch that asks for another value is refused."""

TIMEOUT_S = 600.0
"""Of a launch. It stops a hang, on the slowest machine too."""

FIRST_PORT, PORTS_OF_A_WORKER = 12_000, 2_000
"""Linux gives connections ports from 32768 on."""

_numbers = itertools.count(random.SystemRandom().randrange(PORTS_OF_A_WORKER))

_environment_at_server_start: dict[str, str] = {}


@dataclass(frozen=True)
class LaunchResult:
    """How the ranks of one launch ended."""

    returncodes: list[int]
    """By rank; `-9` is a process killed by signal 9, as in `subprocess`."""
    stdout: str
    stderr: str

    def refusal(self) -> str:
        """The sentence of a user's mistake, with which every rank ended by itself, and which one of them said."""
        assert set(self.returncodes) == {EXIT_USER_ERROR}, f"{self.returncodes}\n{self.stderr[-6000:]}"
        assert "Traceback" not in self.stderr, self.stderr[-6000:]
        errors = [line for line in self.stderr.splitlines() if line.startswith("error:")]
        assert len(errors) == 1, self.stderr[-6000:]
        return errors[0].removeprefix("error: ")


def launch(script: Path | str, argv: list[str], *, timeout_s: float = TIMEOUT_S, **where) -> LaunchResult:
    """Run `script` on every rank and wait for the end; `where` is as `Running` takes it. AssertionError after `timeout_s`."""
    with start(script, argv, **where) as running:
        return running.wait(timeout_s)


def start(script: Path | str, argv: list[str], **where) -> Running:
    """Start `script` on every rank and return at once; `where` is as `Running` takes it."""
    return Running(lambda _: partial(run_script, [str(Path(script).resolve()), *argv]), **where)


def launch_logged(preset: Path, command: list[str], log_path: Path) -> int:
    """As `toolkit.tools.preset_runs.launch`, by the tests' server: its exit status, and its output in `log_path`."""
    with Running(lambda _: partial(run_script, command), preset=preset) as running:
        result = running.wait()
    log_path.parent.mkdir(parents=True, exist_ok=True)
    log_path.write_text(result.stdout + result.stderr)
    return next((code for code in result.returncodes if code), 0)


def run_on_ranks(function: Callable, *, timeout_s: float = TIMEOUT_S, **where) -> list:
    """Call a module-level `function(*args)` on every rank and return the results in rank order; `where` is as `start_on_ranks`
    takes it. What is raised is the error of the rank that failed first, with its traceback and the ranks' stderr as a note.
    """
    with start_on_ranks(function, **where) as running:
        return running.results(timeout_s)


def start_on_ranks(function: Callable, *, args: tuple = (), **where) -> Running:
    """Start `run_on_ranks`, as `start` starts a script; `Running.results` has the results."""
    return Running(lambda folder: partial(call, folder, function, args), **where)


class Running(Ranks):
    """The ranks of one launch: their pids to kill, their output so far, and how they end."""

    def __init__(
        self,
        work: Callable[[Path], Callable[[], None]],
        *,
        preset: str | Path,
        overrides: dict | None = None,
        num_processes: int | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        """Start them at once; use it in a `with`.

        Args:
            work: of a new folder, which also takes the outputs, makes what each rank does.
            preset: a name in accelerate_configs/ or a file.
            overrides: merged into the preset's YAML, nested mappings key by key.
        """
        context, environment = _fork_server(), {**os.environ, **SERVER_ENVIRONMENT, **(env or {})}
        for name in READ_AT_IMPORT:
            asked, frozen = environment.get(name), _environment_at_server_start.get(name)
            assert asked == frozen, f"{name}={asked!r} comes too late: the preloaded libraries read {frozen!r}"
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        processes = {} if num_processes is None else {"num_processes": num_processes}
        accelerate_yaml, mapping = write_accelerate_yaml(self.folder, preset, (overrides or {}) | processes)
        is_distributed = mapping["distributed_type"] in ("MULTI_GPU", "FSDP")
        places = range(mapping["num_processes"] if is_distributed else 1)  # accelerate starts one for every other type
        world = World(
            accelerate_yaml=accelerate_yaml,
            environment=environment,
            port=free_port() if is_distributed else None,
            streams=[(self.folder / f"stdout-{rank}.txt", self.folder / f"stderr-{rank}.txt") for rank in places],
            work=work(self.folder),
        )
        super().__init__(context, world)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def output(self, stream: str = "stdout") -> str:
        """What the ranks have printed so far to `stdout` or `stderr`, rank 0 first."""
        files = [self.folder / f"{stream}-{rank}.txt" for rank in range(len(self._processes))]
        return "".join(path.read_text(errors="replace") for path in files if path.exists())

    def wait_for_output(self, text: str, *, times: int = 1, timeout_s: float = TIMEOUT_S) -> None:
        """Return once the ranks have printed `text` so often in all; AssertionError if they end before, or time runs out."""
        deadline = time.monotonic() + timeout_s
        while self.output().count(text) < times:
            alive = [process for process in self._processes if process.exitcode is None]
            if (not alive and self.output().count(text) < times) or time.monotonic() >= deadline:
                raise AssertionError(f"{text!r} was not printed {times} times\n{self.last_words()}")
            wait_for_any([process.sentinel for process in alive], timeout=0.02)

    def wait(self, timeout_s: float = TIMEOUT_S) -> LaunchResult:
        """Wait for the ranks as `end` does; AssertionError after `timeout_s`."""
        try:
            return LaunchResult(self.end(timeout_s), self.output("stdout"), self.output("stderr"))
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.last_words()}") from None

    def results(self, timeout_s: float = TIMEOUT_S) -> list:
        """Wait; what the function returned, in rank order. Raises as `run_on_ranks` does."""
        result = self.wait(timeout_s)
        failures = sorted(self.folder.glob("error-*.pkl"), key=lambda path: path.stat().st_mtime_ns)
        if failures:
            error, text = pickle.loads(failures[0].read_bytes())
            error.add_note(f"{failures[0].stem}\n{text}\nstderr of all ranks:\n{result.stderr[-4000:]}")
            raise error
        if any(result.returncodes):
            raise AssertionError(self.last_words())
        return [pickle.loads((self.folder / f"result-{rank}.pkl").read_bytes()) for rank in range(len(self.pids))]

    def last_words(self) -> str:
        """Exit codes so far and the ends of the outputs, for an assertion's message."""
        codes = [process.exitcode for process in self._processes]
        return f"exit codes {codes}\nstdout:\n{self.output('stdout')[-4000:]}\nstderr:\n{self.output('stderr')[-4000:]}"


def write_accelerate_yaml(folder: Path, preset: str | Path, overrides: dict | None = None) -> tuple[Path, dict]:
    """A preset (a name in accelerate_configs/ or a file) with `overrides` merged into it: its file in `folder`, its content."""
    path = REPOSITORY / "accelerate_configs" / f"{preset}.yaml" if isinstance(preset, str) else preset
    mapping = _merge(yaml.safe_load(path.read_text(encoding="utf-8")), overrides or {})
    (folder / path.name).write_text(yaml.safe_dump(mapping), encoding="utf-8")
    return folder / path.name, mapping


def _merge(base: dict, overrides: dict) -> dict:
    merged = dict(base)
    for key, value in overrides.items():
        merged[key] = _merge(merged.get(key) or {}, value) if isinstance(value, dict) else value
    return merged


def free_port() -> int:
    """Another port at each call, which no other test and no connection takes meanwhile: of a range that belongs to this one of
    the processes that pytest-xdist runs tests in."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = FIRST_PORT + worker % 10 * PORTS_OF_A_WORKER
    while True:
        port = first + next(_numbers) % PORTS_OF_A_WORKER
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def preloaded() -> list[str]:
    """What the server imports. Nothing where GPUs are: torchao initializes CUDA at its import, which no fork may use then."""
    import torch  # here, because most who import this file start no ranks

    return [] if torch.cuda.device_count() else PRELOADED


def _fork_server():
    """The context whose processes are forks of the preloaded server; the first call starts it."""
    context = multiprocessing.get_context("forkserver")
    if not _environment_at_server_start:
        context.set_forkserver_preload(preloaded())
        with patch.dict(os.environ, SERVER_ENVIRONMENT):
            _environment_at_server_start.update(os.environ)
            multiprocessing.forkserver.ensure_running()
    return context
