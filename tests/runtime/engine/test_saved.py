"""Saved caches: bit-exact round trips, refusals with a reason, and no partial files."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.store.layout import MANIFEST
from models.store.manifest import content_of
from runtime.backends.reference.cache import ReferenceCache
from runtime.engine import saved
from runtime.engine.saved import About, SavedCaches
from runtime.errors import RequestError, SavedCacheError
from runtime.kv.kinds import KINDS, PARTS, KVKind
from runtime.wire.answers import Holding
from tests.runtime.conftest import make_spec

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


def about(cache: ReferenceCache, spec: Any, /, *, prompts: dict[str, int] | int = 0, **changes: Any) -> About:
    made = About.of(cache, spec, model="abc" * 20, recipe={"bits": 4, "method": "rtn"}, prompts=prompts)
    return replace(made, **changes)


@pytest.fixture
def spec() -> Any:
    return make_spec(**SHAPE)


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
        ({"prompts": 1024}, "another compensation of prompts"),
        ({"prompts": {"qkv": 1024}}, "another compensation of prompts"),
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
    folder(cache, spec, path).save(cache, [(0, one, None), (1, two, "chat")])
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
    assert found.chat == "chat"
    expected = contents(cache, 1)
    assert again.load(found, cache, 0) == two
    assert torch.equal(contents(cache, 0), expected)


def test_what_goes_on_replaces_what_it_goes_on_from(spec: Any, tmp_path: Path) -> None:
    cache, known = make(spec), list(range(300))
    kept = folder(cache, spec, tmp_path)
    for length in (99, 150, 140, 160, 165, 300):  # too short, saved, part of it, not enough new twice, new
        cache.clear(0)
        fill(cache, 0, known[:length])
        kept.save(cache, [(0, known[:length], None)])
        lengths = [len(saved.read_header(path).tokens) for path in tmp_path.iterdir()]
        assert lengths == {99: [], 300: [300]}.get(length, [150])


def test_the_folder_stays_small_and_keeps_what_was_used_last(spec: Any, tmp_path: Path) -> None:
    cache, chats = make(spec), [list(range(start, start + 200)) for start in range(0, 800, 200)]
    fill(cache, 0, chats[0])
    kept = folder(cache, spec, tmp_path)
    kept.save(cache, [(0, chats[0], None)])
    (first,) = tmp_path.iterdir()
    size = first.stat().st_size
    kept = folder(cache, spec, tmp_path, limit=2 * size + size // 2)
    for age, chat in enumerate(chats[1:]):
        for path in tmp_path.iterdir():
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 100))
        found = kept.longest(chats[0], beyond=0, context=CONTEXT)
        assert found is not None
        cache.clear(0)
        fill(cache, 0, chat)
        kept.save(cache, [(0, chat, None)])  # what gives way to it, before it is read
        assert kept.load(found, cache, 1) == chats[0]  # used, so it stays
        assert len(list(tmp_path.iterdir())) == 2, age
        assert first.exists()
        assert kept.longest(chat, beyond=0, context=CONTEXT) is not None, "the newest gives way to older ones"
    stale = tmp_path / f".{os.getpid()}-x{saved.TEMPORARY}"
    stale.write_bytes(b"x")
    kept.save(cache, [(0, chat, None)])
    assert stale.exists()
    os.utime(stale, (0, 0))
    kept.save(cache, [(0, chat, None)])
    assert not stale.exists()


def test_what_cannot_be_used_or_saved_is_told_and_harms_nobody(
    spec: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, tokens = make(spec), list(range(200))
    fill(cache, 0, tokens)
    kept = folder(cache, spec, tmp_path)
    kept.save(cache, [(0, tokens, None)])
    (file,) = tmp_path.iterdir()
    *content, last = file.read_bytes()
    file.write_bytes(bytes([*content, last ^ 1]))
    found = kept.longest(tokens, beyond=0, context=CONTEXT)
    assert found is not None
    assert kept.load(found, cache, 1) == []
    assert "checksum" in caplog.text
    assert not file.exists()
    assert kept.longest(tokens, beyond=0, context=CONTEXT) is None
    kept.save(cache, [(0, tokens, None)])
    file.write_bytes(b"junk")
    assert folder(cache, spec, tmp_path).longest(tokens, beyond=0, context=CONTEXT) is None
    assert not file.exists()
    with disk_of(1000):
        kept.save(cache, [(0, [*tokens[:-1], 7], None)])
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(saved, "_RESERVE", 1 << 60)
    folder(cache, spec, tmp_path).save(cache, [(0, tokens, None)])
    assert "no room" in caplog.text
    assert not list(tmp_path.iterdir())


def test_another_recipes_files_are_left_alone(spec: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache, tokens = make(spec), list(range(200))
    fill(cache, 0, tokens)
    folder(cache, spec, tmp_path).save(cache, [(0, tokens, None)])
    (file,) = tmp_path.iterdir()
    with caplog.at_level("INFO"):
        other = SavedCaches(tmp_path, about(cache, spec, version="9"), smallest=100, gain=20)
    assert "another version" in caplog.text
    assert other.longest(tokens, beyond=0, context=CONTEXT) is None
    assert file.exists()


@pytest.fixture
def three(spec: Any, tmp_path: Path) -> tuple[SavedCaches, dict[str, Path]]:
    """The chats `one` and `two`, and one that nobody named, in a folder; and their files."""
    cache, files = make(spec), {}
    kept = folder(cache, spec, tmp_path)
    for start, chat in ((0, "one"), (200, "two"), (400, None)):
        cache.clear(0)
        fill(cache, 0, list(range(start, start + 150)))
        kept.save(cache, [(0, list(range(start, start + 150)), chat)])
        (files[str(chat)],) = set(tmp_path.iterdir()) - set(files.values())
    return kept, files


def test_a_chats_files_are_deleted_with_it(three: tuple[SavedCaches, dict[str, Path]], tmp_path: Path) -> None:
    kept, files = three
    size = files["one"].stat().st_size
    assert saved.holding(tmp_path) == Holding(files=3, bytes=sum(path.stat().st_size for path in files.values()))
    assert saved.forget(tmp_path, chat="nobody") == Holding()
    assert saved.forget(tmp_path, chat="one") == Holding(files=1, bytes=size)
    assert sorted(tmp_path.iterdir()) == sorted([files["two"], files["None"]])
    assert kept.longest(list(range(150)), beyond=0, context=CONTEXT) is None, "it must not be looked for any more"
    assert kept.longest(list(range(200, 350)), beyond=0, context=CONTEXT) is not None


def test_a_deleted_chat_can_be_saved_again(
    spec: Any, three: tuple[SavedCaches, dict[str, Path]], tmp_path: Path
) -> None:
    kept, files = three
    saved.forget(tmp_path, chat="one")
    cache = make(spec)
    fill(cache, 0, list(range(150)))
    kept.save(cache, [(0, list(range(150)), "new")])
    assert saved.read_header(files["one"]).chat == "new"


def test_a_file_that_cannot_be_read_goes_with_any_chat(
    three: tuple[SavedCaches, dict[str, Path]], tmp_path: Path
) -> None:
    _, files = three
    files["two"].write_bytes(files["two"].read_bytes().replace(b'"format":3', b'"format":1'))
    assert saved.forget(tmp_path, chat="one").files == 2
    assert list(tmp_path.iterdir()) == [files["None"]]


def test_a_models_files_are_deleted_with_it(spec: Any, tmp_path: Path) -> None:
    chats, cache = tmp_path / "chats", make(spec)
    fill(cache, 0, list(range(150)))
    models = {}
    for name in ("kept", "removed", "replaced"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / MANIFEST).write_text(name)
        content = content_of(tmp_path / "models" / name)
        assert content is not None
        models[name] = SavedCaches(chats, about(cache, spec, model=content), smallest=100, gain=20)
        models[name].save(cache, [(0, list(range(150)), None)])
    (tmp_path / "models" / "a file").touch()
    with saved.forgetting(chats, tmp_path / "models"):
        (tmp_path / "models" / "removed" / MANIFEST).unlink()
        (tmp_path / "models" / "replaced" / MANIFEST).write_text("something else")
        assert len(list(chats.iterdir())) == 3
    assert [kept.longest(list(range(150)), beyond=0, context=CONTEXT) is None for kept in models.values()] == [
        False, True, True,
    ]  # fmt: skip
    assert len(list(chats.iterdir())) == 1
    with saved.forgetting(chats, tmp_path / "nothing"):
        pass
    assert len(list(chats.iterdir())) == 1


def test_nothing_is_saved_of_a_model_that_was_deleted(spec: Any, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / MANIFEST).write_text("x")
    cache = make(spec)
    fill(cache, 0, list(range(150)))
    for content, count in (("else", 0), (content_of(model), 1)):
        kept = SavedCaches(tmp_path / "chats", about(cache, spec, model=content), model=model, smallest=100, gain=20)
        kept.save(cache, [(0, list(range(150)), None)])
        assert saved.holding(tmp_path / "chats").files == count
    (model / MANIFEST).unlink()
    fill(cache, 0, list(range(250)))
    kept.save(cache, [(0, list(range(250)), None)])
    assert [len(saved.read_header(path).tokens) for path in (tmp_path / "chats").iterdir()] == [150]


def test_all_can_be_deleted_what_is_being_written_included(
    three: tuple[SavedCaches, dict[str, Path]], tmp_path: Path
) -> None:
    running, gone, other = (
        tmp_path / f".{pid}-x{saved.TEMPORARY}" for pid in (os.getpid(), 2**22 + 1, "what")
    )  # no process has a number that large
    for path in (running, gone, other):
        path.touch()
    (tmp_path / "something of a person").touch()
    saved.forget(tmp_path, chat="one")
    assert [path.exists() for path in (running, gone, other)] == [True, False, False]
    assert saved.forget(tmp_path).files == 3
    assert [path.name for path in tmp_path.iterdir()] == ["something of a person"]
    assert saved.forget(tmp_path) == saved.holding(tmp_path / "nowhere") == Holding()


def test_what_a_crash_left_is_deleted_at_the_next_start(spec: Any, tmp_path: Path) -> None:
    left = tmp_path / f".{2**22 + 1}-x{saved.TEMPORARY}"
    left.touch()
    folder(make(spec), spec, tmp_path)
    assert not left.exists()


def test_a_file_that_cannot_be_deleted_is_told(
    three: tuple[SavedCaches, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(SavedCacheError, match=r"cannot delete the saved cache .*: Operation not permitted"):
        saved.forget(tmp_path, chat="one")


def test_saving_ends_in_time_and_a_cache_beyond_the_limit_is_not_begun(
    spec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = make(spec)
    fill(cache, 0, list(range(150)))
    folder(cache, spec, tmp_path, limit=1000).save(cache, [(0, list(range(150)), None)])
    assert "no room" in caplog.text
    monkeypatch.setattr(saved, "SAVING_S", -1.0)
    folder(cache, spec, tmp_path).save(cache, [(0, list(range(150)), None)])
    assert not list(tmp_path.iterdir())


def test_a_folder_that_was_open_to_others_is_closed(spec: Any, tmp_path: Path) -> None:
    (tmp_path / "chats").mkdir(mode=0o755)
    cache = make(spec)
    fill(cache, 0, list(range(150)))
    folder(cache, spec, tmp_path / "chats").save(cache, [(0, list(range(150)), None)])
    assert stat.S_IMODE((tmp_path / "chats").stat().st_mode) == 0o700
