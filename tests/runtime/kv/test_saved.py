"""Caches as files: they come back bit for bit, or are refused with a reason; nothing half-written ever stays."""

from __future__ import annotations

import json
import os
import resource
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.errors import RequestError, SavedCacheError
from runtime.kv import saved, saved_folder
from runtime.kv.kinds import KINDS, PARTS, KVKind
from runtime.kv.reference.cache import ReferenceCache
from runtime.kv.saved import About
from runtime.kv.saved_folder import SavedCaches

torch.set_num_threads(1)
Factory = Callable[..., Any]
CONTEXT, ROWS = 700, 128
SHAPE = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8}


def make(spec: Any, kv: KVKind = "int4", context: int = CONTEXT) -> ReferenceCache:
    return ReferenceCache(KINDS[kv], spec, context=context, slots=2, max_rows=ROWS)


def fill(cache: ReferenceCache, slot: int, tokens: list[int]) -> None:
    """Keys and values that the token and its position decide."""
    while (start := cache.length(slot)) < len(tokens):
        rows = tokens[start : start + ROWS]
        positions, slots = torch.arange(start, start + len(rows)), torch.full((len(rows),), slot)
        cache.begin(slots.numpy().astype(np.int32), positions.numpy().astype(np.int32))
        for layer in range(SHAPE["num_layers"]):
            phases = torch.arange(1, 2 * SHAPE["num_kv_heads"] * SHAPE["head_dim"] + 1) * (1.1 + layer)
            x = torch.sin(phases * (torch.tensor(rows) + 0.01 * positions)[:, None])
            k, v = x.view(len(rows), 2, SHAPE["num_kv_heads"], SHAPE["head_dim"]).unbind(1)
            cache.append(layer, slots, positions, k, v)


def contents(cache: ReferenceCache, slot: int) -> torch.Tensor:
    return torch.stack([cache.read(part, layer, slot) for part in PARTS for layer in range(SHAPE["num_layers"])])


def about(cache: ReferenceCache, spec: Any, /, **changes: Any) -> About:
    return replace(About.of(cache, spec, model="abc" * 20, recipe={"bits": 4, "method": "rtn"}), **changes)


@pytest.fixture
def spec(tiny_spec: Factory) -> Any:
    return tiny_spec(**SHAPE)


@pytest.fixture
def file(spec: Any, tmp_path: Path) -> Path:
    """300 tokens of an int4 cache."""
    cache = make(spec)
    fill(cache, 0, list(range(300)))
    saved.write(tmp_path / "chat.kv", about(cache, spec), list(range(300)), cache, 0)
    return tmp_path / "chat.kv"


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("length", [1, 300, 513])
def test_a_file_comes_back_bit_for_bit(kv: KVKind, length: int, spec: Any, tmp_path: Path) -> None:
    tokens = [int(token) for token in np.random.default_rng(1).integers(0, 96, length)]
    cache, other = make(spec, kv), make(spec, kv)
    fill(cache, 1, tokens)
    size = saved.write(tmp_path / "chat.kv", about(cache, spec), tokens, cache, 1)
    assert size == (tmp_path / "chat.kv").stat().st_size
    assert stat.S_IMODE((tmp_path / "chat.kv").stat().st_mode) == 0o600
    assert size < cache.slot_bytes(1) + 10 * length + 5000
    assert [path.name for path in tmp_path.iterdir()] == ["chat.kv"]
    header = saved.read_header(tmp_path / "chat.kv")
    assert (header.tokens, header.paged) == (tuple(tokens), cache.paged_length(1))
    assert saved.load(tmp_path / "chat.kv", about(other, spec), other, 0) == tokens
    assert torch.equal(contents(cache, 1), contents(other, 0))
    longer = [*tokens, *range(96)]
    for each, slot in ((cache, 1), (other, 0)):
        fill(each, slot, longer)
    assert torch.equal(contents(cache, 1), contents(other, 0))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "other"}, "another model"),
        ({"recipe": {"bits": 3, "method": "rtn"}}, "another recipe"),
        ({"spec": {}}, "another architecture"),
        ({"kind": {"name": "int8"}}, "another kind of cache"),
        ({"layout": "abacus-1"}, r"another backend or layout \(abacus-1\)"),
        ({"version": "0.0"}, r"another version of the program \(0\.0\)"),
        ({"model": "x", "version": "y"}, "another model, another version"),
    ],
)
def test_what_belongs_to_something_else_is_refused(
    changes: dict[str, Any], reason: str, spec: Any, tmp_path: Path
) -> None:
    cache = make(spec)
    fill(cache, 0, list(range(200)))
    saved.write(tmp_path / "chat.kv", about(cache, spec, **changes), list(range(200)), cache, 0)
    before = contents(cache, 0)
    with pytest.raises(SavedCacheError, match=reason):
        saved.load(tmp_path / "chat.kv", about(cache, spec), cache, 0)
    assert torch.equal(before, contents(cache, 0))


