"""`export` writes any checkpoint of a run as the run itself would have, and only reads the run folder."""

import contextlib
import io
import json
import os
import re
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

from tests.recipes.test_best_weights import WORSENING
from tests.support.hub_server import hub_server
from tests.support.launch import REPOSITORY, run_on_ranks, start
from tests.support.locks import lock_held
from tests.support.small_run import run_in_this_process
from tests.support.workbench import FP32, call_toolkit, leave_launch, output_of, step_name

FROZEN = re.compile(r"encoder\.block\.0\..*")


def call_all(commands: list[list[str]]) -> list[tuple[int, str, str]]:
    """In one process that no launcher started, one command after the other: exit status, stdout and stderr."""
    leave_launch()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    ended = []
    for command in commands:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = call_toolkit(*command)
        ended.append((code, out.getvalue(), err.getvalue()))
    return ended


def export(*commands: list) -> list[tuple[int, str, str]]:
    words = [["export", *map(str, command)] for command in commands]
    return run_on_ranks(call_all, preset="single", overrides=FP32, args=(words,))[0]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def state_of(run: Path) -> dict[str, tuple[int, int]]:
    """Size and time of each file of a run but its exports."""
    paths = [path for path in run.rglob("*") if path.is_file() and not path.relative_to(run).parts[0].startswith("export-")]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}


@pytest.fixture(scope="module")
def run(bench) -> Path:
    """A run that gets worse from step to step, with a frozen block; its rows and caches are gone."""
    rows = Path(shutil.copy(bench.data / bench.rows, bench.runs))
    cache = bench.runs / "cache"
    more = {"checkpoint__every_steps": 1, "checkpoint__keep_last": 5, "eval__generate": True}
    more |= {"export__weights": "last", "eval__early_stopping_patience": None, "data__prefix": "sum: "}
    changes = WORSENING | more | {"model__freeze": [FROZEN.pattern]}
    bench.run("run", data__files=rows, data__cache_dir=cache, **changes)
    rows.unlink()
    shutil.rmtree(cache)
    return bench.runs / "run"


