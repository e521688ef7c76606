"""Filters the lines that torchao logs at its import, which say nothing about a run.

transformers imports torchao if it is installed (with the extra `fp8` or `test`), and each rank would print four lines before its
own first one. The filters match logger and message; everything else of these loggers is printed.
"""

from __future__ import annotations

import logging
import re

from toolkit.private import ENUM_OF_TORCHAO, NOT_LOADED_BY_TORCHAO


def filter_import_noise() -> None:
    """Drop the import warnings of torchao 0.18 on torch 2.13. Imports neither."""
    logging.getLogger("torchao").addFilter(_is_no_library_of_other_formats)
    logging.getLogger("torch.utils._pytree").addFilter(_is_no_enum_of_torchao)


def _is_no_library_of_other_formats(record: logging.LogRecord) -> bool:
    """Drop warnings about torchao's shared libraries. They hold CUDA kernels of formats that are not used here (MX, sparse), and
    do not load without CUDA or under a Python that they were not built for. Float8 uses torch's own kernels."""
    return re.match(NOT_LOADED_BY_TORCHAO, record.getMessage()) is None


def _is_no_enum_of_torchao(record: logging.LogRecord) -> bool:
    """Drop warnings about torchao's enums, which it registers in a way that torch 2.13 deprecates. Goes with pytorch/ao#4848."""
    kind = record.args[0] if isinstance(record.args, tuple) and record.args else None
    return not (ENUM_OF_TORCHAO in str(record.msg) and str(getattr(kind, "__module__", "")).startswith("torchao."))
