"""Ranks that were started differently end with one sentence, before weights load."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.launch import LaunchResult, run_on_ranks, start
from tests.support.workbench import FP32, RECIPE, Workbench, new_bench

DIFFERENTLY = """
import json, os, runpy, sys

changes = json.loads(sys.argv[1]).get(os.environ["RANK"], {})
os.environ.update(changes.get("env", {}))
sys.argv = [*sys.argv[2:], *changes.get("flags", [])]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""First argument: flags and environment variables of single ranks. Then: a recipe and its flags."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return new_bench(tmp_path_factory, "same-run")


def run_with(bench: Workbench, *, preset: str = "fsdp2_cpu", **of_rank_1: Any) -> LaunchResult:
    script = bench.runs / "differently.py"
    script.write_text(DIFFERENTLY)
    arguments = [json.dumps({"1": of_rank_1}), str(RECIPE), *bench.flags("run", train__max_steps=1)]
    with start(script, arguments, preset=preset, overrides=FP32) as running:
        return running.wait()


def refused_for(result: LaunchResult, bench: Workbench) -> str:
    """The sentence of a run that both ranks refuse before it writes anything."""
    assert not (bench.runs / "run" / "config.yaml").exists()
    return result.refusal()


def test_what_ended_in_a_hang_is_refused(bench: Workbench) -> None:
    flags = ["--train.global_batch_size_rows=6", "--eval.every_steps=1", "--checkpoint.every_steps=1"]
    host = os.uname().nodename
    assert refused_for(run_with(bench, flags=flags), bench) == (
        f"train.global_batch_size_rows is 6 on rank 1 ({host}), but 8 on rank 0 ({host}); eval.every_steps, "
        "checkpoint.every_steps differ too: start all ranks with the same command, configs, files and versions"
    )


def test_a_flag_of_the_launcher_is_compared_too(bench: Workbench) -> None:
    sentence = refused_for(run_with(bench, env={"FSDP_RESHARD_AFTER_FORWARD": "false"}), bench)
    assert sentence.startswith("FSDP_RESHARD_AFTER_FORWARD is 'false' on rank 1 ")


def test_other_weights_of_the_same_shape_are_refused(bench: Workbench) -> None:
    other = bench.runs / "elsewhere" / "t5"
    shutil.copytree(bench.models["t5"], other)
    flags = [f"--model.name_or_path={other}", "--run.num_threads=1"]
    assert run_with(bench, flags=flags).returncodes == [0, 0]  # a copy in another place is the same model
    shutil.rmtree(bench.runs / "run")
    weights = other / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    sentence = refused_for(run_with(bench, flags=flags), bench)
    assert sentence.startswith(f"model.safetensors of model.name_or_path is '{len(content):,} bytes with the hash ")


def test_ranks_of_one_machine_with_caches_of_their_own_are_refused(bench: Workbench) -> None:
    elsewhere = bench.runs / "another cache"
    sentence = refused_for(run_with(bench, flags=[f"--data.cache_dir={elsewhere}"]), bench)
    assert sentence.startswith(f"rank 1 cannot read the tokens in {elsewhere}/")
    assert sentence.endswith(", which the first rank of its machine can: give both the same data.cache_dir or HF_HOME")


def test_each_kind_of_difference_has_its_name(bench: Workbench, tmp_path: Path) -> None:
    places = []
    for rank in range(2):
        folder = tmp_path / str(rank)
        shutil.copytree(bench.models["t5"], folder / "model")
        (folder / "metric").mkdir()
        for name in ("source.py", "template.jinja", "metric/metric.py", "model/tokenizer_config.json"):
            (folder / name).write_text(f'"{rank}"')
        for name, content in {"same/metric.py": "", "marian/source.spm": str(rank)}.items():
            (folder / name).parent.mkdir()
            (folder / name).write_text(content)
        places.append(folder)
    names = run_on_ranks(_names_of_differences, preset="ddp_cpu", args=(places,))
    assert names[0] == names[1] == [
        "train.seed is 1", "model.dropout is 0.5", "optim.weight_decay is 0.1", "optim.max_grad_norm is None",
        "optim.label_smoothing is 0.1", "the file of data.source", "metric.py of eval.metrics",
        "tokenizer_config.json of model.name_or_path", "tokenizer_config.json of model.init_from",
        "source.spm of model.init_from", "metric.py of eval.metrics", "tokenizer_config.json of model.init_from",
        "the version of torch is '2'", "the code of the toolkit", "data.files is ['s3://***@bucket/1.jsonl']",
        "fsdp_config of the accelerate YAML is {'a': 1, 'b': 3}", "", "", "",
    ]  # fmt: skip


