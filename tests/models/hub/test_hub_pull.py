"""Pulling from a healthy hub: the files chosen, where they are stored, and sharing of the cache."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from filelock import FileLock
from huggingface_hub import constants

from models.errors import CancelledError, CheckpointError, HubError, HubUnreachableError, StoreError
from models.hub import Policy, cached, is_hub_name, pull
from models.hub.blob import Partial
from models.plain_tokenizer import TOOL_TEMPLATE
from models.progress import Progress
from tests.models.conftest import content

NAME = "owner/Tiny-1.5"
QUICK = Policy(connect_s=5, stall_s=5, first_delay_s=0.02, longest_delay_s=0.05, attempts=4, first_attempts=3)
NEEDED = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
}


def test_takes_what_a_checkpoint_needs_and_nothing_else(hub: Any, cache: Path, sharded: dict[str, bytes]) -> None:
    commit = hub.add(NAME, sharded)
    reports: list[Progress] = []
    folder = pull(NAME, endpoint=hub.url, cache_dir=cache, progress=reports.append)
    assert folder == cache / "models--owner--Tiny-1.5" / "snapshots" / commit
    assert content(folder) == {name: sharded[name] for name in NEEDED}
    assert (folder.parents[1] / "refs" / "main").read_text() == commit
    assert Counter(entry.file for entry in hub.sent()) == Counter(NEEDED)
    assert not list(cache.rglob("*.incomplete"))
    assert not list(cache.rglob("*.draft"))
    total = float(sum(len(sharded[name]) for name in NEEDED))
    download = [report for report in reports if report.phase == "download"]
    assert {(report.total, report.unit) for report in download} == {(total, "bytes")}
    done = [report.done for report in download]
    assert done == sorted(done)
    assert done[-1] == total, "every byte is counted once"


def test_takes_a_single_file_and_what_is_empty_or_there_twice(hub: Any, cache: Path) -> None:
    files = {"config.json": b"{}", "generation_config.json": b"{}", "vocab.txt": b"", "model.safetensors": b"weights"}
    files |= {"chat_template.jinja": b"{{ messages }}", TOOL_TEMPLATE: b"{{ tools }}"}
    hub.add(NAME, {**files, "model-00001-of-00009.safetensors": b"stray"})
    assert content(pull(NAME, endpoint=hub.url, cache_dir=cache)) == files


def test_later_pulls_take_only_what_changed(hub: Any, cache: Path, sharded: dict[str, bytes]) -> None:
    hub.add(NAME, sharded)
    old = pull(NAME, endpoint=hub.url, cache_dir=cache)
    hub.log.clear()
    assert pull(NAME, endpoint=hub.url, cache_dir=cache) == old
    assert not hub.sent()
    hub.add(NAME, {**sharded, "config.json": b'{"new": 1}'})
    new = pull(NAME, endpoint=hub.url, cache_dir=cache)
    assert [entry.file for entry in hub.sent()] == ["config.json"]
    assert (new / "config.json").read_bytes() == b'{"new": 1}'
    assert (old / "config.json").read_bytes() == sharded["config.json"]
    assert cached(NAME, cache_dir=cache) == new


@pytest.mark.parametrize("revision", ["v1.0", "refs/pr/1", "commit"])
def test_revisions(hub: Any, cache: Path, sharded: dict[str, bytes], revision: str) -> None:
    commit = hub.add(NAME, sharded, "v1.0" if revision == "commit" else revision)
    asked = commit if revision == "commit" else revision
    folder = pull(NAME, asked, endpoint=hub.url, cache_dir=cache)
    assert folder.name == commit
    assert cached(NAME, asked, cache_dir=cache) == folder
    assert cached(NAME, cache_dir=cache) is None
    assert (folder.parents[1] / "refs" / asked).exists() == (revision != "commit")


def test_huggingface_hub_finds_it_and_downloads_only_the_rest(hub: Any, cache: Path, sharded: dict[str, bytes]) -> None:
    commit = hub.add(NAME, sharded)
    folder = pull(NAME, endpoint=hub.url, cache_dir=cache)
    assert huggingface_hub.snapshot_download(NAME, cache_dir=cache, local_files_only=True) == str(folder)
    assert huggingface_hub.try_to_load_from_cache(NAME, "config.json", cache_dir=cache) == str(folder / "config.json")
    scan = huggingface_hub.scan_cache_dir(cache)
    assert not scan.warnings
    assert not scan.incomplete_files
    (repo,) = scan.repos
    (found,) = repo.revisions
    assert (repo.repo_id, repo.repo_type, found.commit_hash, found.refs) == (NAME, "model", commit, {"main"})
    assert {file.file_name for file in found.files} == NEEDED
    assert all(file.blob_path.parent.name == "blobs" for file in found.files)
    hub.log.clear()
    assert huggingface_hub.snapshot_download(NAME, cache_dir=cache, endpoint=hub.url, token=False) == str(folder)
    assert {entry.file for entry in hub.sent()} == set(sharded) - NEEDED
    assert content(folder) == sharded


def test_what_huggingface_hub_downloaded_is_not_downloaded_again(
    hub: Any, cache: Path, sharded: dict[str, bytes]
) -> None:
    hub.add(NAME, sharded)
    folder = huggingface_hub.snapshot_download(NAME, cache_dir=cache, endpoint=hub.url, token=False)
    hub.log.clear()
    assert str(pull(NAME, endpoint=hub.url, cache_dir=cache)) == folder
    assert not hub.sent()


@pytest.mark.parametrize("how", ["asked for", "refused by the disk"])
def test_without_links(
    hub: Any, cache: Path, sharded: dict[str, bytes], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(1, "Operation not permitted")

    if how == "asked for":
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_SYMLINKS", True)
    else:
        monkeypatch.setattr(Path, "symlink_to", refuse)
        monkeypatch.setattr(os, "symlink", refuse)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_SYMLINKS_WARNING", True)
    commit = hub.add(NAME, {**sharded, "added_tokens.json": sharded["generation_config.json"]})
    folder = pull(NAME, endpoint=hub.url, cache_dir=cache)
    needed = NEEDED | {"added_tokens.json"}
    assert {path.name for path in folder.iterdir()} == needed
    assert not any(path.is_symlink() for path in folder.iterdir())
    assert not list((folder.parents[1] / "blobs").iterdir())
    assert huggingface_hub.snapshot_download(NAME, cache_dir=cache, local_files_only=True) == str(folder)
    assert not huggingface_hub.scan_cache_dir(cache).warnings
    hub.log.clear()
    assert pull(NAME, endpoint=hub.url, cache_dir=cache).name == commit
    assert not hub.sent()


def test_a_damaged_blob_and_a_broken_link_are_mended(hub: Any, cache: Path, sharded: dict[str, bytes]) -> None:
    assert cached(NAME, cache_dir=cache) is None
    hub.add(NAME, sharded)
    folder = pull(NAME, endpoint=hub.url, cache_dir=cache)
    shard, config = folder / "model-00002-of-00002.safetensors", folder / "config.json"
    assert cached(NAME, cache_dir=cache) == folder
    config.unlink()
    assert cached(NAME, cache_dir=cache) is None
    config.symlink_to("nowhere")
    assert cached(NAME, cache_dir=cache) is None
    shard.resolve().write_bytes(b"cut")
    pull(NAME, endpoint=hub.url, cache_dir=cache)
    assert content(folder) == {name: sharded[name] for name in NEEDED}


def test_two_pulls_at_once_share_the_work(hub: Any, cache: Path, sharded: dict[str, bytes]) -> None:
    hub.add(NAME, sharded)
    hub.faults.bytes_per_s = 3e6
    results: list[Path] = []
    threads = [
        threading.Thread(target=lambda: results.append(pull(NAME, endpoint=hub.url, cache_dir=cache))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    assert len(set(results)) == 1
    assert content(results[0]) == {name: sharded[name] for name in NEEDED}
    assert Counter(entry.file for entry in hub.sent()) == Counter(NEEDED)


def test_waiting_for_another_run_can_be_stopped(hub: Any, cache: Path, sharded: dict[str, bytes]) -> None:
    hub.add(NAME, sharded)
    digest = hashlib.sha256(sharded["tokenizer.json"]).hexdigest()
    locks = cache / ".locks" / "models--owner--Tiny-1.5"
    locks.mkdir(parents=True)
    reports: list[Progress] = []
    with FileLock(locks / f"{digest}.lock"), pytest.raises(CancelledError):
        pull(
            NAME,
            endpoint=hub.url,
            cache_dir=cache,
            progress=reports.append,
            cancelled=lambda: any("another program" in report.message for report in reports),
        )


def test_the_token_goes_to_the_hub_and_not_to_the_storage(
    hub: Any, cache: Path, sharded: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, sharded)
    hub.faults.token = "hf_secret"
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    pull(NAME, endpoint=hub.url, cache_dir=cache)
    assert {entry.authorization for entry in hub.log if not entry.storage} == {"Bearer hf_secret"}
    assert {entry.authorization for entry in hub.log if entry.storage} == {None}


def test_settings_of_huggingface_hub_are_honoured(
    hub: Any, tmp_path: Path, sharded: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that huggingface_hub reads when it is imported, in a process of their own."""
    commit = hub.add(NAME, sharded)
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(HubError, match="HF_HUB_OFFLINE"):
            pull(NAME, endpoint=hub.url, cache_dir=tmp_path)
    with monkeypatch.context() as patch:
        patch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
        patch.setenv("NO_PROXY", "")
        with pytest.raises(HubUnreachableError, match="no connection"):
            pull(NAME, endpoint=hub.url, cache_dir=tmp_path, policy=QUICK)
    assert not hub.log
    hub.faults.token = "hf_secret"
    code = f"from models.hub import pull; print(pull({NAME!r}))"
    env = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_secret", "LANG": "C"}
    env.pop("HF_HUB_CACHE", None)
    command, root = [sys.executable, "-W", "error", "-c", code], Path(__file__).resolve().parents[3]
    folder = tmp_path / "hf" / "hub" / "models--owner--Tiny-1.5" / "snapshots" / commit
    for extra in ({}, {"HF_HUB_OFFLINE": "1"}):
        done = subprocess.run(command, env={**env, **extra}, cwd=root, capture_output=True, text=True, check=False)
        assert (done.stdout.strip(), done.stderr) == (str(folder), "")


