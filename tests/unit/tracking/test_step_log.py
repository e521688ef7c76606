"""Lines of steps, and what is printed of those that were skipped. Baselines, of texts and of counted tokens, are measured at
the end of a run: the figures that a model has to beat."""

import errno
import math
import os
import random
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.eval_rows import eval_rows
from toolkit.checkpoint.state import SkipHistory
from toolkit.data.batch_plan import MicroBatch, Step
from toolkit.distributed.progress import Progress
from toolkit.errors import UserError
from toolkit.evaluation.rouge import mean_scores, rouge_scores
from toolkit.files.json_lines import load_json_lines
from toolkit.loss import IGNORED_LABEL
from toolkit.tracking import baselines, step_log
from toolkit.tracking.baselines import _text_baselines, _token_baselines, best_constant, measure_baselines
from toolkit.tracking.metrics_log import MetricsLog
from toolkit.tracking.step_log import StepFigures, StepLog

NAN = math.nan
ROWS = [{"row_id": 1000 + row} for row in range(100)]


@pytest.fixture
def log(tmp_path) -> StepLog:
    """A run may skip two updates in a row."""
    accelerator = SimpleNamespace(device=torch.device("cpu"), log=lambda figures, step: None)
    metrics = MetricsLog(tmp_path / "metrics.jsonl", is_writer=True)
    sharded = SimpleNamespace(accelerator=accelerator)
    return StepLog(metrics, sharded, Progress(100, 0, every_steps=1), ROWS, SkipHistory(), 3)


def figures(step: int, *losses: float, norm: float = 1.0) -> StepFigures:
    """A step of two rows a micro-batch, rows 2·step and so on, with these summed losses; skipped if one is not finite."""
    rows = tuple(range(2 * step, 2 * step + 2 * len(losses)))
    micro_batches = [
        (MicroBatch(step, i, i == len(losses) - 1, ((rows[2 * i],), (rows[2 * i + 1],)), False), torch.tensor(loss))
        for i, loss in enumerate(losses)
    ]
    read = map(torch.tensor, (total := sum(losses), norm, float(not math.isfinite(total + norm))))
    return StepFigures(Step(step, 0, rows, 10, 20), 1e-3, *read, micro_batches)


def lines_of(log: StepLog, kind: str) -> list[dict]:
    return [line for line in load_json_lines(log.metrics.path, skip_torn_end=True) if line["kind"] == kind]


@pytest.mark.parametrize(
    ("losses", "norm", "row_ids", "said"),
    [
        ((1.0, NAN, 2.0), 1.0, range(1010, 1012), "(loss nan, gradient norm 1); rows 1010, 1011; 1 skipped so far\n"),
        ((1.0, 2.0), NAN, range(1008, 1012), "rows 1008, 1009, 1010, 1011; 1"),  # no loss is bad: those of the whole step
        ((1.0,) * 10, NAN, range(1008, 1028), "1023 and 4 more; 1 skipped so far"),  # cut short in the sentence alone
    ],
)
def test_rows_of_the_bad_micro_batch_are_named(log, capsys, losses, norm, row_ids, said):
    log.add(figures(4, *losses, norm=norm))
    log.flush()
    (skip,) = lines_of(log, "skip")
    assert (skip["step"], skip["row_ids"]) == (4, [*row_ids])
    if norm == 1:
        assert (skip["loss"], skip["loss_is"], skip["grad_norm"]) == (None, "nan", 1.0)
    printed = capsys.readouterr().err
    assert "step 4: update skipped on all ranks (loss " in printed and said in printed


def test_every_step_has_a_line_and_only_skipped_ones_another(log, tmp_path, monkeypatch):
    """With the speed of all four ranks and of one, and MFU, where it is known."""
    monkeypatch.setattr(step_log, "world_size", lambda: 4)
    log.num_input_tokens_seen = 1000
    for step, loss in enumerate([5.0, NAN, 7.0], start=1):
        log.add(figures(step, loss))
    assert not (tmp_path / "metrics.jsonl").read_text(), "read before it was asked to"
    log.flush()
    log.flush()
    lines = load_json_lines(tmp_path / "metrics.jsonl", skip_torn_end=True)
    assert [(line["kind"], line["step"]) for line in lines] == [("train", 1), ("train", 2), ("skip", 2), ("train", 3)]
    assert [line["loss"] for line in lines] == [0.5, None, None, 0.7]
    assert log.skips == SkipHistory(num_skipped=1, num_in_a_row=0)
    assert not any("mfu_percent" in line for line in lines)
    log.seconds_at_peak = np.arange(100) / 1000
    for step in (4, 5):  # rows 8 and 9, 10 and 11
        log.add(figures(step, 1.0))
    log.flush()
    train = lines_of(log, "train")
    assert [line["num_input_tokens_seen"] for line in train] == [1020, 1040, 1060, 1080, 1100]
    assert all(line["tokens_per_s_per_rank"] * 4 == pytest.approx(line["tokens_per_s"]) for line in train)
    assert sum(line["step_time_s"] * line["tokens_per_s"] for line in train) == pytest.approx(100)
    at_peak_s = sum(line["mfu_percent"] / 100 * line["step_time_s"] * 4 for line in train[3:])
    assert at_peak_s == pytest.approx((8 + 9 + 10 + 11) / 1000)