def _names_of_differences(places: list[Path]) -> list[str]:
    """What each case's sentence begins with; empty where ranks may differ so. Collective."""
    from toolkit.config.schema import CheckpointConfig, DataConfig, ModelConfig, RunConfig, SummarizationConfig
    from toolkit.distributed.comm import rank
    from toolkit.errors import UserError
    from toolkit.launch import rank_consistency
    from toolkit.launch.accelerator import build_accelerator

    build_accelerator()
    here = places[rank()]
    plain = SummarizationConfig(model=ModelConfig(name_or_path="t5-small"), data=DataConfig())

    def changed(section: str, **fields: Any) -> SummarizationConfig:
        return dataclasses.replace(plain, **{section: dataclasses.replace(getattr(plain, section), **fields)})

    of_rank_1: list[dict[str, Any]] = [
        {"section": "train", "seed": 1},
        {"section": "model", "dropout": 0.5},
        {"section": "optim", "weight_decay": 0.1},
        {"section": "optim", "max_grad_norm": None},
        {"section": "optim", "label_smoothing": 0.1},
    ]
    cases: list[Callable[[], dict[str, Any]]] = [
        lambda case=case: rank_consistency.describe_config(changed(**case) if rank() else plain) for case in of_rank_1
    ]
    of_both = [
        {"section": "data", "source": f"{here}/source.py:rows"},
        {"section": "eval", "metrics": [f"{here}/metric"]},
        {"section": "model", "name_or_path": f"{here}/model"},
        {"section": "model", "init_from": f"{here}/model"},
        {"section": "model", "init_from": f"{here}/marian"},
        {"section": "eval", "metrics": [f"{here}/metric", f"{here}/same"]},  # files of one name
    ]
    cases += [lambda case=case: rank_consistency.describe_config(changed(**case)) for case in of_both]
    twice = dataclasses.replace(changed("model", init_from=f"{here}/model"), checkpoint=CheckpointConfig(resume=f"{here}/model"))
    cases.append(lambda: rank_consistency.describe_config(twice))
    version, code = ({"torch": str(2 + 1 - rank())}, here)

    def versions() -> dict[str, Any]:
        with patch("importlib.metadata.version", version.get):
            return rank_consistency.describe_launch({})

    def toolkit_code() -> dict[str, Any]:
        with patch.object(rank_consistency, "__file__", str(code / "launch" / "rank_consistency.py")):
            return rank_consistency.describe_launch({})

    cases += [versions, toolkit_code]
    secret = f"s3://key:word@bucket/{rank()}.jsonl"  # a user and a password
    cases.append(lambda: rank_consistency.describe_config(changed("data", source="jsonl", files=[secret])))
    cases.append(lambda: {"fsdp_config of the accelerate YAML": {"a": 1, "b": 2 + rank()}})
    # What may differ: also the order of keys in the accelerate YAML.
    cases.append(lambda: rank_consistency.describe_config(dataclasses.replace(plain, run=RunConfig(num_threads=1 + rank()))))
    cases.append(lambda: rank_consistency.describe_config(changed("run", output_dir=str(here))))
    pairs: list[tuple[str, Any]] = [("a", 1), ("b", {"c": 2, "d": 3}), ("b", {"d": 3, "c": 2})]
    cases.append(lambda: dict(pairs[2::-2] if rank() else pairs[:2]))
    names = []
    for describe in cases:
        try:
            rank_consistency.compare_ranks(describe())
            names.append("")
        except UserError as error:
            name, _, value = str(error).partition(" is ")
            value = value.partition(" on rank ")[0]
            names.append(f"{name} is {value}" if "hash" not in value and "code" not in name else name)
    return names