def test_a_damaged_file_is_refused(file: Path, spec: Any) -> None:
    whole = file.read_bytes()
    cache = make(spec)
    rng = np.random.default_rng(2)
    places = [*rng.integers(0, len(whole), 25).tolist(), len(whole) - 1]
    for at in places:
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x20]) + whole[at + 1 :])
        with pytest.raises(SavedCacheError):
            saved.load(file, about(cache, spec), cache, 0)
    for length in (0, 4, 12, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(SavedCacheError):
            saved.load(file, about(cache, spec), cache, 0)
    assert (cache.length(0), cache.table.used) == (0, 0)
    with pytest.raises(SavedCacheError, match="cannot read"):
        saved.load(file.with_name("none.kv"), about(cache, spec), cache, 0)
    file.write_bytes(whole)
    assert saved.load(file, about(cache, spec), cache, 0) == list(range(300))


def test_a_longer_sequence_than_the_context_is_refused(file: Path, spec: Any) -> None:
    cache = make(spec, context=256)
    with pytest.raises(SavedCacheError, match="256"):
        saved.load(file, about(cache, spec), cache, 0)
    assert (cache.length(0), cache.table.used) == (0, 0)


def test_tokens_must_be_the_slots(spec: Any, tmp_path: Path) -> None:
    cache = make(spec)
    fill(cache, 0, [1, 2, 3])
    for tokens in ([], [1, 2], [1, 2, 3, 4]):
        with pytest.raises(RequestError, match="cannot be saved"):
            saved.write(tmp_path / "chat.kv", about(cache, spec), tokens, cache, 0)
    assert not list(tmp_path.iterdir())


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """While entered, no file can grow beyond a size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_what_was_there(file: Path, spec: Any) -> None:
    whole = file.read_bytes()
    cache = make(spec)
    fill(cache, 0, list(range(500)))
    with disk_of(len(whole)), pytest.raises(SavedCacheError, match="cannot save"):
        saved.write(file, about(cache, spec), list(range(500)), cache, 0)
    assert file.read_bytes() == whole
    assert [path.name for path in file.parent.iterdir()] == ["chat.kv"]


def folder(cache: ReferenceCache, spec: Any, path: Path, **options: Any) -> SavedCaches:
    return SavedCaches(path, about(cache, spec), **{"smallest": 100, "gain": 20, **options})


def test_a_prompt_finds_the_file_that_spares_most(spec: Any, tmp_path: Path) -> None:
    path, cache = tmp_path / "new" / "chats", make(spec)
    one, two = list(range(200)), [*range(150), *range(300, 400)]
    fill(cache, 0, one)
    fill(cache, 1, two)
    folder(cache, spec, path).save(cache, [(0, one), (1, two)])
    assert len(list(path.iterdir())) == 2
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    again = folder(cache, spec, path)
    for prompt, beyond, expected in (
        (one, 0, one),
        ([*one, 5, 6], 0, one),
        (two, 0, two),
        (two, 200, two),
        (two, 231, None),
        (one[:120], 100, one),
        (one[:19], 0, None),
        ([7, 7, 7], 0, None),
    ):
        found = again.longest(prompt, beyond=beyond, context=CONTEXT)
        assert (None if found is None else found.tokens.tolist()) == expected
    assert again.longest(one, beyond=0, context=199) is None
    found = again.longest(two, beyond=0, context=CONTEXT)
    assert found is not None
    expected = contents(cache, 1)
    assert again.load(found, cache, 0) == two
    assert torch.equal(contents(cache, 0), expected)


def test_what_goes_on_replaces_what_it_goes_on_from(spec: Any, tmp_path: Path) -> None:
    cache, known = make(spec), list(range(300))
    kept = folder(cache, spec, tmp_path)
    for length in (99, 150, 140, 160, 165, 300):  # too short, saved, part of it, not enough new twice, new
        cache.clear(0)
        fill(cache, 0, known[:length])
        kept.save(cache, [(0, known[:length])])
        lengths = [len(saved.read_header(path).tokens) for path in tmp_path.iterdir()]
        assert lengths == {99: [], 300: [300]}.get(length, [150])


def test_the_folder_stays_small_and_keeps_what_was_used_last(spec: Any, tmp_path: Path) -> None:
    cache, chats = make(spec), [list(range(start, start + 200)) for start in range(0, 800, 200)]
    fill(cache, 0, chats[0])
    kept = folder(cache, spec, tmp_path)
    kept.save(cache, [(0, chats[0])])
    (first,) = tmp_path.iterdir()
    size = first.stat().st_size
    kept = folder(cache, spec, tmp_path, limit=2 * size + size // 2)
    for age, chat in enumerate(chats[1:]):
        for path in tmp_path.iterdir():
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 100))
        found = kept.longest(chats[0], beyond=0, context=CONTEXT)
        assert found is not None
        assert kept.load(found, cache, 1) == chats[0]  # used, so it stays
        cache.clear(0)
        fill(cache, 0, chat)
        kept.save(cache, [(0, chat)])
        assert len(list(tmp_path.iterdir())) == 2, age
        assert first.exists()
    stale = tmp_path / f".x{saved.TEMPORARY}"
    stale.write_bytes(b"x")
    kept.save(cache, [])
    assert stale.exists()
    os.utime(stale, (0, 0))
    kept.save(cache, [])
    assert not stale.exists()


def test_what_cannot_be_used_or_saved_is_told_and_harms_nobody(
    spec: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, tokens = make(spec), list(range(200))
    fill(cache, 0, tokens)
    kept = folder(cache, spec, tmp_path)
    kept.save(cache, [(0, tokens)])
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    found = kept.longest(tokens, beyond=0, context=CONTEXT)
    assert found is not None
    assert kept.load(found, cache, 1) == []
    assert "checksum" in caplog.text
    assert not file.exists()
    assert kept.longest(tokens, beyond=0, context=CONTEXT) is None
    kept.save(cache, [(0, tokens)])
    file.write_bytes(b"junk")
    assert folder(cache, spec, tmp_path).longest(tokens, beyond=0, context=CONTEXT) is None
    assert not file.exists()
    with disk_of(1000):
        kept.save(cache, [(0, [*tokens[:-1], 7])])
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(saved_folder, "_RESERVE", 1 << 60)
    folder(cache, spec, tmp_path).save(cache, [(0, tokens)])
    assert "no room" in caplog.text
    assert not list(tmp_path.iterdir())


def test_another_recipes_files_are_left_alone(spec: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache, tokens = make(spec), list(range(200))
    fill(cache, 0, tokens)
    folder(cache, spec, tmp_path).save(cache, [(0, tokens)])
    (file,) = tmp_path.iterdir()
    with caplog.at_level("INFO"):
        other = SavedCaches(tmp_path, about(cache, spec, version="9"), smallest=100, gain=20)
    assert "another version" in caplog.text
    assert other.longest(tokens, beyond=0, context=CONTEXT) is None
    assert file.exists()


def test_headers_are_plain_json(file: Path) -> None:
    data = file.read_bytes()
    length = int.from_bytes(data[8:16], "little")
    header = json.loads(data[16 : 16 + length])
    assert header.keys() == {"format", "about", "tokens", "paged"}
    assert header["about"]["recipe"] == {"bits": 4, "method": "rtn"}