def print_pushing_run(url: str, flags: list[str]) -> str:
    """On a rank, whose client finds this hub (it reads its endpoint when it is imported): what a run printed."""
    from huggingface_hub import constants

    os.environ["HF_TOKEN"] = "hf_good"
    hub = {"ENDPOINT": url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
    with patch.multiple(constants, **hub), output_of() as printed:
        run_in_this_process("t5", flags)
    return printed[0]


def test_a_run_whose_upload_fails_ends_well(bench):
    """Uploads are in `tests/unit/tools/test_export.py`."""
    flags = bench.flags("pushed", train__max_steps=1, export__push_to_hub="mine/pushed", eval__generate=False)
    with hub_server() as hub:
        hub.fails_at = "/commit/"
        printed = "".join(run_on_ranks(print_pushing_run, preset="fsdp2_cpu", overrides=FP32, args=(hub.url, flags)))
    assert f"the export will be uploaded to {hub.url}/mine/pushed, which is private\n" in printed
    assert f"type hf upload mine/pushed {bench.runs}/pushed/export --private\n" in printed and "share it" not in printed
    assert "hf_good" not in printed
    assert not hub.repositories["mine/pushed"] and hub.private == {"mine/pushed"}


def test_any_checkpoint_is_exported_as_the_run_would_have(run, tmp_path):
    import torch
    from safetensors.torch import load_file

    steps = sorted(int(folder.name.removeprefix("step-")) for folder in (run / "checkpoints").iterdir())
    assert steps == [1, 2, 3, 4, 5]
    places = [tmp_path / name for name in ("best", "one", "bf16", "fp16")]
    options = [("--checkpoint", "best"), ("--checkpoint", "1"), ("--dtype", "bfloat16"), ("--dtype", "float16")]
    with lock_held(run / ".lock"):  # as by a run that trains in it
        before = state_of(run)
        default, best, one, bf16, fp16 = export(
            [run], *([run, *of, "--to", place] for of, place in zip(options, places, strict=True))
        )
    assert [ended[0] for ended in (default, best, one, bf16, fp16)] == [0] * 5, (default, best, one, bf16, fp16)
    assert state_of(run) == before
    # The last one, without rows: every file is that of the run's own export.
    assert contents(run / "export-5") == contents(run / "export")
    assert "exporting the weights of step 5, the newest valid checkpoint\n" in default[1]
    assert f"exported to {run}/export-5\nuse it: python -m toolkit generate {run}/export-5 --file " in default[1]
    assert "vllm" not in default[1] and f"share it: hf upload USER/NAME {run}/export-5\n" in default[1]
    card = (run / "export" / "README.md").read_text()
    assert all(f"\n| {name} |" in card for name in ("training rows | 52", "lead sentence", "before training", "these weights"))
    # Another one.
    weights = {name: load_file(folder / "model.safetensors") for name, folder in zip("abcd", places, strict=True)}
    last = load_file(run / "export" / "model.safetensors")
    assert contents(places[0]) == contents(places[1]) and "exporting the weights of step 1, the best loss (" in best[1]
    assert {name for name in last if torch.equal(weights["a"][name], last[name])} == {name for name in last if FROZEN.match(name)}
    assert json.loads((places[0] / "toolkit.json").read_text())["step"] == 1
    # In another dtype.
    assert weights["c"].keys() == last.keys()
    assert all(torch.equal(weights["c"][name], last[name].to(torch.bfloat16)) for name in last)
    in_fp32 = {name for name, weight in weights["d"].items() if weight.dtype == torch.float32}
    assert in_fp32 == {name for name in last if ".wo." in name}
    assert all(torch.equal(weights["d"][name], last[name].half()) for name in last if name not in in_fp32)
    assert all(torch.equal(weights["d"][name], last[name]) for name in in_fp32)
    about = json.loads((places[2] / "toolkit.json").read_text())
    assert (about["weights_dtype"], about["dtype"], about["prefix"]) == ("bfloat16", "float32", "sum: ")
    assert json.loads((places[2] / "config.json").read_text())["dtype"] == "bfloat16"
    assert "Weights in bfloat16, after step 5." in (places[2] / "README.md").read_text()
    assert "\nrounded " in bf16[1] and " weights, each by at most " in bf16[1]


def test_two_processes_export_what_one_does(run, tmp_path):
    command = ["export", str(run), "--checkpoint", step_name(4), "--to", str(tmp_path / "two")]
    with start(REPOSITORY / "toolkit" / "__main__.py", command, preset="fsdp2_cpu", overrides=FP32) as running:
        result = running.wait()
    assert result.returncodes == [0, 0], result.stderr[-3000:]
    assert "it/s" not in result.stderr, "a progress bar without a terminal"
    [(code, out, err)] = export([run, "--checkpoint", "4", "--to", tmp_path / "one"])
    assert code == 0 and contents(tmp_path / "one") == contents(tmp_path / "two"), err
    # One of them that cannot: one sentence, on both.
    with start(REPOSITORY / "toolkit" / "__main__.py", command, preset="fsdp2_cpu", overrides=FP32) as running:
        sentence = f"{tmp_path / 'two'} is there and not empty: remove it, or give another folder as --to"
        assert running.wait().refusal().startswith(sentence)
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_what_cannot_be_exported_is_one_sentence(run, tmp_path):
    other = tmp_path / "run"
    shutil.copytree(run, other)
    damaged = next((other / "checkpoints" / step_name(2) / "state").glob("*.distcp"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    (tmp_path / "nothing").mkdir()
    shutil.copytree(run, tmp_path / "empty", ignore=shutil.ignore_patterns("checkpoints"))
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    config = (moved / "config.yaml").read_text()
    (moved / "config.yaml").write_text(config.replace("/t5\n", "/t6\n"))
    base = Path(yaml.safe_load(config)["model"]["name_or_path"])
    changed = tmp_path / "base"
    shutil.copytree(moved / base, changed)
    content = (changed / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    (changed / "model.safetensors").write_bytes(content[:header] + bytes(len(content) - header))
    cases = [
        ([tmp_path / "nothing"], f"{tmp_path}/nothing has no config.yaml: give the folder of a run"),
        ([tmp_path / "empty"], f"{tmp_path}/empty holds no checkpoint: let the run reach its first one"),
        ([run, "--checkpoint", "17"], "--checkpoint is 17: give best, last or one of the steps 1, 2, 3, 4, 5"),
        ([other, "--checkpoint", "2"], "step-00000002 cannot be exported: step-00000002/state/__"),
        ([run, "--to", tmp_path / "link"], f"{tmp_path}/link is a link"),
        ([moved, "--to", tmp_path / "a"], "t6 is not a folder here: give an existing folder or a hub id"),
        ([run, "--to", tmp_path / "a", f"--model.name_or_path={changed}"], f"the frozen base weights are not those {run}"),
        ([run, "--optim.lr", "1"], "optim.lr is not a setting of an export: of the run's, give one of model.name_or_path, "),
    ]
    for (arguments, sentence), (code, _, err) in zip(cases, export(*(arguments for arguments, _ in cases)), strict=True):
        assert code == 2 and "Traceback" not in err, (arguments, err)
        assert err.startswith("error: ") and sentence in err and err.count("\n") == 1, (arguments, err)


def test_adapters_and_merged_models_are_those_of_the_run(llm_bench, tmp_path):
    """Of a run in bf16, whose base is stored in bf16, and other versions."""
    import torch
    from safetensors.torch import load_file

    lora = {"adapter__method": "lora", "adapter__rank": 4, "optim__lr": 1e-2, "export__merge": True, "eval__generate": False}
    llm_bench.run("lora", overrides={"mixed_precision": "bf16"}, **lora)
    run = llm_bench.runs / "lora"
    record = json.loads((run / "record.json").read_text())
    (run / "record.json").write_text(json.dumps(record | {"versions": {"torch": "1.0"}}))
    places = [tmp_path / name for name in ("merged", "fp32")]
    adapter, merged, fp32 = export(
        [run],
        [run, "--merge", "--to", places[0]],
        [run, "--merge", "--dtype", "float32", "--to", places[1]],
    )
    assert [ended[0] for ended in (adapter, merged, fp32)] == [0] * 3, (adapter, merged, fp32)
    for mine, own in ((run / "export-3", run / "export"), (places[0], run / "merged")):
        found, expected = contents(mine), contents(own)
        assert found.pop("README.md") == re.sub(rb"\| torch \| \S+ \|", b"| torch | 1.0 |", expected.pop("README.md"))
        assert found == expected
    base = llm_bench.models["llama"]
    serve = f"serve it: vllm serve {base} --tokenizer {run}/export-3 --enable-lora --lora-modules lora={run}/export-3\n"
    assert serve in adapter[1] and f"serve it: vllm serve {places[0]}\n" in merged[1]
    # Merged without rounding. An adapter in bf16 is in `tests/unit/export/test_lora.py`.
    rounded, exact = (load_file(place / "model.safetensors") for place in places)
    assert {weight.dtype for weight in rounded.values()} == {torch.bfloat16}
    assert {weight.dtype for weight in exact.values()} == {torch.float32}
    assert all(torch.equal(exact[name].bfloat16(), rounded[name]) for name in exact)
    assert any(not torch.equal(exact[name], rounded[name].float()) for name in exact)
    assert "library_name: peft\n" in (run / "export" / "README.md").read_text()


def test_what_happens_meanwhile_is_named(run, tmp_path, monkeypatch):
    import torch

    from toolkit.errors import UserError
    from toolkit.tools import export as command

    def fill(*_) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")

    with pytest.raises(UserError, match=f"^{tmp_path}/gone was removed meanwhile, as by a run that keeps its newest ones: give"):
        command.read_whole(tmp_path / "gone")
    monkeypatch.setattr(command, "_export", fill)
    with pytest.raises(
        UserError, match=r"^the model does not fit this device \(CUDA out .* 2.00 GiB.\): set ACCELERATE_USE_CPU="
    ):
        given = dict.fromkeys(("checkpoint", "dtype", "to", "push_to_hub"))
        command.export([], run_folder=run, merge=False, private=False, **given)
