"""lm-eval on an export, with a task file and rows of one's own: its log-likelihoods add up to our loss."""

import json
import math

import pytest
import yaml

from tests.other_tools.conftest import run_command
from tests.support.model_folders import save_jsonl
from toolkit.files.json_lines import load_json_lines

TASK = {
    "task": "held_out",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "loglikelihood",
    "doc_to_text": "{{prompt}}",
    "doc_to_target": "{{completion}}</s>",
    "target_delimiter": "",
    "metric_list": [{"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}],
}


def test_log_likelihoods_and_perplexity_are_ours(llm_bench, tmp_path):
    bench = llm_bench
    rows = load_json_lines(bench.data / bench.rows)
    held_out = save_jsonl(tmp_path / "held_out.jsonl", rows[:7])
    bench.run("run", data__eval_files=held_out, data__eval_fraction=0, eval__num_rows=7, eval__generate=False)
    [ours] = bench.lines("run", "eval")
    record = json.loads((bench.runs / "run" / "record.json").read_text())
    _, evaluation = record["data"]["splits"]
    total = -ours["loss"] * evaluation["num_label_tokens"]

    # Theirs. The tests' tokenizer appends an end token to every text; without `add_bos_token` a context would end with one.
    (tmp_path / "held_out.yaml").write_text(yaml.safe_dump(TASK | {"dataset_kwargs": {"data_files": {"test": str(held_out)}}}))
    model = f"pretrained={bench.runs / 'run' / 'export'},dtype=float32,add_bos_token=False"
    where = ["--include_path", tmp_path, "--output_path", tmp_path / "found", "--log_samples", "--device", "cpu"]
    run_command("lm_eval", "--model", "hf", "--model_args", model, "--tasks", "held_out", *where, cwd=tmp_path)
    [samples], [results] = ([*(tmp_path / "found").rglob(name)] for name in ("samples_*.jsonl", "results_*.json"))
    theirs = [float(line["resps"][0][0][0]) for line in load_json_lines(samples)]
    assert len(theirs) == 7 and sum(theirs) == pytest.approx(total, rel=1e-5)
    perplexity = json.loads(results.read_text())["results"]["held_out"]["perplexity,none"]
    assert perplexity == pytest.approx(math.exp(-total / 7), rel=1e-4), "theirs is of a row, and ours of a token"
