"""What a run prints on 2 ranks before its training, at its start and resumed, and the lines of its phases."""

import contextlib
import io
import re
from unittest.mock import patch

from tests.support.launch import run_on_ranks
from tests.support.small_run import run_in_this_process
from tests.support.workbench import FP32, Workbench
from toolkit.launch.log import start_logging

START = """\
model       t5 (T5ForConditionalGeneration): N parameters, N (N %) trainable (lora of rank 4)
shards      4 T5Block, 1 T5ForConditionalGeneration: N parameters in float32, N MiB of them on rank 0
data        rows.jsonl: 52 training rows of N tokens
evaluation  3 held-out rows, at the end; best by loss
preset      fsdp2_cpu.yaml: FSDP2, 2 processes, fp32
steps       3, 7 an epoch, each of 8 rows: 2 processes x 1 micro-batch x 4 rows
folder      runs/run: metrics.jsonl, checkpoints (every 2 steps and at the end), export, merged, report.html
"""
MASKS = [
    (r"[\d,]+ \([\d.]+%\) trainable", "N (N %) trainable"),
    (r"[\d.]+ of [\d.]+ GB", "N of N GB"),
    (r"[\d.,]+ (parameters|MiB|tokens\n)", r"N \1"),
]
RESUMED = START.replace("steps       3,", "steps       4 to 5,")


def test_the_first_lines_and_the_phases(bench, tmp_path):
    changes = {"data__cache_dir": tmp_path / "cache", "checkpoint__every_steps": 2, "export__merge": True}
    flags = bench.flags("run", **changes, adapter__method="lora", adapter__rank=4)
    printed, of_rank_1 = run_on_ranks(print_run, preset="fsdp2_cpu", overrides=FP32, args=(flags,))
    assert first_lines(printed, bench) == START and of_rank_1 == ""
    once = ["reading the data: 60 rows", "writing step-00000002: N of N GB", "writing step-00000003: N of N GB"]
    once += ["tokenizing train rows: 52 of 52 rows", "tokenizing evaluation rows: 8 of 8 rows"]
    once += ["loading the weights: N of N GB", "hashing the frozen weights: N of N GB", "exporting to merged: N of N GB"]
    at_the_end = [line for line in masked(printed, bench).splitlines() if not line.endswith(" left")]
    assert [at_the_end.count(line) for line in once] == [1] * len(once), printed

    printed, of_rank_1 = run_on_ranks(print_run, preset="fsdp2_cpu", overrides=FP32, args=([*flags, "--train.max_steps=5"],))
    assert first_lines(printed, bench) == RESUMED and of_rank_1 == ""
    assert "resuming from runs/run/checkpoints/step-00000003, after step 3\n" in masked(printed, bench)
    assert re.search(r"^loading step-00000003: (\d+) of \1 tensors$", printed, re.M)
    assert "tokenizing" not in printed and "reading" not in printed


def print_run(flags: list[str]) -> str:
    """The recipe, with a line of each phase at every report; what this rank has printed."""
    printed = io.StringIO()
    with patch("toolkit.distributed.progress.LINE_INTERVAL_S", 0), contextlib.redirect_stdout(printed):
        start_logging()
        run_in_this_process("t5", flags)
    return printed.getvalue()


def first_lines(printed: str, bench: Workbench) -> str:
    lines = re.findall(r"^(?:model|shards|data|evaluation|preset|steps|folder)  +.*\n", printed, re.M)
    return masked("".join(lines), bench)


def masked(printed: str, bench: Workbench) -> str:
    """Without what differs from run to run: the test's folders, and figures of the model and of its tokens."""
    printed = printed.replace(str(bench.runs), "runs").replace(str(bench.models["t5"]), "t5")
    for pattern, to in MASKS:
        printed = re.sub(pattern, to, printed)
    return printed
