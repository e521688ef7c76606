"""Rows to evaluate on."""

from tests.support.model_folders import _build_tokenizer
from tests.support.seq2seq_families import build_collator
from toolkit.data.collate import CausalCollator, SummarizationCollator
from toolkit.evaluation.rows import EvaluationRows
from toolkit.objectives.causal import Causal
from toolkit.objectives.seq2seq import Seq2Seq


def eval_rows(rows: list[dict], **fields) -> EvaluationRows:
    """These rows, of which nothing is decoded."""
    import datasets

    given = {"tokenizer": None, "collator": SummarizationCollator(0, 0)} | fields
    given["objective"] = Causal() if isinstance(given["collator"], CausalCollator) else Seq2Seq()
    return EvaluationRows(rows=datasets.Dataset.from_list(rows), **given)


def rows_for(model) -> EvaluationRows:
    """Four rows of an encoder-decoder: a batch with padding, and one without."""
    inputs = [[5, 6, 7, 8, 9, 10, 11], [9, 12, 13, 14, 15], [4, 5, 7], [8, 9, 10]]
    labels, targets = [[9, 20, 2], [5, 2], [7, 8, 2], [2]], ["a b", "c", "d e", ""]
    rows = [
        {
            "row_id": i, "input_ids": inputs[i], "labels": labels[i], "target": targets[i], "num_label_tokens": len(labels[i]),
            "num_tokens": len(inputs[i] + labels[i]), "target_bytes": max(1, len(targets[i])),
        }
        for i in range(4)
    ]  # fmt: skip
    return eval_rows(rows, tokenizer=_build_tokenizer(("<pad>", "</s>")), collator=build_collator(model))
