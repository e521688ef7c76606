"""A metric's script, as a user writes it for `evaluate`."""

from pathlib import Path

_SCRIPT = """
import datasets
import evaluate


class Own(evaluate.Metric):
    def _info(self):
        texts = {{"predictions": datasets.Value("string"), "references": datasets.Value("string")}}
        return evaluate.MetricInfo(description="", citation="", features=datasets.Features(texts))

    def _compute(self, predictions, references):
        {body}
"""


def write_metric(folder: Path, body: str) -> Path:
    """Write `<folder>/<its name>.py`, whose metric of `predictions` and `references` has this body; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{folder.name}.py").write_text(_SCRIPT.format(body=body))
    return folder
