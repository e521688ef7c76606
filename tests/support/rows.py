"""Rows as a run reads them, by the objective of their config's recipe."""

from toolkit.data.rows import load
from toolkit.data.rows.load import TextRows
from toolkit.data.tokens import prepare
from toolkit.data.tokens.prepare import TokenizedRows
from toolkit.objectives import built_in


def load_rows(config, **options) -> TextRows:
    return load.load_rows(built_in(config.objective), config, **options)


def prepare_rows(config, *args) -> TokenizedRows:
    return prepare.prepare_rows(built_in(config.objective), config, *args)