def test_routers_have_figures_beside_the_loss_and_the_least_even_layer_its_load(log, tmp_path):
    """Of 20 tokens, each sent to one of two experts, in two layers."""
    step = figures(1, 5.0)
    step.routing = torch.tensor([[1.0, 10.0, 10.0], [3.0, 20.0, 0.0]])
    log.add(step)
    log.flush()
    router, train = load_json_lines(tmp_path / "metrics.jsonl")
    assert router == {"kind": "router", "step": 1, "layer": 1, "load": [1.0, 0.0]}
    assert train["loss"] == 0.5 and train["router_aux_loss"] == pytest.approx(0.2)
    assert train["router_busiest_share"] == 1.0 and train["router_load_entropy"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("losses", "flush_every", "in_a_row", "steps", "rows"),
    [
        *(([1.0, NAN, NAN, 1.0, NAN, NAN, NAN], every, 0, "5, 6, 7", "1010, 1011, 1012, ") for every in (1, 2, 5)),
        ([1.0, NAN, NAN, NAN, 1.0, NAN, 1.0], 7, 0, "2, 3, 4", "1004, "),  # though the next one was taken: all is read at once
        ([NAN], 1, 2, "1", "1002, 1003; "),  # counted from before a resume
    ],
)
def test_too_many_in_a_row_stop_the_run_and_name_steps_and_rows(log, losses, flush_every, in_a_row, steps, rows):
    """Counted across flushes; one that is taken starts the count again."""
    log.skips.num_in_a_row = in_a_row
    with pytest.raises(UserError) as error:
        for step, loss in enumerate(losses, start=1):
            log.add(figures(step, loss))
            if step % flush_every == 0 or step == len(losses):
                log.flush()
    sentence = str(error.value)
    assert sentence.startswith(f"3 updates in a row were skipped, up to step {steps[-1]} (optim.max_skipped_steps)")
    assert f"{steps}: rows {rows}" in sentence and error.value.printed_by == "run"
    assert [line["step"] for line in lines_of(log, "train")] == [*range(1, len(losses) + 1)]


LEADS = {"Return the oar.": "Return the oar. And more.", "Close the file.": "Nothing alike.", "Close it.": "Close it."}
TEXTS = [{"row_id": i, "target": target, "lead_text": lead} for i, (target, lead) in enumerate(LEADS.items())]


