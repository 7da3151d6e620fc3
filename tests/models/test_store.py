"""The store: listing, opening, removing, verifying; damage of every kind is reported and contained."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from models.errors import ModelNotFoundError, StoreError
from models.quantize import quantize
from models.recipe import Recipe
from models.store import Store, StoredModel, durable, manifest
from models.store.store import check_name, default_name, folder_of, name_of
from tests.models.conftest import TEXT, write_checkpoint


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the models `small` (files under 1 MiB) and `org/wide` (a head above 1 MiB)."""
    folder = tmp_path_factory.mktemp("finished")
    store = Store(folder / "store")
    for name, vocabulary in (("small", 96), ("org/wide", 12000)):
        source = write_checkpoint(folder / "source", vocabulary=vocabulary)
        quantize(source, store, Recipe(bits=3, group_size=32), name=name, calibration=TEXT)
    return store.root


@pytest.fixture
def store(finished: Path, tmp_path: Path) -> Store:
    shutil.copytree(finished, tmp_path / "store")
    return Store(tmp_path / "store")


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def test_list_and_info(store: Store) -> None:
    assert [(info.name, info.source, info.recipe.bits) for info in store.list()] == [
        ("org/wide", "source", 3),
        ("small", "source", 3),
    ]
    assert store.damaged() == []
    assert store.info("org/wide").path == store.root / "org--wide"
    assert "small" in store
    assert "other" not in store


def test_an_absent_store_is_empty_and_stays_absent(tmp_path: Path) -> None:
    store = Store(tmp_path / "none")
    assert store.list() == store.damaged() == []
    with pytest.raises(ModelNotFoundError, match="is empty"):
        store.open("model")
    with pytest.raises(ModelNotFoundError):
        store.remove("model")
    assert not store.root.exists()


def test_an_unknown_name_names_the_known_ones(store: Store) -> None:
    with pytest.raises(ModelNotFoundError, match="no stored model 'smal'; the store has: org/wide, small"):
        store.open("smal")