def test_a_hub_that_is_down_does_not_hide_a_complete_copy(hub: Any, cache: Path, sharded: dict[str, bytes]) -> None:
    hub.add(NAME, sharded)
    folder = pull(NAME, endpoint=hub.url, cache_dir=cache)
    hub.faults.always = ("/api/", 503, {})
    reports: list[Progress] = []
    assert pull(NAME, endpoint=hub.url, cache_dir=cache, policy=QUICK, progress=reports.append) == folder
    assert "the copy in the cache" in reports[-1].message


def test_importing_loads_nothing_heavy() -> None:
    code = "import sys, models.hub; print([n for n in ('httpx', 'huggingface_hub', 'filelock') if n in sys.modules])"
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["a/b", "Qwen/Qwen2.5-0.5B-Instruct", "01-ai/Yi_1.5", "_x/y", "a/b-GGUF:Q4_K_M"])
def test_names_of_the_hub(name: str) -> None:
    assert is_hub_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "demo",
        "a/b/c",
        "/a/b",
        "./b",
        "../b",
        "a/..",
        "a/.b",
        "a/b/",
        "a//b",
        "a\\b/c",
        "a--b/c",
        "a/b..c",
        "a/b.git",
        "a/b\n",
        "a/b?x=1",
        "a/b#c",
        "a/%2e%2e",
        "https://huggingface.co/a/b",
        "hf://a/b",
        "é/b",
        "a/" + "b" * 97,
    ],
)
def test_no_names_of_the_hub(name: str, cache: Path) -> None:
    assert not is_hub_name(name)
    with pytest.raises(HubError, match="not a name on the hub"):
        pull(name, cache_dir=cache)
    with pytest.raises(HubError, match="not a name on the hub"):
        cached(name, cache_dir=cache)
    assert not cache.exists()


