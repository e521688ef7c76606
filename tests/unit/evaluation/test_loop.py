"""One encoder pass a batch; what figures are measured on; predictions that cannot be written."""

import contextlib
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support import seq2seq_families
from tests.support.eval_rows import eval_rows, rows_for
from tests.support.model_folders import FAMILIES
from tests.support.tiny_models import one_process
from toolkit.checkpoint.find import BestMetric
from toolkit.config.schema import EvalConfig
from toolkit.errors import UserError
from toolkit.evaluation import generate, loop
from toolkit.evaluation.generate import Score, gather_scores
from toolkit.files.json_lines import load_json_lines
from toolkit.models.patches.chunked_loss import summed_loss
from toolkit.objectives.seq2seq import Seq2Seq
from toolkit.parallel import wrap
from toolkit.training.best_metric import build_best_metric

ROWS = [{"row_id": i, "input_ids": [i, 2, 3][: 1 + i], "labels": [4, i], "target": f"text {i}"} for i in range(3)]


def best_metric_of(rows: list[dict], **settings) -> BestMetric:
    return build_best_metric(EvalConfig(**settings), eval_rows(rows))


def test_figures_are_equals_where_rows_are_the_same_and_texts_are_generated_alike():
    rouge = {"best_metric": "rougeL"}
    of_loss, of_texts = best_metric_of(ROWS), best_metric_of(ROWS, **rouge)
    assert not of_texts.changes(best_metric_of(ROWS, batch_size_rows=2, unshard="never", num_rows=3, **rouge).measured_on)
    for settings in ({"num_beams": 2}, {"max_new_tokens": 9}, {"no_repeat_ngram_size": 3}):
        other = best_metric_of(ROWS, **settings)
        assert of_texts.changes(other.measured_on) == list(settings) and not of_loss.changes(other.measured_on)
    assert of_texts.changes(best_metric_of(ROWS, generate=False).measured_on) == [
        "max_new_tokens",
        "num_beams",
        "no_repeat_ngram_size",
    ]
    cells = [{"input_ids": [1]}, {"labels": [4]}, {"labels": [4, 1]}, {"target": "text"}]
    for rows in (ROWS[:2], ROWS[1:], ROWS[::-1], *([{**ROWS[0], **cell}, *ROWS[1:]] for cell in cells)):
        assert of_loss.changes(best_metric_of(rows).measured_on) == ["rows"]
    assert not of_loss.changes(best_metric_of([{**row, "row_id": 9} for row in ROWS]).measured_on)


def rouge(value: float) -> dict[str, float]:
    return dict.fromkeys(generate.ROUGE_KEYS, value)


def test_predictions_stand_beside_their_own_rows_and_are_reported_if_they_cannot_be_written(tmp_path):
    targets = [("without a prompt", 0), ("a b", 3), ("c", 3)]
    data = eval_rows([{"row_id": 6 + i, "target": t, "prompt_length": n} for i, (t, n) in enumerate(targets)])
    scores = [Score(2, " c\n", rouge(100.0)), Score(1, "a", rouge(50.0))]
    figures = gather_scores(scores, data, tmp_path / "predictions.jsonl")
    assert figures["rouge1"] == 75.0 and figures["exact_match"] == 50.0 and figures["percent_distinct"] == 100.0
    lines = load_json_lines(tmp_path / "predictions.jsonl")
    names = ("row_id", "reference", "prediction", "rouge1")
    assert [tuple(line[name] for name in names) for line in lines] == [(7, "a b", "a", 50.0), (8, "c", " c\n", 100.0)]
    scores = [Score(1, "b", rouge(0.0)), Score(2, "b", rouge(0.0))]
    assert gather_scores(scores, data, tmp_path / "predictions.jsonl")["percent_distinct"] == 50.0  # one text of two
    with pytest.raises(UserError, match="predictions .* could not be written: Is a directory$"):
        gather_scores(scores, data, tmp_path)


