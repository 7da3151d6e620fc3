"""The accounting of cache kinds, against sizes worked out by hand."""

from __future__ import annotations

from typing import get_args

import pytest

from runtime.kv.groups import cache_bytes
from runtime.kv.kinds import KINDS, KVKind, bytes_per_token, page_bytes, page_fields
from tests.runtime.conftest import make_spec

# Bytes of a page of one head of 64 channels, keys and values, added up by hand.
BY_HAND = {
    "fp16": 64 * 64 * 2 * 2,
    "int8": 2 * 64 * (64 + 4),
    "int4": 2 * 64 * (32 + 4),
    "hierarchical": (128 * 64 + 64 * 4) + (128 * 64 + 128 * 4),
    "kcvt4": (128 * 32 + 64 * 4) + (128 * 32 + 128 * 4),
    "kivi2": (128 * 16 + 2 * 64 * 4) + (128 * 16 + 128 * 4),
}
LOW_RANK = 2 * (128 + 64) * 4 * 2
SPARSE = 64 * 2 * 4 + 128 * 2 * 4
BY_HAND |= {"gear-l4": BY_HAND["kcvt4"] + LOW_RANK, "gear-l2": BY_HAND["kivi2"] + LOW_RANK}
BY_HAND |= {"gear4": BY_HAND["gear-l4"] + SPARSE, "gear2": BY_HAND["gear-l2"] + SPARSE}


def test_every_kind_has_its_name() -> None:
    assert tuple(KINDS) == get_args(KVKind)
    assert [kind.name for kind in KINDS.values()] == list(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_pages_are_as_large_as_added_up_by_hand(name: KVKind) -> None:
    kind, spec = KINDS[name], make_spec(head_dim=64)
    heads = spec.num_layers * spec.num_kv_heads
    assert page_bytes(kind, spec) == heads * BY_HAND[name]
    assert bytes_per_token(kind, spec) == heads * BY_HAND[name] / kind.page


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("head_dim", [2, 6, 8, 80, 96, 128])
def test_records_of_any_width_keep_halves_aligned(name: KVKind, head_dim: int) -> None:
    for part in ("keys", "values"):
        at = 0
        for field in page_fields(KINDS[name], part, head_dim):
            assert field.dtype == "uint8" or at % 2 == 0
            at += field.nbytes


def test_outliers_are_counted_from_the_vectors_own_length() -> None:
    gear = KINDS["gear4"]
    assert [gear.outliers(length) for length in (1, 2, 64, 128, 149, 150, 4096)] == [0, 1, 1, 1, 1, 2, 41]
    assert KINDS["gear-l4"].outliers(128) == 0


@pytest.mark.parametrize("name", KINDS)
def test_a_cache_is_its_pages_and_windows(name: KVKind) -> None:
    kind, spec = KINDS[name], make_spec()
    token = 2 * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
    window = (kind.sinks + kind.keep + kind.page + 16) * token if kind.windowed else 0
    pages = (1000 - kind.sinks - kind.keep) // kind.page if kind.windowed else -(-1000 // kind.page)
    found = cache_bytes(kind, spec, context=1000, slots=3, max_rows=16)
    assert found == 3 * (pages * page_bytes(kind, spec) + window)


def test_which_kinds_have_windows_and_drafts() -> None:
    assert [name for name, kind in KINDS.items() if not kind.windowed] == ["fp16", "int8"]
    assert [name for name, kind in KINDS.items() if not kind.sinks] == ["fp16", "int8", "hierarchical"]
    assert all(kind.sinks % 64 == 0 and (kind.turned or not kind.sinks) for kind in KINDS.values())
    assert [name for name, kind in KINDS.items() if kind.has_draft] == ["hierarchical"]


def test_the_latest_tokens_of_a_hierarchical_cache_are_in_no_page() -> None:
    """QuantSpec's two buffers: one fills with new tokens, and as many before them stay in half precision."""
    kind = KINDS["hierarchical"]
    for length in range(1000):
        assert length - kind.stored_pages(length) * kind.page >= min(length, kind.page)