def test_folders_are_private(store: Store, finished: Path) -> None:
    for folder in (finished, finished / "small", finished / ".work", finished / ".locks"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_tensors_are_mapped_not_copied(store: Store) -> None:
    model = store.open("small")
    for array in (
        model.embedding(),
        model.vector("norm"),
        model.linear("head").codes,
        model.linear("layers.1.down").scales,
        model.linear("layers.1.down").residual.codes,
    ):
        assert not array.flags.writeable
        assert not array.flags.owndata
        assert array.flags.aligned
    assert model.linear("head").codes.ctypes.data % 64 == 0
    for name in ("layers.2.qkv", "embed", "norm"):
        with pytest.raises(KeyError):
            model.linear(name)
    with pytest.raises(StoreError, match="has no tensor"):
        model.vector("layers.0.nothing")


def test_the_safetensors_library_reads_the_files(store: Store) -> None:
    model = store.open("small")
    tensors = load_file(model.path / "block-00001.safetensors")
    np.testing.assert_array_equal(tensors["layers.1.qkv.codes"], model.linear("layers.1.qkv").codes)
    np.testing.assert_array_equal(load_file(model.path / "outer.safetensors")["embed"], model.embedding())


def test_a_bundled_folder_opens_anywhere(store: Store, tmp_path: Path) -> None:
    shutil.copytree(store.path("small"), tmp_path / "elsewhere" / "demo")
    for path in (tmp_path / "elsewhere" / "demo").iterdir():
        path.chmod(0o400)
    model = StoredModel.open_folder(tmp_path / "elsewhere" / "demo")
    assert model.name == "demo"
    assert model.tokenizer_path == tmp_path / "elsewhere" / "demo"
    model.verify()


def test_remove_leaves_the_others(store: Store) -> None:
    store.remove("org/wide")
    assert [info.name for info in store.list()] == ["small"]
    assert not any((store.root / ".work").iterdir())
    store.verify("small")


def test_remove_takes_damaged_models_links_and_unfinished_work(store: Store, tmp_path: Path) -> None:
    (store.path("small") / "manifest.json").unlink()
    store.remove("small")
    shutil.move(store.path("org/wide"), tmp_path / "kept")
    store.path("org/wide").symlink_to(tmp_path / "kept")
    assert [info.name for info in store.list()] == ["org/wide"]
    store.remove("org/wide")
    assert (tmp_path / "kept" / "manifest.json").exists()
    store.work_folder("half").mkdir()
    store.remove("half")
    assert not any((store.root / ".work").iterdir())


def test_a_replacement_that_was_interrupted_leaves_the_old_model(store: Store) -> None:
    """Between its two renames; whoever lists the store or names the model puts it back."""
    for look in (store.list, lambda: store.open("small")):
        store.path("small").rename(store.work_folder("small.replaced"))
        look()
        assert "small" in [info.name for info in store.list()]
        assert store.path("small").is_dir()


def test_remove_waits_for_nobody(store: Store) -> None:
    with store.lock("small"), pytest.raises(StoreError, match="another process"):
        store.remove("small")
    assert "small" in store


def test_a_lock_of_another_process_is_seen(store: Store) -> None:
    code = (
        "import sys; from pathlib import Path; from models.store import Store\n"
        "with Store(Path(sys.argv[1])).lock('small'): print('held', flush=True); sys.stdin.read()"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", code, str(store.root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(StoreError, match="another process"):
            store.remove("small")
        other.kill()
    store.remove("small")


OUTSIDE = ("../small", "/etc", "org/../small", "a/b/c", ".work", ".locks", "", "..", "a\\b", "ü", "a/", "/a")


@pytest.mark.parametrize("name", [*OUTSIDE, "-a", "a-", "a..b", "a--b", "a\n", "a\0", "~", "con:", "x" * 151])
def test_names_cannot_leave_the_store(finished: Path, name: str) -> None:
    store = Store(finished)
    for action in (store.open, store.info, store.remove, store.verify, store.path, check_name):
        with pytest.raises(StoreError, match="not a good model name"):
            action(name)
    assert len(store.list()) == 2


ENTRY = {"bytes": 0, "sha256": "", "sample": "00000000"}


def reworded(folder: Path, part: str, key: str, value: object) -> None:
    """Change a value of the manifest, checksum included."""
    body = json.loads((folder / "manifest.json").read_text())
    del body["sha256"]
    body[part][key] = value
    (folder / "manifest.json").write_text(json.dumps({**body, "sha256": manifest._digest(body)}))


def described(path: Path) -> None:
    """Bring what the manifest says of a file up to date."""
    old = manifest.Manifest.read(path.parent)
    files = {**old.files, path.name: manifest.describe(path)}
    manifest.Manifest(summary=old.summary, files=files).write(path.parent)


def piped(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def linked(path: Path, target: Path) -> None:
    path.unlink()
    path.symlink_to(target)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing file": (lambda path: (path / "block-00001.safetensors").unlink(), r"block-00001\.safetensors is missing"),
    "truncated file": (
        lambda path: os.truncate(path / "block-00001.safetensors", 1000),
        r"block-00001\.safetensors is truncated: 1,000 bytes instead of",
    ),
    "longer file": (
        lambda path: (path / "outer.safetensors").write_bytes((path / "outer.safetensors").read_bytes() + b"x"),
        r"outer\.safetensors is damaged",
    ),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), r"is not a stored model: it has no manifest\.json"),
    "empty manifest": (lambda path: (path / "manifest.json").write_text(""), r"manifest\.json is damaged"),
    "changed manifest": (
        lambda path: (path / "manifest.json").write_text(
            (path / "manifest.json").read_text().replace('"context": 512', '"context": 513')
        ),
        r"manifest\.json is damaged \(its checksum does not match\)",
    ),
    "foreign manifest": (lambda path: (path / "manifest.json").write_text("[1]"), "belongs to another program"),
    "newer manifest": (
        lambda path: (path / "manifest.json").write_text('{"format": "lowbit-chat-model", "version": 2}'),
        "has format version 2, this program reads 1",
    ),
    "nested manifest": (lambda path: (path / "manifest.json").write_text("[" * 200_000), "it is nested too deeply"),
    "a word for a number": (lambda path: reworded(path, "summary", "context", "all of it"), "context is 'all of it'"),
    "a word for a size": (lambda path: reworded(path, "files", "config.json", {**ENTRY, "bytes": "9"}), "bytes is '9'"),
    "a pipe for the manifest": (lambda path: piped(path / "manifest.json"), "it is not a regular file"),
    "a pipe": (lambda path: (piped(path / "x"), reworded(path, "files", "x", ENTRY)), "x is a link or a device"),
    "an endless device": (lambda path: linked(path / "manifest.json", Path("/dev/zero")), "it is not a regular file"),
    "a link that leads outside": (
        lambda path: linked(path / "config.json", path.parent / "org--wide/config.json"),
        r"config\.json is a link or a device; a stored model is files in a folder",
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_the_others_are_listed(store: Store, damage: str) -> None:
    action, message = DAMAGES[damage]
    action(store.path("small"))
    assert [info.name for info in store.list()] == ["org/wide"]
    (bad,) = store.damaged()
    assert bad.folder == "small"
    for attempt in (store.open, store.info, store.verify):
        with pytest.raises(StoreError, match=message):
            attempt("small")
    store.open("org/wide")
    store.verify("org/wide")


@pytest.mark.parametrize("file", ["block-00000.safetensors", "config.json", "recipe.json", "tokenizer.json"])
def test_a_flipped_bit_in_a_small_file_is_seen_when_opened(store: Store, file: str) -> None:
    for place in (0, 200, -1):
        flip(store.path("small") / file, place)
        for attempt in (store.open, store.verify):
            with pytest.raises(StoreError, match="damaged"):
                attempt("small")
        flip(store.path("small") / file, place)
    store.verify("small")


def test_a_flipped_bit_in_a_large_file_is_seen_by_verify(store: Store) -> None:
    path = store.path("org/wide") / "outer.safetensors"
    assert path.stat().st_size > 1 << 20
    flip(path, 100_001)  # between the sampled pages
    store.open("org/wide")
    with pytest.raises(StoreError, match=r"outer\.safetensors is damaged \(its sha256 does not match\)"):
        store.verify("org/wide")
    for place in (0, -1):
        flip(path, place)
        with pytest.raises(StoreError, match="checksum"):
            store.open("org/wide")
        flip(path, place)


def test_verify_reports_how_far_it_is(store: Store) -> None:
    seen: list[tuple[int, int]] = []
    store.verify("org/wide", lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] == store.info("org/wide").summary.disk_bytes


def test_a_model_may_lack_what_is_known_of_its_keys_but_not_half_of_it(store: Store) -> None:
    found = store.open("small").key_statistics(1)
    assert found is not None
    assert found.mean.shape == found.axis.shape == (2, 16)
    path = store.path("small")
    tensors = load_file(path / "block-00001.safetensors")
    for left_out, fits in ((["key_mean", "query_axis"], True), (["key_mean"], False)):
        kept = {name: x for name, x in tensors.items() if name.rpartition(".")[2] not in left_out}
        save_file(kept, path / "block-00001.safetensors")
        described(path / "block-00001.safetensors")
        if fits:
            assert store.open("small").key_statistics(1) is None
        else:
            with pytest.raises(StoreError, match=r"block-00001\.safetensors does not belong .*key_mean"):
                store.open("small")


def test_tensors_of_another_model_are_refused(store: Store) -> None:
    """Checksums agree, but the blocks were made for another shape."""
    path = store.path("small")
    shutil.copy(store.path("org/wide") / "outer.safetensors", path / "outer.safetensors")
    described(path / "outer.safetensors")
    with pytest.raises(StoreError, match=r"outer\.safetensors does not belong to this model or is damaged \(embed"):
        store.open("small")


def test_manifest_cannot_name_files_outside(store: Store) -> None:
    path = store.path("small")
    body = manifest.Manifest.read(path)
    files = {**body.files, "../../secret": body.files["config.json"]}
    manifest.Manifest(summary=body.summary, files=files).write(path)
    with pytest.raises(StoreError, match="lies outside the folder"):
        store.open("small")


def test_strangers_in_the_store_are_skipped(store: Store) -> None:
    (store.root / "notes.txt").write_text("hello")
    (store.root / "a b").mkdir()
    (store.root / ".hidden").mkdir()
    assert len(store.list()) == 2
    assert sorted(bad.folder for bad in store.damaged()) == ["a b", "notes.txt"]


def test_recipe_with_an_unknown_key(store: Store) -> None:
    path = store.path("small") / "recipe.json"
    body = json.loads(path.read_text())
    body["recipe"]["surprise"] = 1
    path.write_text(json.dumps(body))
    described(path)
    with pytest.raises(StoreError, match="unknown recipe keys: surprise"):
        store.info("small")


@pytest.mark.parametrize(
    ("number", "message"),
    [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "read-only"), (errno.EACCES, "permission denied")],
)
def test_what_the_disk_refuses_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, message: str
) -> None:
    path = tmp_path / "file"
    durable.write_file(path, [b"old"])

    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(durable.os, "fsync", refuse)
    with pytest.raises(StoreError, match=message):
        durable.write_file(path, [b"new"])
    monkeypatch.undo()
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"


