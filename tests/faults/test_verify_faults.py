"""`verify` proves a sound T5, names the check that a fault breaks, and no other; and the command as a user calls it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planting.faults import FAULTS
from tests.planting.plant import planted
from tests.support.launch import REPOSITORY, launch_logged, run_on_ranks
from tests.support.quantized.models import save_quantizable_models
from tests.support.rank import SERVER_ENVIRONMENT
from tests.support.workbench import Workbench
from toolkit.optimizers import OPTIMIZERS
from toolkit.tools.forks import take_signals
from toolkit.tools.verify.proofs import Proof
from toolkit.tools.verify.runs import launch_all, plan_runs
from toolkit.tools.verify.verify import DEFAULT_TOLERANCE, build_box, compare, verify

CHECKS = {
    "start", "rows", "loss", "gradients", "update", "dropout", "evaluation", "sharding", "moved", "save", "resume",
    "export", "generation", "bf16", "recomputation", "modes", "positions", "text",
}  # fmt: skip
NF4 = "--adapter.base_dtype=nf4"
NEW_TOKENS = "--model.add_tokens=" + json.dumps([f"<|{number}|>" for number in range(200)])
"""More than the Llama has rows for."""
BESIDE_ONE_PROCESS, RESUMED = {"reference", "preset-0"}, {"dropout", "resumed", "resumed-again", "ddp-dropout"}
RUNS_OF_CHECK: dict[str, set[str]] = {
    **dict.fromkeys(("start", "loss", "gradients", "evaluation", "positions", "buffers", "run"), BESIDE_ONE_PROCESS),
    **dict.fromkeys(("save", "resume"), RESUMED),
    "text": {"reference"},
    "modes": {"ddp"},
    "dropout": {"dropout"},
    "recomputation": {"dropout", "kept-0"},
}
"""Those of the eight or more that show whether a check passes; `preset-0` for the others."""
CASES = [(recipe, name) for name, fault in FAULTS.items() for recipe in fault.verify]
if not os.environ.get("ALL_FAULTS"):
    CASES = [*{frozenset(FAULTS[name].verify[recipe][0]): (recipe, name) for recipe, name in reversed(CASES)}.values()]
"""One for each set of checks that fail; all of them if `ALL_FAULTS` is set."""


@pytest.fixture(scope="module")
def benches(bench, llm_bench) -> dict[str, Workbench]:
    return {"t5": bench, "llm": llm_bench, "nf4": llm_bench}


def flags_of(bench: Workbench, *more: str) -> list[str]:
    flags = [f"--data.files={bench.data / bench.rows}", f"--data.cache_dir={bench.data / 'cache'}"]
    flags += ["--data.source=jsonl", "--data.eval_fraction=0.25", "--optim.beta2=0.95", "--optim.eps=1e-6"]
    lora = ["--adapter.method=lora", "--adapter.rank=4", "--data.max_length_tokens=64"]
    return [*flags, *(lora if bench.recipe == "llm" else []), *more]


def model_of(bench: Workbench) -> str:
    return str(bench.models[{"t5": "t5", "llm": "llama"}[bench.recipe]])


def test_t5_passes(benches, tmp_path, capsys):
    """That a LoRA of a Llama does is seen below: no check fails but that of the fault."""
    bench, preset, output = benches["t5"], "fsdp2_activation_checkpointing", tmp_path / "verify"
    assert verify(flags_of(bench), model=model_of(bench), presets=[preset], bf16=True, output=output, **HERE)
    printed = capsys.readouterr().out
    assert f"run 10 of 10: {preset} x 2, bf16" in printed and "\nall 50 proven\n" in printed
    verdict = json.loads((output / "verify.json").read_text())
    assert verdict["passed"] and {proof["check"] for proof in verdict["proofs"]} == CHECKS
    assert all(proof["passed"] for proof in verdict["proofs"])
    of_step_1 = [p["difference"] for p in verdict["proofs"] if p["compared"].endswith(("4 norms", "(with ReLU)"))]
    assert 0 < max(of_step_1) < DEFAULT_TOLERANCE, "several processes add up in another order"
    assert sorted(path.name for path in output.iterdir()) == ["logs", "presets", "verify.json", "verify.md"]


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "adamw"])
def test_t5_passes_with_other_optimizers(benches, tmp_path, optimizer):
    """Beside one process; that their runs resume is in `tests/distributed/test_optimizers.py`."""
    bench = benches["t5"]
    flags = [flag for flag in flags_of(bench) if not flag.startswith("--optim.")] + [f"--optim.name={optimizer}"]
    presets = ["fsdp2_full_shard", *(["fsdp1_full_shard"] if OPTIMIZERS[optimizer].TAKES_FLAT else [])]
    runs = {"reference", *(f"preset-{place}" for place in range(len(presets)))}
    proofs = run_part(runs, tmp_path, flags, model=model_of(bench), presets=presets)
    assert all(proof.passed for proof in proofs), proofs
    updates = [proof.compared for proof in proofs if proof.check == "update"]
    assert len(updates) == len(runs) and all(OPTIMIZERS[optimizer].TITLE in compared for compared in updates)


def test_a_qwen3_in_codes_passes(benches, tmp_path, capsys):
    run_on_ranks(save_quantizable_models, preset="single", overrides={"mixed_precision": "no"}, args=(tmp_path / "models",))
    preset, output = "fsdp2_activation_checkpointing", tmp_path / "verify"
    model = str(tmp_path / "models" / "llm")
    assert verify(flags_of(benches["nf4"], NF4), model=model, presets=[preset], output=output, **HERE), capsys.readouterr().out
    verdict = json.loads((output / "verify.json").read_text())
    assert {proof["check"] for proof in verdict["proofs"]} >= {"start", "frozen", "export", "resume", "recomputation"}


@pytest.mark.parametrize(("recipe", "name"), CASES, ids=["-".join(case) for case in CASES])
def test_fault_is_named(benches, tmp_path, recipe, name):
    bench, fault = benches[recipe], FAULTS[name]
    expected, detail = fault.verify[recipe]
    flags = [*flags_of(bench, *[NF4] * (recipe == "nf4")), *fault.flags, f"--data.cache_dir={tmp_path / 'cache'}"]
    runs = {run for check in expected for run in RUNS_OF_CHECK.get(check, {"preset-0"})}
    settings = {"model": model_of(bench), "presets": fault.presets, "only_in_ranks": fault.only_in_ranks}
    failed = [proof for proof in run_part(runs, tmp_path, flags, name, **settings) if not proof.passed]
    assert {proof.check for proof in failed} == expected
    assert any(detail in proof.detail for proof in failed)


def test_an_adapter_with_new_tokens_that_no_process_holds_passes(benches, tmp_path):
    bench, how = benches["llm"], {"sharded": True, "num_processes": 3}
    flags = flags_of(bench, NEW_TOKENS)
    proofs = run_part({"reference", "preset-0", "dropout"}, tmp_path, flags, model=model_of(bench), **how)
    assert all(proof.passed for proof in proofs), proofs
    assert {proof.check for proof in proofs} >= {"text", "gradients", "update", "dropout", "evaluation", "export", "generation"}


def test_command(benches, tmp_path):
    """Through `accelerate launch`, from another folder, up to the end of the first run; a wrong flag is refused."""
    bench, output = benches["t5"], tmp_path / "verify"
    command = [sys.executable, "-m", "toolkit", "verify", "--use-cpu", "--output", str(output), "--model", model_of(bench)]
    where = {"cwd": tmp_path, "env": os.environ | SERVER_ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY)}, "text": True}
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "preexec_fn": take_signals}
    with subprocess.Popen([*command, *flags_of(bench)], **where, **how) as run:
        printed = [run.stdout.readline() for _ in range(2)]
        run.send_signal(signal.SIGINT)
    assert printed[1].startswith("run 1 of 8: one process ") and printed[1].endswith(" s\n"), printed
    refused = subprocess.run([*command, "--optim.lrr", "1"], **where, capture_output=True)
    assert (refused.returncode, refused.stderr.startswith("error: "), "Traceback" in refused.stderr) == (2, True, False)


def run_part(
    names: Iterable[str],
    output: Path,
    run_arguments: list[str],
    fault: str = "none",
    *,
    only_in_ranks: bool = False,
    **settings,
) -> list[Proof]:
    """The rows of all checks that these runs reach; settings are those of `build_box`."""
    with planted(fault, only_in_ranks=only_in_ranks):
        box = build_box(run_arguments, use_cpu=True, output=output, **{"num_processes": 2} | settings)
        plans = plan_runs(box)
        runs = {name: replace(plan, failure="") for name, plan in plans.items()}
        launched = launch_all(box, {name: plan for name, plan in plans.items() if name in names}, launch_logged, launch_logged)
        runs |= {run.name: run for run in launched}
        proofs = compare(box, runs, DEFAULT_TOLERANCE)
    return [proof for proof in proofs if proof.is_reached]


HERE = {"use_cpu": True, "num_processes": 2, "launch": launch_logged}
