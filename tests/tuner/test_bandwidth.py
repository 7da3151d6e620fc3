from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tuner import bandwidth
from tuner.bandwidth import ReadBandwidth, measure, read_bandwidth
from tuner.detect import boot_id

MIB = 1 << 20


def test_the_kernel_reads_every_word() -> None:
    words = np.random.default_rng(0).integers(-1000, 1000, 4 * 1001)
    assert bandwidth._kernel()(words) == words.sum()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_thread_has_a_part(threads: int) -> None:
    found = measure(threads, 8 * MIB, seconds=0)
    assert found.gb_s > 0
    assert found.threads == threads
    assert 0 <= 8 * MIB - found.buffer_bytes < threads * 32
    assert found.boot == boot_id()


@pytest.mark.parametrize(("threads", "size"), [(0, MIB), (-1, MIB), (4, 4096)])
def test_what_cannot_be_shared_is_refused(threads: int, size: int) -> None:
    with pytest.raises(ValueError, match="cannot share"):
        measure(threads, size)


def remembered(gb_s: float) -> ReadBandwidth:
    return ReadBandwidth(gb_s=gb_s, threads=2, buffer_bytes=MIB, boot=boot_id())


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the next measurements find, in order; each is used once."""
    queue: list[float] = []
    monkeypatch.setattr(bandwidth, "measure", lambda *_: remembered(queue.pop(0)))
    return queue


def test_it_is_measured_once_a_boot(tmp_path: Path, measured: list[float]) -> None:
    measured += [30.0]
    folder = tmp_path / "new" / "cache"
    assert read_bandwidth(folder).gb_s == 30.0
    assert read_bandwidth(folder).gb_s == 30.0
    assert [entry.name for entry in folder.iterdir()] == ["bandwidth.json"]


def test_a_fresh_measurement_only_raises_it(tmp_path: Path, measured: list[float]) -> None:
    measured += [30.0, 20.0, 35.0]
    found = [read_bandwidth(tmp_path, fresh=fresh).gb_s for fresh in (False, True, False, True, False)]
    assert found == [30.0, 30.0, 30.0, 35.0, 35.0]


@pytest.mark.parametrize("change", [{"boot": "another"}, {"machine": {}}, {"gb_s": "x"}, {"gb_s": -1.0}, {"extra": 1}])
def test_what_does_not_belong_here_is_measured_again(
    tmp_path: Path, measured: list[float], change: dict[str, object]
) -> None:
    measured += [30.0, 31.0]
    read_bandwidth(tmp_path)
    file = tmp_path / "bandwidth.json"
    data = json.loads(file.read_text())
    if "boot" in change:
        data["machine"] |= change
    file.write_text(json.dumps(data | change))
    assert read_bandwidth(tmp_path).gb_s == 31.0


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000], ids=lambda text: text[:4])
def test_a_damaged_file_is_measured_again(tmp_path: Path, measured: list[float], text: str) -> None:
    (tmp_path / "bandwidth.json").write_text(text)
    measured += [30.0]
    assert read_bandwidth(tmp_path).gb_s == 30.0


def test_nothing_is_left_of_a_save_that_failed(
    tmp_path: Path, measured: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path, _target: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", refuse)
    measured += [30.0]
    assert read_bandwidth(tmp_path).gb_s == 30.0
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_costs_nothing_else(tmp_path: Path, measured: list[float]) -> None:
    (tmp_path / "file").write_text("")
    measured += [30.0]
    assert read_bandwidth(tmp_path / "file" / "cache").gb_s == 30.0