def test_a_real_size_limit_is_explained(tmp_path: Path) -> None:
    """The operating system itself refuses to write past a limit."""
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from models.store.durable import write_file\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "write_file(Path(sys.argv[1]), [bytes(4096)])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "file")]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert "StoreError: cannot write" in done.stderr
    assert "larger than this disk or user may have" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_nothing_here_imports_torch() -> None:
    code = "import sys, models.store, models.recipe, models.progress, models.quantize; print('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@given(st.text(max_size=40))
def test_a_folder_lies_directly_in_the_store_and_leads_back(name: str) -> None:
    try:
        folder = folder_of(name)
    except StoreError:
        return
    assert Path(folder).name == folder
    assert not folder.startswith(".")
    assert (Path("/store") / folder).resolve().parent == Path("/store")
    assert name_of(folder) == name


@pytest.mark.parametrize("name", ["a", "Qwen/Qwen2.5-0.5B", "model_1.0-x", "9"])
def test_good_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    ("folder", "recipe", "name"),
    [
        ("english3m", Recipe(bits=3), "english3m-gptq-3bit"),
        ("My Model (v2)", Recipe(), "My-Model-v2-gptq-4bit"),
        ("...", Recipe(), "model-gptq-4bit"),
        ("a--b..c", Recipe(), "a-b.c-gptq-4bit"),
        ("m", Recipe(group_size=128, residual_bits=8, head_bits=3), "m-gptq-4bit-g128-r8-h3"),
        ("m", Recipe(group_size=128, smooth_attention=True), "m-gptq-4bit-g128-sa"),
        ("m", Recipe.usual("qoq"), "m-qoq-4bit"),
        ("m", Recipe.usual("qoq", group_size=0, rotate=True), "m-qoq-4bit-g0-rotate"),
        ("m", Recipe.usual("qoq", clip=False), "m-qoq-4bit-no-clip"),
        ("models--Qwen--Qwen2.5-0.5B/snapshots/0123abc", Recipe(bits=3), "Qwen/Qwen2.5-0.5B-gptq-3bit"),
        ("models--gpt/snapshots/0123abc", Recipe(), "gpt-gptq-4bit"),
        ("models--a--b-GGUF/snapshots/0123abc/b-Q8_0.gguf", Recipe(), "a/b-GGUF-gptq-4bit"),
        ("models--a--b-GGUF/snapshots/0123abc/b.Q4_K_M.gguf", Recipe(), "a/b-GGUF-Q4_K_M-gptq-4bit"),
        ("x" * 200, Recipe(), "x" * 60 + "-gptq-4bit"),
    ],
)
def test_default_names(tmp_path: Path, folder: str, recipe: Recipe, name: str) -> None:
    assert default_name(tmp_path / folder, recipe) == name
