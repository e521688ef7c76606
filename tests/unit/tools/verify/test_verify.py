"""What `verify` makes of what runs have left, on records written by hand; what it refuses before any run; and which kernels its
runs take on a GPU."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch.nn.attention import SDPBackend

from tests.support.launch import REPOSITORY
from tests.support.model_folders import save_jsonl
from tests.support.refusals import refusal
from tests.support.workbench import call_toolkit
from toolkit.config.schema import OptimConfig
from toolkit.models.patches.documents import describe_attention
from toolkit.optimizers import OPTIMIZERS
from toolkit.tools.verify import checks
from toolkit.tools.verify.runs import NotReached, WatchedRun, launch_all, plan_runs
from toolkit.tools.verify.verify import build_box, verify
from toolkit.tools.verify.watched_run import take_exact_kernels

FSDP = {"distributed_type": "FSDP", "num_processes": 2}
WEIGHTS = {"a": np.arange(1.0, 5.0), "b": np.array([1e-9])}


def watched(folder: Path, name: str, **about) -> WatchedRun:
    """A run of four steps with losses 4, 3, 2, 1 that has left everything."""
    run = WatchedRun(name=name, title=name, mapping=FSDP, flags={}, from_step=2, output=folder)
    run.folder.mkdir(parents=True)
    run.records.mkdir(parents=True)
    same = {"kind": "train", "grad_norm": 1.0, "learning_rate": 0.1, "num_tokens": 7}
    lines = [same | {"step": 5 - loss, "loss": loss} for loss in (4, 3, 2, 1)]
    save_jsonl(run.folder / "metrics.jsonl", [*lines, {"kind": "eval", "step": 4, "loss": 0.5, "num_rows": 3}])
    rows = [{"step": step, "micro_batch": 0, "row_ids": [step, step + 10]} for step in (1, 2, 3, 4)]
    save_jsonl(run.folder / "rows-00000.jsonl", rows)
    save_file(WEIGHTS, run.records / "gradients.safetensors")
    held = {"parameter_bytes": 32, "moment_bytes": 48}
    known = {
        "ranks": [held, held],
        "placements": [],
        "parameters": {name: {"shape": [3, 2], "itemsize": 4, "is_trainable": True} for name in ("a", "b")},
        "frozen": {"d": "0"},
        "has_relu": False,
        "dropout": [{"step": 2, "rank": 0, "micro_batch": 0, "loss": 1.0, "plain_loss": 2.0, "mask": [True]}],
        "random": ["0", "1"],
        "wrong_modes": [],
        "num_forwards": {"training": 4, "evaluation": 1},
    }
    for record in ("loaded", "saved-2", "saved-4", "trained"):
        save_file({f"model.{name}": weight for name, weight in WEIGHTS.items()}, run.records / f"{record}.safetensors")
        change_record(run, record, **known | about)
    return run


def change_record(run: WatchedRun, name: str, **about) -> None:
    path = run.records / f"{name}.json"
    path.write_text(json.dumps((run.about(name) if path.exists() else {}) | about))


def change_line(run: WatchedRun, step: int, **figures) -> None:
    lines = run.lines("train") + run.lines("eval", needed=False)
    changed = [line | figures if line["kind"] == "train" and line["step"] == step else line for line in lines]
    save_jsonl(run.folder / "metrics.jsonl", changed)


def test_a_loss_may_differ_by_the_tolerance_and_one_that_is_finite_on_no_side_proves_nothing(tmp_path):
    one, two = watched(tmp_path, "one"), watched(tmp_path, "two")
    for loss, detail in ((3.0 + 2e-5, ""), *((wrong, "largest in loss of step 2") for wrong in (3.0 + 4e-5, float("nan"), None))):
        change_line(two, 2, loss=loss)
        proof = checks.compare_figures(one, two, "loss", "router_aux_loss", tolerance=1e-5)
        assert (proof.passed, proof.detail) == (not detail, detail)
    change_line(two, 2, loss=3.0)
    for run in (one, two):
        change_line(run, 4, loss=None, loss_is="nan", grad_norm=None, grad_norm_is="nan")
    for proof in (checks.compare_figures(one, two, "loss", tolerance=1e-5), checks.compare_gradients(one, two, 1e-5)):
        assert not proof.passed and "step 4" in proof.detail


def test_a_gradient_of_rounding_errors_is_compared_with_the_others_and_a_relu_may_open_in_one_run_only(tmp_path):
    one, two = watched(tmp_path, "one"), watched(tmp_path, "two")
    for value, detail in ((-3e-9, ""), (1e-5, "largest in b")):
        save_file(WEIGHTS | {"b": np.array([value])}, two.records / "gradients.safetensors")
        proof = checks.compare_gradients(one, two, 1e-5)
        assert (proof.passed, proof.detail) == (not detail, detail)
    save_file(WEIGHTS, two.records / "gradients.safetensors")
    change_record(one, "loaded", has_relu=True)
    for norm, detail in ((1.0 + 3.5e-5, ""), (1.02, "largest in grad_norm of step 2")):
        change_line(two, 2, grad_norm=norm)
        proof = checks.compare_gradients(one, two, 1e-5)
        assert (proof.passed, proof.detail, proof.tolerance) == (not detail, detail, 0.01) and "(with ReLU)" in proof.compared


def test_a_gradient_that_is_zero_at_first_is_compared_in_the_next_step(tmp_path):
    one, two = watched(tmp_path, "one"), watched(tmp_path, "two")
    assert checks.compare_late_gradients(one, two) is None
    for run in (one, two):
        save_file(WEIGHTS | {"b": np.zeros(1)}, run.records / "gradients.safetensors")
        save_file({"b": np.ones(1)}, run.records / "late_gradients.safetensors")
    for late, detail in ((1.0, ""), (1.02, "largest in b")):
        save_file({"b": np.full(1, late)}, two.records / "late_gradients.safetensors")
        proof = checks.compare_late_gradients(one, two)
        assert (proof.passed, proof.detail) == (not detail, detail)
    (two.records / "late_gradients.safetensors").unlink()
    with pytest.raises(NotReached):
        checks.compare_late_gradients(one, two)


def test_a_rank_holds_its_shard_only_and_what_did_not_move_or_changed_is_named(tmp_path):
    run = watched(tmp_path, "run")
    for parameter_bytes, moment_bytes, detail in (
        (32, 48, ""),  # two of three rows of each of two tensors
        (48, 48, "a rank holds 100% of the parameters"),
        (32, 96, "a rank holds 100% of the moments"),
    ):
        ranks = [{"parameter_bytes": held, "moment_bytes": moment_bytes} for held in (16, parameter_bytes)]
        change_record(run, "saved-2", ranks=ranks)
        proof = checks.check_shards(run, "adamw")
        assert (proof.passed, proof.detail) == (not detail, detail)
    assert checks.check_moved(run).detail == "model.a has not moved, and 1 more"
    change_record(run, "trained", frozen={"d": "1"})
    assert checks.check_frozen(run, True).detail == "d has changed"


def test_a_resume_is_exact_to_the_last_bit(tmp_path):
    whole, resumed = (watched(tmp_path, name) for name in ("whole", "resumed"))
    assert checks.compare_resumed(whole, resumed).detail == "steps [1, 2, 3, 4] were logged"
    save_jsonl(resumed.folder / "metrics.jsonl", whole.lines("train")[2:])
    assert checks.compare_resumed(whole, resumed).passed
    assert "dropout changes nothing" not in checks.compare_resumed(whole, resumed).compared
    nearly = {f"model.{name}": np.nextafter(weight, 9) for name, weight in WEIGHTS.items()}
    save_file(nearly, resumed.records / "saved-4.safetensors")
    assert checks.compare_resumed(whole, resumed).detail == "model.a differs, and 1 more"
    change_line(resumed, 4, loss=float(np.nextafter(1.0, 2)))
    assert checks.compare_resumed(whole, resumed).detail == "loss of step 4 differs"
    change_record(resumed, "loaded", random=["0", "0"])
    assert checks.compare_loaded(whole, resumed).detail == "rank 1 has another random state"
    change_record(whole, "trained", dropout=[])
    assert "dropout changes nothing" in checks.compare_resumed(whole, resumed).compared


def test_a_run_that_ended_early_fails_and_its_checks_are_not_reached(tmp_path):
    names = ("reference", "ddp", "preset-0", "resharded", "dropout", "resumed", "resumed-again")
    runs = {name: watched(tmp_path, name) for name in names}
    runs["preset-0"] = replace(runs["preset-0"], failure="disk full")
    runs["resharded"] = replace(runs["resharded"], failure="")
    for left in ("trained.json", "trained.safetensors", "saved-4.json", "saved-4.safetensors"):
        (runs["preset-0"].records / left).unlink()
    for left in (*runs["resharded"].folder.iterdir(), *runs["resharded"].records.iterdir()):
        left.unlink()
    (runs["ddp"].records / "gradients.safetensors").unlink()  # of a run that ended well
    proofs = checks.check_all(runs, 1e-5, OptimConfig(), expects_frozen=True)
    of_preset = {proof.check: proof for proof in proofs if proof.compared == "preset-0"}
    assert (of_preset["run"].is_reached, of_preset["run"].detail) == (True, "disk full")
    assert not of_preset["moved"].is_reached and not of_preset["frozen"].is_reached
    assert {proof.check for proof in proofs if proof.compared == "resharded"} == {
        "rows", "loss", "evaluation", "modes", "save",
    }  # fmt: skip
    assert not any(proof.passed for proof in proofs if proof.compared in ("preset-0", "resharded"))
    (of_ddp,) = (proof for proof in proofs if (proof.compared, proof.check) == ("ddp", "gradients"))
    assert of_ddp.is_reached and not of_ddp.passed


def test_the_command_takes_a_list_of_presets_and_flags_of_the_recipe_and_exits_1_where_a_check_fails(monkeypatch):
    called = Mock(return_value=False)
    monkeypatch.setattr("toolkit.tools.verify.verify.verify", called)
    assert call_toolkit("verify", "--model", "m", "--presets", "a,b", "--adapter.method", "lora") == 1
    assert called.call_args.args == (["--adapter.method", "lora"],)
    assert called.call_args.kwargs.items() >= {"model": "m", "presets": ["a", "b"]}.items()


@pytest.mark.parametrize(
    ("settings", "arguments", "sentence"),
    [
        ({"num_processes": 1}, [], "--num-processes is 1, but verify compares several"),
        ({"sharded": True}, [], "--num-processes is 2, but verify compares them with one fewer, as --sharded asks: give 3"),
        ({"presets": ["single"]}, [], "--presets names single, which has one process"),
        ({"presets": ["fsdp2_cpu", "fsdp1_hybrid_shard"]}, [], "names fsdp1_hybrid_shard, which cannot run here: .*HYBRID_SHARD"),
        ({"presets": ["fsdp2_fp8"]}, [], "names fsdp2_fp8, whose float8"),
        ({}, ["--optim.lrr", "1"], "optim.lrr"),
        ({}, ["--model.name_or_path=llama"], "give the model as --model"),
        ({}, ["--model.attn_implementation", "flash_attention_2"], "fp32.*: add --model.attn_implementation null"),
        ({"output": "taken"}, [], "not from an earlier verify"),
        ({"output": "taken/thesis.tex/below"}, [], "cannot be written .Not a directory"),
    ],
)
def test_mistakes_are_reported_before_any_run(tmp_path, settings, arguments, sentence):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").touch()
    settings = {"num_processes": 2, **settings, "output": tmp_path / settings.get("output", "output")}
    assert re.search(sentence, refusal(verify, arguments, use_cpu=True, launch=Mock(side_effect=AssertionError), **settings))


def test_checkpoints_that_no_later_run_loads_are_dropped(tmp_path):
    box = build_box([], presets=["fsdp2_cpu"], num_processes=2, use_cpu=True, output=tmp_path)
    kept: list[list[str]] = []

    def launch(preset: Path, command: list[str], log: Path) -> int:
        kept.append(sorted(folder.parent.name for folder in (tmp_path / "runs").glob("*/checkpoints")))
        (tmp_path / "runs" / preset.stem / "checkpoints").mkdir(parents=True)
        return 0

    list(launch_all(box, plan_runs(box), launch, launch))
    assert kept == [[], [], [], ["preset-0"], [], ["dropout"], ["dropout", "resumed"], ["dropout"]]


def test_only_an_optimizer_whose_step_does_not_shrink_with_the_gradient_has_a_largest_rate(tmp_path, monkeypatch):
    def rate(name: str) -> float:
        box = build_box([f"--optim.name={name}", "--optim.lr=0.5"], num_processes=2, use_cpu=True, output=tmp_path)
        return plan_runs(box)["reference"].flags["optim.lr"]

    assert {rate(name) for name in OPTIMIZERS} == {1e-4}
    sgd = SimpleNamespace(DEFAULTS={}, write_out=lambda _, weight, gradient, state, step, lr, weight_decay: (-lr * gradient, {}))
    monkeypatch.setitem(OPTIMIZERS, "lion", sgd)
    assert rate("lion") == 0.5


def test_a_model_that_no_process_holds_is_run_sharded_only(tmp_path):
    presets = ["fsdp2_cpu", "fsdp1_full_shard"]
    plans = plan_runs(build_box([], presets=presets, num_processes=3, use_cpu=True, sharded=True, output=tmp_path))
    few = {"reference": 2, "resharded": 2}
    assert {name: plan.num_shards for name, plan in plans.items()} == {name: few.get(name, 3) for name in plans}
    assert set(plans) == {*few, "preset-0", "preset-1", "dropout", "resumed", "resumed-again"}


def test_each_preset_that_recomputes_as_itself_or_the_config_asks_is_run_once_more_without(tmp_path):
    """Under both names of the key that accelerate takes; the run with dropout of the first preset is there already."""
    preset = (REPOSITORY / "accelerate_configs" / "fsdp2_activation_checkpointing.yaml").read_text()
    (tmp_path / "short.yaml").write_text(preset.replace("fsdp_activation_checkpointing", "activation_checkpointing"))
    of_preset = ["fsdp2_activation_checkpointing", "fsdp2_cpu", str(tmp_path / "short.yaml")]
    of_config, key = ["fsdp2_cpu", "ddp_cpu"], "train.activation_checkpointing"
    for presets, flags, place in ((of_preset, [], 2), (of_config, [f"--{key}=selective"], 1)):
        plans = plan_runs(build_box(flags, presets=presets, num_processes=2, use_cpu=True, output=tmp_path))
        assert list(plans)[-3:] == ["kept-0", f"recomputed-{place}", f"kept-{place}"]
        for recomputed, kept in (("dropout", "kept-0"), (f"recomputed-{place}", f"kept-{place}")):
            one, other = plans[recomputed], plans[kept]
            own = {name: other.flags[name] for name in ("eval.at_start", "eval.every_steps")} | {"run.name": kept}
            assert one.flags["model.dropout"] > 0 and key not in one.flags
            if presets is of_config:
                assert other.flags == one.flags | own | {key: "none"} and other.mapping == one.mapping
                continue
            assert other.flags == one.flags | own
            (changed,) = one.mapping["fsdp_config"].items() - other.mapping["fsdp_config"].items()
            assert changed[0].endswith("activation_checkpointing") and changed[1] is True
            assert other.mapping | {"fsdp_config": None} == one.mapping | {"fsdp_config": None}


@pytest.mark.parametrize(("precision", "is_exact"), [("no", True), ("bf16", False)])
def test_a_run_in_fp32_takes_attention_that_adds_in_a_fixed_order(monkeypatch, precision, is_exact):
    """`warn_only` leaves the memory-efficient kernel its split backward: two equal runs on a GPU differed in their last bits."""
    monkeypatch.setattr(os, "environ", {"ACCELERATE_MIXED_PRECISION": precision})
    switches = {name: getattr(torch.backends.cuda, f"enable_{name}_sdp") for name in ("flash", "mem_efficient", "cudnn", "math")}
    is_on = {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled") for name in switches}
    query = torch.ones(1, 2, 8, 16)
    assert torch._fused_sdp_choice(query, query, query) == SDPBackend.FLASH_ATTENTION.value
    try:
        take_exact_kernels()
        assert [name for name in switches if is_on[name]()] == (["math"] if is_exact else list(switches))
        assert (torch._fused_sdp_choice(query, query, query) == SDPBackend.MATH.value) == is_exact
        assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        if is_exact:
            model = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa", is_encoder_decoder=True))
            said = describe_attention(model, torch.device("cuda"), torch.float32, packing=False)
            assert said == "sdpa, torch's math kernel"
    finally:
        torch.use_deterministic_algorithms(False)
        for switch in switches.values():
            switch(True)


def test_the_first_line_says_which_kernels_are_compared(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr("toolkit.tools.verify.verify.launch_all", Mock(side_effect=InterruptedError))
    on_gpus = "8 processes on GPUs, fp32 (products in ieee precision, attention by torch's math kernel): 8 runs"
    for use_cpu, said in ((False, on_gpus), (True, "2 processes on the CPU, fp32: 8 runs")):
        with pytest.raises(InterruptedError):
            verify([], use_cpu=use_cpu, output=tmp_path / "output")
        assert said in capsys.readouterr().out
