"""Lines that torchao prints when it is imported, which say nothing about a run and hide what does.

transformers imports torchao wherever it is installed (with the extra `fp8` or `test`), and each rank printed four lines before
its own first one. Filtered by logger and message: everything else of these loggers is printed.
"""

from __future__ import annotations

import logging
import re

_SHARED_LIBRARY = re.compile(r"Failed to load \S*/torchao/_C\w*(\.[\w-]+)*\.so: ")


def filter_import_noise() -> None:
    """Leave out what torchao 0.18 says on torch 2.13. Imports neither."""
    logging.getLogger("torchao").addFilter(_is_no_library_of_other_formats)
    logging.getLogger("torch.utils._pytree").addFilter(_is_no_enum_of_torchao)


def _is_no_library_of_other_formats(record: logging.LogRecord) -> bool:
    """torchao's shared libraries hold CUDA kernels of formats that are not used here (MX, sparse); float8 computes by torch's
    own. They cannot be loaded without CUDA, or under another Python than the one that they were built for."""
    return _SHARED_LIBRARY.match(record.getMessage()) is None


def _is_no_enum_of_torchao(record: logging.LogRecord) -> bool:
    """torchao registers enums of its own in a way that torch 2.13 deprecates; it can go with pytorch/ao#4848."""
    kind = record.args[0] if isinstance(record.args, tuple) and record.args else None
    return not ("register_constant()" in str(record.msg) and str(getattr(kind, "__module__", "")).startswith("torchao."))
