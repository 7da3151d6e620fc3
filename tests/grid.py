"""Long grids of cases: a few of them in `make test`, all of them in `make test-all`."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import pytest

QUICK_CACHES = frozenset({"fp16", "int4", "hierarchical", "gear4"})
"""The kinds of KV cache in `make test`: the default, the exact one, the one of drafts, and one with every part."""


def grid(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """The cases of an argument for `pytest.mark.parametrize`, those that are not quick marked `slow`.

    Args:
        cases: All of them, in their order.
        quick: The ones that `make test` runs.

    Raises:
        ValueError: one of `quick` is no case.
    """
    return _marked([(case,) for case in cases], [(case,) for case in quick])


def combined(quick: Collection[tuple[Any, ...]], **arguments: Iterable[Any]) -> tuple[tuple[str, ...], list[Any]]:
    """Names and combined values of several arguments for `pytest.mark.parametrize(*...)`; see `grid`."""
    return tuple(arguments), _marked(list(itertools.product(*arguments.values())), quick)


def _marked(cases: Collection[tuple[Any, ...]], quick: Collection[tuple[Any, ...]]) -> list[Any]:
    if strange := [case for case in quick if case not in cases]:
        raise ValueError(f"not among the cases: {strange}")
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in cases]
