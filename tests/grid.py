"""Long grids of cases: a few of them in `make test`, all of them in `make test-all`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def grid(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """The cases for `pytest.mark.parametrize`, those that are not quick marked `slow`.

    Args:
        cases: All of them, in their order.
        quick: The ones that `make test` runs.

    Raises:
        ValueError: one of `quick` is no case.
    """
    found = list(cases)
    if strange := [case for case in quick if case not in found]:
        raise ValueError(f"not among the cases: {strange}")
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in found]


QUICK_CACHES = frozenset({"fp16", "int4", "hierarchical", "gear4"})
"""The kinds of KV cache in `make test`: the default, the exact one, the one of drafts, and one with every part."""
