"""The command's name in its help; a standard output that fails: a full disk is one sentence, an early end is none; `init`, and
where recipes and presets are looked up. `train`: the preset that fits the GPUs, and the line that starts the run."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.launch import REPOSITORY
from tests.support.refusals import refusal
from tests.support.report_runs import save_distinct_run
from toolkit.tools import train as command
from toolkit.tools.main import main
from toolkit.tools.preset_runs import find_preset
from toolkit.tools.recipes import SHIPPED, find_recipe, find_shipped, init

FULL = "error: standard output cannot be written (No space left on device): make room there, or print to another place\n"


CHECK = "-m toolkit check accelerate_configs/ddp_cpu.yaml"
CHECKPOINTS = "-m toolkit checkpoints RUN"


@pytest.mark.parametrize("words", [CHECK, CHECKPOINTS, "-m toolkit report --text RUN", f"-u {CHECKPOINTS}"])
@pytest.mark.parametrize(("where", "expected"), [("full disk", (2, FULL)), ("closed pipe", (0, ""))])
def test_a_standard_output_that_fails(tmp_path, words, where, expected):
    run = save_distinct_run(tmp_path / "run")
    reading, output = os.pipe() if where == "closed pipe" else (0, os.open("/dev/full", os.O_WRONLY))
    if reading:
        os.close(reading)
    program = [sys.executable, *words.replace("RUN", str(run)).split()]
    done = subprocess.run(program, stdout=output, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY, timeout=600)
    os.close(output)
    assert (done.returncode, done.stderr) == expected


def test_it_starts_without_torch():
    code = "import sys, toolkit.tools.main, toolkit.checkpoint.find; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0


@pytest.mark.parametrize(
    ("started", "name"), [("/env/bin/shardtune", "shardtune"), ("/toolkit/__main__.py", "python -m toolkit")]
)
def test_the_help_names_the_command_as_it_was_started(started, name, monkeypatch, capsys):
    for words in ([], ["train"]):
        monkeypatch.setattr(sys, "argv", [started, *words, "--help"])
        with pytest.raises(SystemExit):
            main()
        assert capsys.readouterr().out.startswith(" ".join(["usage:", name, *words]))


def test_a_projects_own_file_comes_first_and_else_the_toolkits_and_nothing_is_written_over(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    assert refusal(init, tmp_path / "file", "t5").endswith("file cannot be made a project (Not a directory): name another folder")
    (tmp_path / "recipes").symlink_to(tmp_path / "gone")
    assert refusal(init, tmp_path, "t5").endswith("recipes exists already: name another folder, or remove it")
    (tmp_path / "recipes").unlink()
    monkeypatch.chdir(tmp_path)
    init(tmp_path, "t5")
    assert find_shipped("recipes", "t5.py") == tmp_path / "recipes" / "t5.py"
    assert find_shipped("recipes", "llm.py") == SHIPPED / "recipes" / "llm.py"
    (tmp_path / "accelerate_configs" / "ddp.yaml").unlink()
    assert find_preset("single") == tmp_path / "accelerate_configs" / "single.yaml"
    assert find_preset("ddp") == SHIPPED / "accelerate_configs" / "ddp.yaml"


GIB = 2**30
CONFIG = "data: {source: csv, files: rows.csv}\ntrain: {max_steps: 3, global_batch_size_rows: 8, micro_batch_size_rows: 1}\n"
RECIPES = REPOSITORY / "recipes"
PRESETS = REPOSITORY / "accelerate_configs"
T5 = {
    "model_type": "t5", "vocab_size": 512, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "d_kv": 8,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
SHARDED = ["ddp", "fsdp2_shard_grad_op", "fsdp2_full_shard"]
RECOMPUTED = [f"fsdp2_full_shard --train.activation_checkpointing={way}" for way in ("selective", "full")]


@pytest.fixture
def start(tmp_path, monkeypatch, capsys) -> Callable[..., list[str]]:
    """The printed lines of `train` with these GPUs, a T5 of this width, and these arguments."""

    def call(*arguments: str, gpus: tuple[float, ...] = (), d_model: int = 32, config: str = CONFIG) -> list[str]:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model/config.json").write_text(json.dumps({**T5, "d_model": d_model, "d_ff": 4 * d_model}))
        (tmp_path / "run.yaml").write_text(f"model: {{name_or_path: model, from_scratch: true}}\n{config}")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(total_memory=int(gpus[gpu] * GIB)))
        monkeypatch.setattr("sys.argv", ["toolkit", "train", "run.yaml", *arguments])
        main()
        return capsys.readouterr().out.splitlines()

    return call


@pytest.mark.parametrize(
    ("arguments", "gpus", "d_model", "planned", "ranks"),
    [
        ((), (16.0,), 32, ["single"], " --quiet"),
        ((), (16.0, 16.0), 32, ["ddp"], " --num_processes 2"),
        # The smallest GPU decides.
        ((), (16.0, 0.42), 1024, SHARDED, " --num_processes 2"),
        ((), (0.17, 0.17), 1024, [*SHARDED, *RECOMPUTED, "fsdp2_offload"], " --num_processes 2"),
        (("--preset", "single"), (16.0,) * 3, 32, [], " --quiet"),
        (("--preset", "fsdp2_cpu"), (16.0,) * 3, 32, [], ""),
        (("--preset", "fsdp2_hsdp"), (16.0,) * 3, 32, [], ""),
        (("--preset", "fsdp2_full_shard"), (16.0,) * 3, 32, [], " --num_processes 3"),
        (("--preset", "ddp", "--num-processes", "2"), (16.0,) * 3, 32, [], " --num_processes 2"),
    ],
)
def test_the_fastest_preset_that_fits_is_taken_or_without_a_plan_the_named_one(start, arguments, gpus, d_model, planned, ranks):
    *lines, line = start("--dry-run", *arguments, gpus=gpus, d_model=d_model)
    *refused, chosen = planned or arguments[1:2]
    fits = [f"preset {chosen} fits"] if planned else []
    assert [words.split(":")[0] for words in lines] == [*(f"preset {name} does not fit" for name in refused), *fits]
    assert line == f"accelerate launch --config_file {PRESETS}/{chosen}.yaml{ranks} {RECIPES}/t5.py --config run.yaml"


ONE = "--num-processes is 2, and {} starts one: leave it out, or name another preset by --preset"


@pytest.mark.parametrize(
    ("arguments", "gpus", "sentence"),
    [
        (("--num-processes", "2"), (), ONE.format(PRESETS / "single_cpu.yaml")),
        (("--num-processes", "2", "--preset", "single"), (16.0, 16.0), ONE.format(PRESETS / "single.yaml")),
        (("--optim.lr", "-1"), (16.0,), "--optim.lr is -1: give a number above 0"),  # before a plan
        ((), (0.01,), "no preset "),
    ],
)
def test_what_cannot_be_started_is_refused(start, arguments, gpus, sentence, capsys):
    with pytest.raises(SystemExit) as stop:
        start("--dry-run", *arguments, gpus=gpus, d_model=1024)
    assert stop.value.code == 2 and capsys.readouterr().err.splitlines()[-1].startswith(f"error: {sentence}")


def test_without_a_gpu_it_is_one_process_and_becomes_the_line_that_it_prints(start, monkeypatch):
    became: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda program, argv: became.append(argv))
    hint, line = start("--optim.lr", "1e-3")
    assert hint == "no GPU here: one process on the CPU; --preset fsdp2_cpu rehearses sharding on two"
    run = f"{RECIPES}/t5.py --config run.yaml --optim.lr 1e-3"
    assert line == f"accelerate launch --config_file {PRESETS}/single_cpu.yaml --quiet {run}"
    assert became[0][1:3] == ["-m", "accelerate.commands.launch"] and f"accelerate launch {' '.join(became[0][3:])}" == line


def test_a_run_yaml_names_its_recipe(start):
    start("--dry-run", config=f"recipe: t5\n{CONFIG}")
    argv = ["--config=run.yaml"]
    assert find_recipe(argv) == "t5" and find_recipe(argv, "llm") == "llm" and find_recipe([*argv, "--recipe=llm"]) == "llm"
    Path("run.yaml").write_text("recipe: t6\n")
    assert find_recipe(argv, "llm") == "llm"
    sentence = "recipe is t6: write t5 or llm or dpo or dpo_t5, or leave it out, and the model chooses"
    assert refusal(find_recipe, argv) == sentence


def test_another_precision_reaches_plan_and_launcher_and_a_dry_run_says_that_bf16_is_slow_here(start, monkeypatch, caplog):
    plans, build_plan = [], command.build_plan
    monkeypatch.setattr(command, "build_plan", lambda *given, **more: plans.append(build_plan(*given, **more)) or plans[-1])
    line = start("--dry-run", "--mixed_precision", "no", gpus=(16.0,))[-1]
    assert [plan.strategy.compute_dtype for plan in plans] == [torch.float32]
    assert line.startswith(f"accelerate launch --config_file {PRESETS}/single.yaml --quiet --mixed_precision no ")
    for has_bf16, num_lines in ((True, 0), (False, 1)):
        monkeypatch.setattr("toolkit.launch.environment.cpu_has_bf16", lambda has_bf16=has_bf16: has_bf16)
        start("--dry-run", "--mixed-precision", "bf16")
        assert caplog.text.count("mixed_precision is bf16, which this CPU emulates") == num_lines
