"""Records: NamedTuples that Python writes and compiled code reads."""

from __future__ import annotations

from typing import Any, NamedTuple, get_type_hints

import numpy as np

_WORDS: dict[Any, Any] = {int: np.int64, bool: np.int64, float: np.float32}
"""Storage types of a record's numbers."""


def record_of(declared: type[NamedTuple]) -> np.dtype[Any]:
    """The dtype of a record.

    Args:
        declared: A NamedTuple whose fields are int or bool (int64), float (float32), or such NamedTuples.
    """
    fields = [(name, _WORDS.get(kind) or record_of(kind)) for name, kind in get_type_hints(declared).items()]
    return np.dtype(fields, align=True)