@pytest.mark.parametrize(
    "revision", ["", "..", "a/../b", "/main", "main/", "a//b", "a b", "x" * 201, "a\x00", "a.lock"]
)
def test_no_revisions(revision: str, cache: Path) -> None:
    with pytest.raises(HubError, match="is not a revision"):
        pull(NAME, revision, cache_dir=cache)
    assert not cache.exists()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b"x"}, r"in safetensors or GGUF \(found: pytorch_model.bin\)"),
        ({"config.json": b"{}", "Tiny-Q4_K_M.gguf": b"x", "Tiny-Q3_K_S.gguf": b"x"}, r"few bits \(Q3_K_S, Q4_K_M\)"),
        ({"Tiny-Q8_0-00001-of-00002.gguf": b"x"}, "of which parts are missing"),
        ({"mmproj-Tiny-F16.gguf": b"x"}, "no GGUF file"),
        ({"config.json": b"{}", "adapter_model.safetensors": b"x"}, r"neither .* \(found: adapter_model.safetensors\)"),
        ({"model.safetensors": b"x"}, "no config.json"),
        ({}, "no config.json"),
        ({"config.json": b"{}", "model.safetensors.index.json": b"[]"}, "damaged"),
        (
            {"config.json": b"{}", "model.safetensors.index.json": b'{"weight_map": {"a": "../../evil.safetensors"}}'},
            "not a safetensors file beside it",
        ),
        (
            {"config.json": b"{}", "model.safetensors.index.json": b'{"weight_map": {"a": "gone.safetensors"}}'},
            "names gone.safetensors",
        ),
    ],
    ids=[
        "bin",
        "few-bits",
        "parts",
        "projector",
        "adapter",
        "no-config",
        "empty",
        "bad-index",
        "path-in-index",
        "missing-shard",
    ],
)
def test_repositories_that_are_no_checkpoint(hub: Any, cache: Path, files: dict[str, bytes], said: str) -> None:
    hub.add(NAME, files)
    with pytest.raises(CheckpointError, match=said):
        pull(NAME, endpoint=hub.url, cache_dir=cache)
    assert cached(NAME, cache_dir=cache) is None
    assert not {entry.file for entry in hub.sent()} - {"config.json", "model.safetensors.index.json"}