def test_baselines_are_measured_once_and_are_lines_of_the_metrics(tmp_path, monkeypatch):
    """Of texts, and of tokens where it is asked for; where these are evaluated."""
    data, of_tokens, on = eval_rows(TEXTS), eval_rows(HELD_OUT, tokenizer=range(4)), {"rows": "a"}
    log = MetricsLog(tmp_path / "metrics.jsonl", is_writer=True)
    assert measure_baselines(log, 3, TRAINED_ON, of_tokens, on, counts_tokens=True) == {}  # no evaluation
    log.write("eval", 3, loss=1.0, measured_on=on)
    assert measure_baselines(log, 3, data.rows, data, on) == {}  # no texts
    log.write("eval", 4, rougeL=1.0, measured_on=on)
    first = measure_baselines(log, 4, data.rows, data, on)
    assert list(first) == ["lead sentence", 'constant "Close the file."']
    lines = [line for line in load_json_lines(log.path, skip_torn_end=True) if line["kind"] == "baseline"]
    assert [(line["name"], line["step"], line["measured_on"]) for line in lines] == [(name, 4, on) for name in first]
    with monkeypatch.context() as patch:
        patch.setattr(baselines, "_text_baselines", lambda *_: pytest.fail("measured again"))
        again = measure_baselines(log, 4, data.rows, data, on)
    assert {name: line["rougeL"] for name, line in again.items()} == {name: line["rougeL"] for name, line in first.items()}
    # On other rows, and a line that cannot be written, as on a full disk.
    log.write("eval", 5, loss=1.0, measured_on=(other := {"rows": "b"}))
    measured = measure_baselines(log, 5, TRAINED_ON, of_tokens, other, counts_tokens=True)
    assert list(measured) == ["unigram", "interpolated bigram"]
    log.write("eval", 6, rougeL=1.0, measured_on=(third := {"rows": "c"}))
    with log.noting_failure(log.path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(UserError, match="metrics.jsonl cannot be written .No space left on device.: fix that"):
        measure_baselines(log, 6, data.rows, data, third)


def test_a_set_has_baselines_of_its_own_rows_and_a_long_constant_is_named_by_its_start():
    data = eval_rows(TEXTS, inputs=((2, "news"), (1, "mail")))
    lead = _text_baselines(data.rows, data)["lead sentence"]
    assert [lead[f"{of_set}rougeL"] for of_set in ("", "news/", "mail/")] == [pytest.approx(200 / 3), 50.0, 100.0]
    data = eval_rows([{"target": "word " * 20, "lead_text": "a"}])
    assert list(_text_baselines(data.rows, data))[1] == f'constant "{"word " * 7}…"'


def token_rows(*rows: tuple[list[int], int, int]) -> list[dict]:
    """Rows of a causal model: their tokens, the number of the prompt's or of the first token, and the bytes of the rest."""
    return [
        {
            "row_id": i,
            "input_ids": ids,
            "labels": [IGNORED_LABEL] * start + ids[start:],
            "num_tokens": len(ids),
            "target_bytes": size,
        }
        for i, (ids, start, size) in enumerate(rows)
    ]


TRAINED_ON = eval_rows(token_rows(([0, 1, 2], 1, 9), ([0, 1, 1], 1, 9))).rows
"""Labels 1, 2, 1, 1: in a vocabulary of 4, p is 4/8 for 1, 2/8 for 2, 1/8 for the others. After 0 comes 1 twice; after 1 come 2
and 1 once each."""
HELD_OUT = token_rows(([0, 1, 3, 2], 1, 4), ([2, 3, 0, 1], 3, 2))
"""The last three tokens of the first, the last of the second."""


def test_counted_tokens_are_a_unigram_and_a_bigram_interpolated_with_it(monkeypatch):
    data = eval_rows(HELD_OUT, tokenizer=range(4), inputs=((1, "a"), (1, "b")))
    found = _token_baselines(TRAINED_ON, data)
    after_0, after_1, after_3 = (2 + 1 / 2) / 3, (0 + 2 / 8) / 4, 1 / 4  # 3 was never before a label
    likelihoods = {
        "unigram": [[1 / 2, 1 / 8, 1 / 4], [1 / 2]],
        "interpolated bigram": [[after_0, after_1, after_3], [after_0]],
    }
    assert list(found) == list(likelihoods)
    for name, (of_a, of_b) in likelihoods.items():
        for of_set, values, num_bytes in (("", of_a + of_b, 6), ("a/", of_a, 4), ("b/", of_b, 2)):
            nats = -sum(map(math.log, values))
            assert found[name][f"{of_set}loss"] == pytest.approx(nats / len(values))
            assert found[name][f"{of_set}bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes)
    # More tokens than are counted are thinned evenly.
    of_first = _token_baselines(TRAINED_ON.select([0]), data)
    monkeypatch.setattr(baselines, "MAX_COUNTED_TOKENS", 5)
    assert _token_baselines(TRAINED_ON, data) == of_first


VERBS, NOUNS = ["Return", "Opens", "Raise", "Closing"], ["the file", "a list of files", "the", "error errors", "value, if any"]


@pytest.mark.parametrize("seed", range(5))
def test_the_best_constant_is_nearly_the_winner_by_rouge_1(seed):
    targets, references = (
        [" ".join(draw.choices(VERBS + NOUNS, k=draw.randint(1, 5))) for _ in range(num_rows)]
        for num_rows, draw in ((60, random.Random(seed)), (15, random.Random(seed + 100)))
    )
    means = [mean_scores(rouge_scores([target] * len(references), references))["rouge1"] for target in targets]
    winner = means[targets.index(best_constant(targets, references))]
    assert winner >= 0.9 * max(means) and winner > 1.3 * statistics.fmean(means)


@pytest.mark.parametrize(
    ("targets", "references", "best"),
    [
        (["x y", "Close file", "file close", "close files"], ["close"], "Close file"),  # the first of equals
        (["x", "y"], ["z"], "x"),
        # Words as ROUGE of the references counts them: rouge_score has one for these texts, "cd".
        (["关闭窗口 cd", "打开一个文件"], ["打开文件", "打开一些文件", "读文件 cd"], "打开一个文件"),
        (["a", "b", "c", "d", "e", "f", "f"], ["d"], "a"),  # thinned to a, c, e: all three score 0
        (["a", "b", "c", "d", "e", "f", "f"], ["e"], "e"),
    ],
)
def test_the_first_of_equals_wins_and_large_sets_are_thinned_evenly(monkeypatch, targets, references, best):
    monkeypatch.setattr(baselines, "MAX_CANDIDATES", 4 if len(targets) == 4 else 3)
    assert best_constant(targets, references) == best
