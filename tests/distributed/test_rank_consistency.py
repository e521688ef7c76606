"""Ranks that were started differently end with one sentence, before weights load."""

import dataclasses
import json
import os
import shutil
from collections.abc import Sequence
from unittest.mock import patch

from tests.support.launch import LaunchResult, run_on_ranks, start_on_ranks
from tests.support.refusals import refusal
from tests.support.small_run import run_in_this_process
from tests.support.workbench import FP32, Workbench
from toolkit.config.data import DataConfig
from toolkit.config.schema import ModelConfig, SummarizationConfig
from toolkit.distributed.comm import rank
from toolkit.launch import rank_consistency
from toolkit.launch.accelerator import build_accelerator


def run_with(bench: Workbench, flags: Sequence[str] = (), env: dict[str, str] | None = None) -> LaunchResult:
    """How a run ends whose rank 1 has these flags and environment variables too."""
    args = (bench.flags("run", train__max_steps=1), flags, env or {})
    with start_on_ranks(run_differently, preset="fsdp2_cpu", overrides=FP32, args=args) as running:
        return running.wait()


def run_differently(argv: list[str], flags: Sequence[str], env: dict[str, str]) -> None:
    if os.environ["RANK"] == "1":
        os.environ.update(env)
        argv = [*argv, *flags]
    run_in_this_process("t5", argv)


def refused_for(result: LaunchResult, bench: Workbench) -> str:
    """The sentence of a run that both ranks refuse before it writes anything."""
    assert not (bench.runs / "run" / "config.yaml").exists()
    return result.refusal()


def test_what_ended_in_a_hang_is_refused(bench):
    flags = ["--train.global_batch_size_rows=6", "--eval.every_steps=1", "--checkpoint.every_steps=1"]
    host = os.uname().nodename
    assert refused_for(run_with(bench, flags=flags), bench) == (
        f"train.global_batch_size_rows is 6 on rank 1 ({host}), but 8 on rank 0 ({host}); eval.every_steps, "
        "checkpoint.every_steps differ too: start all ranks with the same command, configs, files and versions"
    )


def test_a_flag_of_the_launcher_is_compared_too(bench):
    sentence = refused_for(run_with(bench, env={"FSDP_RESHARD_AFTER_FORWARD": "false"}), bench)
    assert sentence.startswith("FSDP_RESHARD_AFTER_FORWARD is 'false' on rank 1 ")


def test_other_weights_of_the_same_shape_are_refused(bench):
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


def test_ranks_of_one_machine_with_caches_of_their_own_are_refused(bench):
    elsewhere = bench.runs / "another cache"
    sentence = refused_for(run_with(bench, flags=[f"--data.cache_dir={elsewhere}"]), bench)
    assert sentence.startswith(f"rank 1 cannot read the tokens in {elsewhere}/")
    assert sentence.endswith(", which the first rank of its machine can: give both the same data.cache_dir or HF_HOME")


def test_each_kind_of_difference_has_its_name(bench, tmp_path):
    plain = SummarizationConfig(model=ModelConfig(name_or_path="t5-small"), data=DataConfig())
    for folder in (tmp_path / "0", tmp_path / "1"):
        shutil.copytree(bench.models["t5"], folder / "model")
        for name in ("source.py", "template.jinja", "metric/metric.py", "model/tokenizer_config.json", "marian/source.spm"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(f'"{folder.name}"')
        (folder / "same").mkdir()
        (folder / "same" / "metric.py").touch()

    def config(section: str, **fields) -> SummarizationConfig:
        return dataclasses.replace(plain, **{section: dataclasses.replace(getattr(plain, section), **fields)})

    def of_rank_1(section: str, **fields) -> list[dict]:
        return [rank_consistency.describe_config(each) for each in (plain, config(section, **fields))]

    def of_both(section: str, **fields) -> list[dict]:
        """With each rank's own folder in the place of FOLDER."""
        texts = [json.dumps(fields).replace("FOLDER", str(tmp_path / place)) for place in "01"]
        return [rank_consistency.describe_config(config(section, **json.loads(text))) for text in texts]

    def launch(version: str, code: str) -> dict:
        file = str(tmp_path / code / "launch" / "rank_consistency.py")
        with patch("importlib.metadata.version", lambda _: version), patch.object(rank_consistency, "__file__", file):
            return rank_consistency.describe_launch({})

    pairs = {
        "train.seed is 1": of_rank_1("train", seed=1),
        "model.dropout is 0.5": of_rank_1("model", dropout=0.5),
        "optim.max_grad_norm is None": of_rank_1("optim", max_grad_norm=None),
        "the file of data.source": of_both("data", source="FOLDER/source.py:rows"),
        "metric.py of eval.metrics": of_both("eval", metrics=["FOLDER/metric"]),
        "tokenizer_config.json of model.name_or_path": of_both("model", name_or_path="FOLDER/model"),
        "tokenizer_config.json of model.init_from": of_both("model", init_from="FOLDER/model"),
        "source.spm of model.init_from": of_both("model", init_from="FOLDER/marian"),
        "metric.py of eval.metrics ": of_both("eval", metrics=["FOLDER/metric", "FOLDER/same"]),  # files of one name
        "the version of torch is '2'": [launch("3", "0"), launch("2", "0")],
        "the code of the toolkit": [launch("3", "0"), launch("3", "1")],
        "data.files is ['s3://***@bucket/1.jsonl']": [  # without a user and a password
            {"data.files": [f"s3://key:word@bucket/{place}.jsonl"]} for place in "01"
        ],
        "fsdp_config of the accelerate YAML is {'a': 1, 'b': 3}": [
            {"fsdp_config of the accelerate YAML": {"a": 1, "b": value}} for value in (2, 3)
        ],
    }
    may_differ = [
        of_rank_1("run", num_threads=2),
        of_both("run", output_dir="FOLDER"),
        [{"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}],  # the order of keys in the accelerate YAML
    ]
    for said in run_on_ranks(_compare_each, preset="ddp_cpu", args=([*pairs.values()], may_differ)):
        for sentence, expected in zip(said, pairs, strict=True):
            assert sentence.startswith(expected.strip()), sentence


def _compare_each(pairs: list[list[dict]], may_differ: list[list[dict]]) -> list[str]:
    """On a rank, which has its own of each pair: the sentences."""
    build_accelerator()
    for facts in may_differ:
        rank_consistency.compare_ranks(facts[rank()])
    return [refusal(rank_consistency.compare_ranks, facts[rank()]) for facts in pairs]
