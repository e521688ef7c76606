"""One encoder pass a batch; what figures are measured on; predictions that cannot be written. Which held-out rows are
evaluated and how they are cut into batches; sets of them, and their figures in tables."""

import contextlib
import hashlib
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
from toolkit.data.tokens.cuts import ROW_IDS_OF_A_PIECE
from toolkit.errors import UserError
from toolkit.evaluation import generate, loop
from toolkit.evaluation.generate import Score, gather_scores
from toolkit.evaluation.metrics import TextMetric
from toolkit.evaluation.rows import EvaluationRows, choose_rows, list_by_set, of_all_rows, plan_evaluation
from toolkit.files.json_lines import load_json_lines
from toolkit.models.patches.chunked_loss import summed_loss
from toolkit.objectives.seq2seq import Seq2Seq
from toolkit.parallel import wrap
from toolkit.training.best_metric import build_best_metric, check_metric, check_metric_on_rows

ROWS = [{"row_id": i, "input_ids": [i, 2, 3][: 1 + i], "labels": [4, i], "target": f"text {i}"} for i in range(3)]
SETS = {"inputs": ((2, "news"), (1, "mail"))}


def best_metric_of(rows: list[dict] = ROWS, fields: dict | None = None, **settings) -> BestMetric:
    return build_best_metric(EvalConfig(**settings), eval_rows(rows, **fields or {}))


def own(code: str) -> dict:
    """A metric of this code."""
    return {"metrics": [TextMetric("same", code, lambda *_: 1)]}


def test_figures_are_equals_where_rows_code_and_sets_are_the_same_and_texts_are_generated_alike():
    rouge, same = {"best_metric": "rougeL"}, {"best_metric": "same", "higher_is_better": True}
    of_loss, of_texts = best_metric_of(), best_metric_of(**rouge)
    assert not of_texts.changes(best_metric_of(batch_size_rows=2, unshard="never", num_rows=3, **rouge).measured_on)
    for settings in ({"num_beams": 2}, {"max_new_tokens": 9}, {"no_repeat_ngram_size": 3}):
        other = best_metric_of(**settings)
        assert of_texts.changes(other.measured_on) == list(settings) and not of_loss.changes(other.measured_on)
    assert of_texts.changes(best_metric_of(generate=False).measured_on) == ["max_new_tokens", "num_beams", "no_repeat_ngram_size"]
    cells = [{"input_ids": [1]}, {"labels": [4]}, {"labels": [4, 1]}, {"target": "text"}]
    for rows in (ROWS[:2], ROWS[1:], ROWS[::-1], *([{**ROWS[0], **cell}, *ROWS[1:]] for cell in cells)):
        assert of_loss.changes(best_metric_of(rows).measured_on) == ["rows"]
    assert not of_loss.changes(best_metric_of([{**row, "row_id": 9} for row in ROWS]).measured_on)
    # The code of a metric of one's own counts for that metric alone.
    of_own = best_metric_of(fields=own("1"), **same)
    for fields, changed in ((own("1"), []), (own("2"), ["metrics/same"]), ({}, ["metrics/same"])):
        now = best_metric_of(fields=fields).measured_on
        assert of_own.changes(now) == changed and not of_loss.changes(now) and not of_texts.changes(now)
    assert of_own.higher_is_better
    # The rows of all sets count for the metric of one set alone.
    of_mail = best_metric_of(fields=SETS, best_metric="mail/loss")
    assert (of_mail.name, of_mail.higher_is_better, of_mail.compared) == ("mail/loss", False, ("rows", "sets"))
    of_rouge = best_metric_of(fields=SETS, best_metric="mail/rougeL")
    assert of_rouge.higher_is_better and "num_beams" in of_rouge.compared
    for inputs in (((2, "mail"), (1, "news")), ((1, "news"), (2, "mail"))):
        assert of_mail.changes(best_metric_of(fields={"inputs": inputs}, best_metric="mail/loss").measured_on) == ["sets"]
    assert not best_metric_of(fields=SETS).changes(of_loss.measured_on)


