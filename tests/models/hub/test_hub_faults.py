"""Pulling over a bad network, from a bad hub, and cancelling: no bad data is stored, no good data is lost."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.errors import CancelledError, HubError, HubUnreachableError
from models.hub import Policy, cached, pull
from models.progress import Progress
from tests.models.hub import hub_server
from tests.models.hub.test_hub_pull import QUICK

NAME = "owner/tiny"
SHARD = "model-00001-of-00002.safetensors"
SIZE = 300_000


@pytest.fixture
def files(hub: Any, sharded: dict[str, bytes]) -> dict[str, bytes]:
    """The repository, on the hub."""
    hub.add(NAME, sharded)
    return sharded


def partial(cache: Path, content: bytes) -> Path:
    return cache / "models--owner--tiny" / "blobs" / f"{hashlib.sha256(content).hexdigest()}.incomplete"


def stopped_at(hub: Any, cache: Path, count: int) -> int:
    """Stop a pull when so many bytes of the first shard are there; returns how many there are."""
    shard = next(iter(hub.repos[NAME].values()))[SHARD]

    def enough() -> bool:
        path = partial(cache, shard)
        return path.exists() and path.stat().st_size >= count

    with pytest.raises(CancelledError, match="continues"):
        pull(NAME, endpoint=hub.url, cache_dir=cache, cancelled=enough, policy=QUICK)
    hub.log.clear()
    return partial(cache, shard).stat().st_size


def check(folder: Path, files: dict[str, bytes]) -> None:
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert SHARD in found
    assert found == {name: files[name] for name in found}
    assert not list(folder.parents[1].rglob("*.incomplete"))


def test_a_stopped_pull_continues_inside_the_file(hub: Any, cache: Path, files: dict[str, bytes]) -> None:
    hub.faults.bytes_per_s = 2e6
    kept = stopped_at(hub, cache, 100_000)
    assert cached(NAME, cache_dir=cache) is None
    reports: list[Progress] = []
    check(pull(NAME, endpoint=hub.url, cache_dir=cache, progress=reports.append), files)
    assert [entry.start for entry in hub.sent(SHARD)] == [kept]
    assert not hub.sent("config.json")
    assert reports[-1].done == reports[-1].total


def test_a_partial_file_of_full_length_needs_no_request(hub: Any, cache: Path, files: dict[str, bytes]) -> None:
    stopped_at(hub, cache, 100_000)
    partial(cache, files[SHARD]).write_bytes(files[SHARD])
    check(pull(NAME, endpoint=hub.url, cache_dir=cache), files)
    assert not hub.sent(SHARD)


@pytest.mark.parametrize("junk", [b"other bytes" * 100, b"x" * SIZE, b"x" * (SIZE + 1)], ids=["short", "full", "long"])
def test_a_partial_file_with_other_content_is_replaced(
    hub: Any, cache: Path, files: dict[str, bytes], junk: bytes
) -> None:
    stopped_at(hub, cache, 100_000)
    partial(cache, files[SHARD]).write_bytes(junk)
    reports: list[Progress] = []
    check(pull(NAME, endpoint=hub.url, cache_dir=cache, progress=reports.append), files)
    assert hub.sent(SHARD)[-1].start == 0
    assert reports[-1].done == reports[-1].total


def test_a_cut_connection_continues_where_it_was(hub: Any, cache: Path, files: dict[str, bytes]) -> None:
    hub.faults.cut_after = {SHARD: deque([50_000, 1, 0, 70_000])}
    reports: list[Progress] = []
    check(pull(NAME, endpoint=hub.url, cache_dir=cache, policy=QUICK, progress=reports.append), files)
    assert [entry.start for entry in hub.sent(SHARD)] == [0, 50_000, 50_001, 50_001, 120_001]
    assert [entry.if_range for entry in hub.sent(SHARD)] == [None, *['"storage-0"'] * 4]
    assert any("the connection was cut" in report.message for report in reports)
    assert reports[-1].done == reports[-1].total


def test_a_hub_that_knows_no_ranges_sends_it_all_again(hub: Any, cache: Path, files: dict[str, bytes]) -> None:
    hub.faults.no_ranges = True
    hub.faults.cut_after = {SHARD: deque([50_000])}
    reports: list[Progress] = []
    check(pull(NAME, endpoint=hub.url, cache_dir=cache, policy=QUICK, progress=reports.append), files)
    assert len(hub.sent(SHARD)) == 2
    assert reports[-1].done == reports[-1].total


def test_a_connection_cut_again_and_again_ends(hub: Any, cache: Path, files: dict[str, bytes]) -> None:
    hub.faults.no_ranges = True
    hub.faults.cut_after = {SHARD: deque([50_000] * 99)}
    with pytest.raises(
        HubUnreachableError, match=rf"{SHARD}: the connection was cut.* after 4 tries.*continues the download"
    ):
        pull(NAME, endpoint=hub.url, cache_dir=cache, policy=QUICK)
    assert len(hub.sent(SHARD)) == 4
    hub.faults.no_ranges = False
    hub.faults.cut_after = {}
    check(pull(NAME, endpoint=hub.url, cache_dir=cache), files)
    assert hub.sent(SHARD)[-1].start == 50_000


def test_another_version_in_the_storage_is_not_mixed_in(hub: Any, cache: Path, files: dict[str, bytes]) -> None:
    hub.faults.cut_after = {SHARD: deque([50_000])}

    def change(report: Progress) -> None:
        if "cut" in report.message:
            hub.faults.storage_version = 1

    check(pull(NAME, endpoint=hub.url, cache_dir=cache, policy=QUICK, progress=change), files)
    _, second = hub.sent(SHARD)
    assert (second.start, second.if_range) == (50_000, '"storage-0"')  # answered with the whole file


def test_a_branch_that_moved_is_followed(hub: Any, cache: Path, files: dict[str, bytes]) -> None:
    hub.faults.bytes_per_s = 2e6
    stopped_at(hub, cache, 100_000)
    changed = {**files, SHARD: bytes(reversed(files[SHARD]))}
    commit = hub.add(NAME, changed)
    folder = pull(NAME, endpoint=hub.url, cache_dir=cache)
    assert folder.name == commit
    assert (folder / SHARD).read_bytes() == changed[SHARD]
    assert [entry.start for entry in hub.sent(SHARD)] == [0]


def test_a_file_that_is_not_the_listed_one(hub: Any, cache: Path, files: dict[str, bytes]) -> None:
    hub.faults.linked_etag = "f" * 64
    with pytest.raises(HubError, match=r"tokenizer.json changed on the hub"):
        pull(NAME, endpoint=hub.url, cache_dir=cache, policy=QUICK)
    assert not list(cache.rglob("*.incomplete"))
    assert not hub.sent(SHARD)


def test_wrong_bytes_are_fetched_once_more(hub: Any, cache: Path, files: dict[str, bytes]) -> None:
    hub.faults.wrong_bytes = {SHARD: 1, "config.json": 1}
    reports: list[Progress] = []
    check(pull(NAME, endpoint=hub.url, cache_dir=cache, policy=QUICK, progress=reports.append), files)
    assert len(hub.sent(SHARD)) == len(hub.sent("config.json")) == 2
    assert reports[-1].done == reports[-1].total


@pytest.mark.parametrize("file", [SHARD, "config.json"])
def test_wrong_bytes_are_never_kept(hub: Any, cache: Path, files: dict[str, bytes], file: str) -> None:
    hub.faults.wrong_bytes = {file: 9}
    with pytest.raises(HubError, match=rf"{file} came twice with a wrong checksum"):
        pull(NAME, endpoint=hub.url, cache_dir=cache, policy=QUICK)
    assert len(hub.sent(file)) == 2
    assert not list(cache.rglob("*.incomplete"))
    assert cached(NAME, cache_dir=cache) is None


def test_a_range_that_begins_elsewhere_is_asked_for_from_the_start(
    hub: Any, cache: Path, files: dict[str, bytes]
) -> None:
    kept = stopped_at(hub, cache, 100_000)
    hub.faults.wrong_range = True
    check(pull(NAME, endpoint=hub.url, cache_dir=cache, policy=QUICK), files)
    assert [entry.start for entry in hub.sent(SHARD)] == [kept, 0]


def test_a_body_longer_than_listed_is_not_kept(hub: Any, cache: Path, files: dict[str, bytes]) -> None:
    stopped_at(hub, cache, 100_000)
    hub.faults.shifted = True
    with pytest.raises(HubUnreachableError, match=r"different size|sent more than"):
        pull(NAME, endpoint=hub.url, cache_dir=cache, policy=QUICK)
    assert cached(NAME, cache_dir=cache) is None


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_hub_in_trouble_is_asked_again(hub: Any, cache: Path, files: dict[str, bytes], status: int) -> None:
    told: tuple[dict[str, str], ...] = ({"Retry-After": "1"}, {})
    hub.faults.statuses = deque((where, status, headers) for where in ("/api/models", SHARD) for headers in told)
    check(pull(NAME, endpoint=hub.url, cache_dir=cache, policy=QUICK), files)
    assert not hub.faults.statuses


def test_an_expired_address_of_the_storage_is_asked_for_anew(hub: Any, cache: Path, files: dict[str, bytes]) -> None:
    statuses = (403, 404, 410)
    hub.faults.cut_after = {SHARD: deque([50_000])}
    hub.faults.statuses = deque((f"|{NAME}|{SHARD}", status, {}) for status in statuses)
    patient = replace(QUICK, attempts=9, first_attempts=9)
    check(pull(NAME, endpoint=hub.url, cache_dir=cache, policy=patient), files)
    assert not hub.faults.statuses
    assert len([entry for entry in hub.log if entry.path.endswith(f"/{SHARD}")]) == 2 + len(statuses)


def test_a_hub_that_stays_down(hub: Any, cache: Path, files: dict[str, bytes]) -> None:
    hub.faults.always = ("/api/", 503, {})
    with pytest.raises(HubUnreachableError, match=r"asking for owner/tiny: the hub answers 503, after 3 tries"):
        pull(NAME, endpoint=hub.url, cache_dir=cache, policy=QUICK)
    assert len(hub.log) == 3


@pytest.mark.parametrize(
    ("name", "revision", "fault", "said"),
    [
        ("owner/missing", None, None, "does not exist, or is private or gated .*HF_TOKEN"),
        (NAME, "nowhere", None, "has no revision 'nowhere'"),
        (NAME, None, ("/api/", 404, {}), "knows no model owner/tiny"),
        (NAME, None, ("/api/", 404, {"X-Error-Code": "RepoNotFound"}), "knows no model owner/tiny"),
        (NAME, None, ("/api/", 401, {}), "does not exist, or is private"),
        (NAME, None, ("/api/", 418, {}), "answers 418: something is wrong"),
        (NAME, None, ("/resolve/", 401, {"X-Error-Code": "GatedRepo"}), "is gated .*hf auth login"),
        (NAME, None, ("/resolve/", 403, {"X-Error-Code": "GatedRepo"}), "is gated .*accept its terms"),
        (NAME, None, ("/resolve/", 403, {}), "is gated"),
        (NAME, None, ("/resolve/", 404, {"X-Error-Code": "EntryNotFound"}), "no file 'config.json'"),
        (NAME, None, ("/resolve/", 404, {}), "no file 'config.json'"),
    ],
)
def test_refusals_say_what_to_do(
    hub: Any,
    cache: Path,
    files: dict[str, bytes],
    name: str,
    revision: str | None,
    fault: tuple[str, int, dict[str, str]] | None,
    said: str,
) -> None:
    hub.faults.always = fault
    with pytest.raises(HubError, match=said) as caught:
        pull(name, revision, endpoint=hub.url, cache_dir=cache, policy=QUICK)
    assert not isinstance(caught.value, HubUnreachableError)
    assert "\n" not in str(caught.value)
    assert not [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock" and path.stat().st_size]


def test_a_gated_model_moves_no_weights_without_a_token(hub: Any, cache: Path, files: dict[str, bytes]) -> None:
    hub.faults.token = "hf_good"
    with pytest.raises(HubError, match="gated"):
        pull(NAME, endpoint=hub.url, cache_dir=cache, policy=QUICK, token="hf_bad")
    assert not hub.sent()
    check(pull(NAME, endpoint=hub.url, cache_dir=cache, token="hf_good"), files)


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>Please log in to the guest network</html>",
        b"[]",
        b"{}",
        b'{"sha": "main", "siblings": []}',
        b'{"sha": "../../../../../tmp", "siblings": []}',
        b'{"sha": "%s", "siblings": [{}]}' % (b"0" * 40),
        b'{"sha": "%s", "siblings": [{"rfilename": "config.json"}]}' % (b"0" * 40),
        b'{"sha": "%s", "siblings": [{"rfilename": "config.json", "size": 1, "blobId": "../x"}]}' % (b"0" * 40),
        b'{"sha": "%s", "siblings": [{"rfilename": "config.json", "size": -1, "blobId": "%s"}]}'
        % (b"0" * 40, b"0" * 40),
    ],
)
def test_a_server_that_is_no_hub(
    hub: Any, cache: Path, files: dict[str, bytes], answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_server._Handler, "_listing", lambda handler, *_: handler._answer(200, answer, {}))
    with pytest.raises(HubError, match=r"owner/tiny: .*HF_ENDPOINT"):
        pull(NAME, endpoint=hub.url, cache_dir=cache, policy=QUICK)
    assert not cache.exists()


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("file:///etc/passwd", "not safe to follow"),
        ("ftp://127.0.0.1/x", "not safe to follow"),
        ("gopher://x/y", "not safe to follow"),
        (f"/{NAME}/resolve/main/tokenizer.json", "redirects without end"),
    ],
)
def test_redirects_lead_to_the_web_and_end(
    hub: Any, cache: Path, files: dict[str, bytes], location: str, said: str
) -> None:
    hub.faults.location = hub.url + location if location.startswith("/") else location
    with pytest.raises(HubError, match=said):
        pull(NAME, endpoint=hub.url, cache_dir=cache, policy=QUICK)


def test_a_stalled_connection_is_given_up_and_continued(hub: Any, cache: Path, files: dict[str, bytes]) -> None:
    event = threading.Event()
    hub.faults.hang = (SHARD, event)
    reports: list[Progress] = []

    def release(report: Progress) -> None:
        reports.append(report)
        if "stopped sending" in report.message:
            hub.faults.hang = None
            event.set()

    impatient = Policy(stall_s=0.5, first_delay_s=0.02)
    check(pull(NAME, endpoint=hub.url, cache_dir=cache, policy=impatient, progress=release), files)
    assert any("stopped sending" in report.message for report in reports)
    assert hub.sent(SHARD)[1].start > 0


def test_a_stalled_connection_can_be_stopped_at_once(hub: Any, cache: Path, files: dict[str, bytes]) -> None:
    hub.faults.hang = (SHARD, threading.Event())
    stopped_at(hub, cache, 1)
    assert not [thread for thread in threading.enumerate() if thread.name == "hub-download"]


def test_stopping_between_tries(hub: Any, cache: Path, files: dict[str, bytes]) -> None:
    hub.faults.always = ("/api/", 503, {"Retry-After": "3600"})
    reports: list[Progress] = []
    with pytest.raises(CancelledError):
        pull(
            NAME,
            endpoint=hub.url,
            cache_dir=cache,
            progress=reports.append,
            cancelled=lambda: any("trying again in 30 s" in report.message for report in reports),
        )


@pytest.mark.parametrize("wrong", [{"stall_s": 0.0}, {"connect_s": -1.0}, {"attempts": 0}, {"first_attempts": 0}])
def test_policies_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Policy(**wrong)


def test_pauses_grow_to_a_limit_and_heed_the_hub() -> None:
    policy = Policy(first_delay_s=0.5, longest_delay_s=8.0)
    assert [policy.delay(failures, None) for failures in (1, 2, 3, 4, 5, 6)] == [0.5, 1, 2, 4, 8, 8]
    assert policy.delay(1, 3.0) == 3.0
    assert policy.delay(1, 3600.0) == 8.0