def test_a_full_disk_is_seen_before_the_download(
    hub: Any, cache: Path, sharded: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, sharded)
    monkeypatch.setattr("models.hub.cache.shutil.disk_usage", lambda _: SimpleNamespace(free=500_000))
    monkeypatch.setattr("models.hub.cache._SPARE_BYTES", 0)
    with pytest.raises(StoreError, match=r"6\d\d kB are still to come, .* 500 kB free"):
        pull(NAME, endpoint=hub.url, cache_dir=cache)
    assert not [entry for entry in hub.sent() if entry.file.startswith("model-")]


def test_a_disk_that_fills_up_keeps_what_came(
    hub: Any, cache: Path, sharded: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, sharded)
    real = Partial.write

    def fill(partial: Partial, piece: bytes) -> None:
        if partial.position > 100_000:
            partial._file.close()
            partial._file = open("/dev/full", "r+b", buffering=0)  # noqa: SIM115, PTH123 — closed with the partial
        real(partial, piece)

    monkeypatch.setattr(Partial, "write", fill)
    with pytest.raises(StoreError, match="disk is full"):
        pull(NAME, endpoint=hub.url, cache_dir=cache)
    monkeypatch.setattr(Partial, "write", real)
    (left,) = cache.rglob("*.incomplete")
    kept = left.stat().st_size
    assert kept > 100_000
    hub.log.clear()
    folder = pull(NAME, endpoint=hub.url, cache_dir=cache)
    assert content(folder) == {name: sharded[name] for name in NEEDED}
    assert hub.sent("model-00001-of-00002.safetensors")[0].start == kept


def test_a_cache_that_cannot_be_written(hub: Any, tmp_path: Path, sharded: dict[str, bytes]) -> None:
    hub.add(NAME, sharded)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="cannot write to the Hugging Face cache"):
        pull(NAME, endpoint=hub.url, cache_dir=tmp_path / "file")


@pytest.mark.parametrize("endpoint", ["huggingface.co", "ftp://ann:s3cret@hub", "http://ann:s3cret@127.0.0.1:9"])
def test_an_endpoint_that_is_no_address(cache: Path, endpoint: str) -> None:
    with pytest.raises(HubError, match=r"HF_ENDPOINT|no connection to 127.0.0.1:9") as caught:
        pull(NAME, endpoint=endpoint, cache_dir=cache, policy=QUICK)
    assert "s3cret" not in str(caught.value)


def test_a_proxy_that_is_no_address(hub: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "gopher://127.0.0.1:9")
    with pytest.raises(HubError, match="proxy"):
        pull(NAME, endpoint=hub.url, cache_dir=cache)


def test_nobody_listens(cache: Path) -> None:
    with pytest.raises(HubUnreachableError, match=r"no connection to 127.0.0.1:9 .* after 3 tries"):
        pull(NAME, endpoint="http://127.0.0.1:9", cache_dir=cache, policy=QUICK)
    assert not cache.exists()