@pytest.mark.parametrize(
    ("settings", "trouble"),
    [
        (
            {"best_metric": "old/loss"},
            "^eval.best_metric is old/loss: choose .*percent_distinct, right/…, news/loss, mail/loss, ",
        ),
        (
            {"best_metric": "news/rougeL", "generate": False},
            "^eval.best_metric is news/rougeL: set eval.generate true, or choose one of loss, ",
        ),
        ({"best_metric": "news/right/t1"}, "also say which value is better, by eval.higher_is_better true or false$"),
        (
            {"best_metric": "news/loss", "higher_is_better": True},
            "^eval.higher_is_better is true, but of loss the other value is ",
        ),
        ({"best_metric": "right/t19", "higher_is_better": True}, "^eval.best_metric is right/t19: choose one of .*, right/t18$"),
        ({"best_metric": "post/loss"}, "^eval.best_metric is post/loss, but the set post has no rows to evaluate on$"),
        ({"best_metric": "mail/rougeL"}, "mail/rougeL, but no held-out row has a prompt: choose loss or the like$"),
    ],
)
def test_a_metric_that_no_evaluation_of_these_rows_has_is_refused(settings, trouble):
    rows = [{"row_id": i, "target": f"t{i}", "prompt_length": int(i < 19)} for i in range(20)]
    of_topic = TextMetric("right", "", lambda predictions, references: dict.fromkeys(references, 1))
    data = eval_rows(rows, inputs=((19, "news"), (1, "mail"), (0, "post")), metrics=[of_topic])
    with pytest.raises(UserError, match=trouble):
        check_metric(config := EvalConfig(**settings), ["right"], ["news", "mail", "post"])
        check_metric_on_rows(config, data)
    for metric in ("news/rougeL", "mail/loss", "news/loss"):
        check_metric_on_rows(EvalConfig(best_metric=metric), data)
    # One that the first rows lack is found.
    check_metric_on_rows(EvalConfig(best_metric="right/t18", higher_is_better=True), data)


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
    with pytest.raises(UserError, match="^the predictions .* could not be written .Is a directory.: fix that, "):
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


def make_rows(*counts: int) -> EvaluationRows:
    """So many rows of each set, one after another, of different lengths; before them, 10 rows that are not evaluated."""
    rows = [{"row_id": 10 + i, "num_tokens": 5 + i * 7 % 11, "num_label_tokens": 1 + i % 3} for i in range(sum(counts))]
    return eval_rows(rows, inputs=((10, ""), *((count, name) for name, count in zip("abcd", counts, strict=False))))


def test_every_set_gives_as_many_rows_as_it_has_and_more_rows_include_those_of_fewer():
    held_out = make_rows(30, 50, 4)
    for num_rows, of_each in {3: [1, 1, 1], 5: [2, 2, 1], 12: [4, 4, 4], 40: [18, 18, 4], 64: [30, 30, 4]}.items():
        of_sets = [rows.rows["row_id"][:] for rows in choose_rows(held_out, num_rows).sets.values()]
        assert list(map(len, of_sets)) == of_each
        assert all(first <= min(row_ids) for first, row_ids in zip((10, 40, 90), of_sets, strict=True))
    chosen = [choose_rows(held_out, num_rows).rows["row_id"][:] for num_rows in range(1, 85)]
    assert all(set(fewer) < set(more) for fewer, more in zip(chosen, chosen[1:], strict=False))
    assert all(row_ids == sorted(row_ids) for row_ids in chosen)
    row_ids = held_out.rows["row_id"][:]
    assert choose_rows(held_out, None).rows["row_id"][:] == choose_rows(held_out, 999).rows["row_id"][:] == row_ids
    # Not the first, but those of the smallest hashes.
    hashes = {row_id: hashlib.blake2b(f"evaluation row/{row_id}".encode(), digest_size=8).hexdigest() for row_id in row_ids}
    without_sets = choose_rows(replace(held_out, inputs=()), 5).rows["row_id"][:]
    assert without_sets == sorted(sorted(row_ids, key=hashes.__getitem__)[:5])