@pytest.mark.parametrize("family", [*FAMILIES, *seq2seq_families.IN_PROCESS])
def test_an_encoder_runs_once_a_batch_and_texts_are_those_of_two_runs(family, tmp_path, monkeypatch):
    model = seq2seq_families.build_model(family)
    sharded, data = wrap.shard_model(one_process(), model), rows_for(model)
    config = EvalConfig(max_new_tokens=5, batch_size_rows=2, num_beams=2 if family in ("t5", "bart") else 1)
    seen: list[torch.Tensor] = []
    encoder = model.get_encoder()
    encoder.register_forward_hook(lambda module, args, outputs: seen.append(outputs[0].clone()))

    def run(path: Path) -> dict[str, float]:
        seen.clear()
        figures = loop.evaluate(config, sharded, data, path, lambda: None)
        del figures["rows_per_s"]
        return figures

    figures = run(tmp_path / "once.jsonl")
    assert len(seen) == 2 and len(encoder._forward_hooks) == 1, "the next training steps would keep what their encoder returns"
    monkeypatch.setattr(Seq2Seq, "forward_kept", lambda *_: contextlib.nullcontext({}))
    assert run(tmp_path / "twice.jsonl") == figures
    assert len(seen) == 4 and torch.equal(seen[0], seen[1]) and torch.equal(seen[2], seen[3])
    assert (tmp_path / "once.jsonl").read_bytes() == (tmp_path / "twice.jsonl").read_bytes()


def test_figures_are_sums_over_rows_by_the_names_that_they_have(tmp_path, monkeypatch):
    model = seq2seq_families.build_model("t5")
    sharded = wrap.shard_model(one_process(), model)
    data = rows_for(model)
    with torch.no_grad():  # one label is what the model predicts
        first = model(input_ids=torch.tensor([data.rows[3]["input_ids"]]), decoder_input_ids=torch.tensor([[0]])).logits.argmax()
    rows = data.rows.remove_columns("labels").add_column("labels", [*data.rows["labels"][:3], [int(first)]])
    data = replace(data, rows=rows, inputs=((2, "a"), (1, "b"), (1, "a"), (9, "")))
    model.train()

    def scores(predictions: list[str], references: list[str], tokenizer) -> list[dict[str, float]]:
        assert tokenizer is data.rouge_tokenizer, "words are split as in all references, not as in a batch's"
        return [{name: float(place) for place, name in enumerate(generate.ROUGE_KEYS)}] * len(references)

    monkeypatch.setattr(generate, "rouge_scores", scores)
    found = loop.evaluate(EvalConfig(max_new_tokens=2, batch_size_rows=2), sharded, data, tmp_path / "p.jsonl", lambda: None)
    model.eval()
    with torch.no_grad():
        of_rows = [summed_loss(model, data.collator.collate([[row]])) for row in data.rows]
    losses, correct = [float(loss) for loss, _ in of_rows], [int(correct) for _, correct in of_rows]
    assert correct[3] == 1 and (num_correct := sum(correct)) > 0
    # 9 label tokens, of which 3 are of set b, and 8 bytes of text, of which 3 are.
    for of_set, loss, num_right, num_tokens, num_bytes in (
        ("", sum(losses), num_correct, 9, 8),
        ("a/", losses[0] + losses[1] + losses[3], num_correct - correct[2], 6, 5),
        ("b/", losses[2], correct[2], 3, 3),
    ):
        expected = {"loss": loss / num_tokens, "perplexity": math.exp(loss / num_tokens)}
        expected |= {"bits_per_byte": loss / math.log(2) / num_bytes, "token_accuracy": 100 * num_right / num_tokens}
        expected |= {name: place for place, name in enumerate(("rouge1", "rouge2", "rougeL", "rougeLsum"))}
        assert {name: found[of_set + name] for name in expected} == pytest.approx(expected, rel=1e-5)
    # A rank without rows in a batch computes one that does not count.
    sums = loop._LossSums(data, torch.device("cpu"))
    with torch.no_grad():
        sums.add(model, [])
    assert not sums.sums.any()