@pytest.mark.parametrize("world_size", [3, 4])
def test_a_batch_holds_rows_of_one_set_and_every_row_comes_once(world_size):
    data = make_rows(7, 9, 0, 1)
    batches = [plan_evaluation(data, 4, rank, world_size) for rank in range(world_size)]
    assert len({len(of_rank) for of_rank in batches}) == 1
    filled = [batch for of_rank in batches for batch in of_rank if batch]
    assert sorted(row for batch in filled for row in batch) == list(range(17))
    assert all(len(set(data.places[batch])) == 1 and len(batch) <= 4 for batch in filled)
    dealt = [of_rank[turn][0] for turn in range(len(batches[0])) for of_rank in batches if of_rank[turn]]
    lengths = [row["num_tokens"] - row["num_label_tokens"] for row in map(data.rows.__getitem__, dealt)]
    assert lengths == sorted(lengths, reverse=True)
    assert all(plan_evaluation(make_rows(world_size), 4, rank, world_size)[0] for rank in range(world_size))
    of_rope = [batch for rank in range(2) for batch in plan_evaluation(data, 4, rank, 2, [("longrope", 10)]) if batch]
    assert sorted(row for batch in of_rope for row in batch) == list(range(17))
    assert all(len({data.rows[row]["num_tokens"] > 10 for row in batch}) == 1 for batch in of_rope)


def test_rows_without_a_name_and_names_without_rows_are_no_sets_and_pieces_of_a_text_are_of_its_set():
    data = make_rows(2, 3)
    unnamed = replace(data, inputs=((10, "train"), (2, ""), (3, "b"), (0, "c")))
    assert {name: len(rows.rows) for name, rows in unnamed.sets.items()} == {"b": 3}
    assert replace(data, inputs=()).sets == {}
    rows = data.rows.map(lambda row: {"row_id": row["row_id"] + 3 * ROW_IDS_OF_A_PIECE})
    assert [part.rows["num_tokens"][:] for part in replace(data, rows=rows).sets.values()] == [[5, 12], [8, 15, 11]]


def test_a_table_has_each_set_below_all_rows_without_figures_of_other_rows():
    sets = {"news": "1", "mail": "2"}
    of_now = {"loss": 2.0, "news/loss": 3.0, "mail/loss": 1.0, "measured_on": {"rows": "0", "sets": sets}}
    renamed = {**of_now, "measured_on": {"rows": "0", "sets": {"news": "1", "mail": "3"}}}
    older = {"loss": 4.0, "measured_on": {"rows": "0"}}
    own = {"news/bleu/score": 7.0, "bleu/score": 8.0}  # a set is what stands before the first slash
    lines = {"lead": {"rougeL": 5.0, "mail/rougeL": 6.0}, "own": own, "old": older, "renamed": renamed, "now": of_now}
    listed = list_by_set(lines, sets)
    for figures in listed.values():
        figures.pop("measured_on", None)
    losses = {"old": 4.0, "renamed": 2.0, "now": 2.0, "news: renamed": 3.0, "news: now": 3.0, "mail: now": 1.0}
    others = {
        "lead": {"rougeL": 5.0},
        "mail: lead": {"rougeL": 6.0},
        "own": {"bleu/score": 8.0},
        "news: own": {"bleu/score": 7.0},
    }
    assert listed == others | {name: {"loss": loss} for name, loss in losses.items()}
    assert [name.partition(": ")[0] for name in listed] == ["lead", "own", "old", "renamed", "now", *["news"] * 3, *["mail"] * 2]
    assert of_all_rows(older) == of_all_rows(of_now) == {"rows": "0"} and of_all_rows({}) is None
