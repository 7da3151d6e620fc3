from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tuner.curve import Curve
from tuner.errors import Cancelled, ProfileError, TimerError
from tuner.profiles import JournalTimer, Profile, ProfileKey, ProfileStore
from tuner.search import Configuration, tune
from tuner.shapes import LayerShape

KEY = ProfileKey(
    backend="triton",
    device="NVIDIA GeForce RTX 4050 Laptop GPU",
    driver="580.10",
    capability="8.9",
    model="demo",
    content="0123abcd",
    recipe="awq 3 bits, groups of 128, 4-bit residuals",
    versions={"lowbit-chat": "0.1.0", "torch": "2.13.0", "triton": "3.7.1"},
    budget_percent=2.5,
)
PROFILE = Profile(
    key=KEY,
    configuration=Configuration(
        n_tb_max=8, n_tb={"o": 4, "down": 8}, k_chunk={"o": 55, "down": 0}, predicted_slowdown_percent=2.4
    ),
    measured_slowdown_percent=1.7,
    curve=(Curve(kind="o", n_tb=4, points=((0, 1.0), (8, 1.01))),),
    seconds=12.5,
    date="2026-11-21T12:00:00+00:00",
)
LAYERS = (LayerShape("o", 1024, 1024, 2), LayerShape("down", 1024, 4096, 2))


def test_a_profile_comes_back_as_it_was(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "new" / "profiles")
    assert store.find(KEY) is None
    store.save(PROFILE)
    assert store.find(KEY) == PROFILE
    assert [file.suffix for file in store.folder.iterdir()] == [".json"]


def test_a_processors_profile_comes_back(tmp_path: Path) -> None:
    configuration = Configuration(n_tb_max=None, n_tb={"o": 0}, k_chunk={"o": 16}, predicted_slowdown_percent=4)
    profile = dataclasses.replace(PROFILE, configuration=configuration, curve=())
    ProfileStore(tmp_path).save(profile)
    assert ProfileStore(tmp_path).find(KEY) == profile


@pytest.mark.parametrize(
    "change",
    [
        {"driver": "581.00"},
        {"device": "another"},
        {"capability": "9.0"},
        {"model": "other"},
        {"content": "ffff"},
        {"recipe": "rtn"},
        {"backend": "cpu"},
        {"budget_percent": 5.0},
        {"versions": {"lowbit-chat": "0.2.0", "torch": "2.13.0", "triton": "3.7.1"}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_profile_belongs_to_all_of_its_key(tmp_path: Path, change: dict[str, Any]) -> None:
    store = ProfileStore(tmp_path)
    store.save(PROFILE)
    other = dataclasses.replace(KEY, **change)
    assert store.find(other) is None
    (file,) = tmp_path.glob("*.json")
    file.rename(tmp_path / f"{other.digest()}.json")
    assert store.find(other) is None


def test_the_order_of_versions_does_not_matter() -> None:
    assert dataclasses.replace(KEY, versions=dict(reversed(KEY.versions.items()))).digest() == KEY.digest()


Damage = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.update(format=1),
        lambda data: data.pop("profile"),
        lambda data: data["profile"].pop("seconds"),
        lambda data: data["profile"].update(more=1),
        lambda data: data["profile"].update(seconds="12"),
        lambda data: data["profile"].update(measured_slowdown_percent=float("nan")),
        lambda data: data["profile"].update(date=None),
        lambda data: data["profile"].update(configuration=None),
        lambda data: data["profile"]["configuration"].update(k_chunk={"o": -1, "down": 0}),
        lambda data: data["profile"]["configuration"].update(k_chunk={"o": 1.5, "down": 0}),
        lambda data: data["profile"]["configuration"].update(k_chunk={"o": True, "down": 0}),
        lambda data: data["profile"]["configuration"].update(k_chunk={"o": 5000, "down": 0}),
        lambda data: data["profile"]["configuration"].update(k_chunk={"o": 1}),
        lambda data: data["profile"]["configuration"].update(k_chunk={}, n_tb={}),
        lambda data: data["profile"]["configuration"].update(n_tb_max="8"),
        lambda data: data["profile"]["curve"].append(3),
        lambda data: data["profile"]["curve"][0].update(points=[[0]]),
    ],
)
def test_damaged_content_is_absent(tmp_path: Path, damage: Damage) -> None:
    store = ProfileStore(tmp_path)
    store.save(PROFILE)
    (file,) = tmp_path.glob("*.json")
    data = json.loads(file.read_text())
    damage(data)
    file.write_text(json.dumps(data))
    assert store.find(KEY) is None
    store.save(PROFILE)
    assert store.find(KEY) == PROFILE


def test_no_cut_of_a_profile_is_taken_for_one(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    store.save(PROFILE)
    (file,) = tmp_path.glob("*.json")
    whole = file.read_bytes()
    for size in range(0, len(whole) - 1, 7):
        file.write_bytes(whole[:size])
        assert store.find(KEY) is None
    file.write_bytes(b"\xff\xfe" + whole)
    assert store.find(KEY) is None
    file.write_text("[]")
    assert store.find(KEY) is None


def test_killed_while_saving_the_former_profile_stays(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    store.save(PROFILE)
    program = (
        "import os, sys\n"
        "os.fsync = lambda _: os.kill(os.getpid(), 9)\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from tuner.profiles import *\n"
        "import dataclasses\n"
        "store = ProfileStore(Path(sys.argv[1]))\n"
        "import json\n"
        "key = ProfileKey(**json.loads(sys.argv[3]))\n"
        "store.save(dataclasses.replace(store.find(key), seconds=99.0))\n"
    )
    arguments = [str(tmp_path), str(Path(__file__).parents[2]), json.dumps(dataclasses.asdict(KEY))]
    result = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == -9, result.stderr
    assert store.find(KEY) == PROFILE
    (stray,) = tmp_path.glob(".*")
    os.utime(stray, (time.time() - 7200,) * 2)
    store.save(PROFILE)
    assert not list(tmp_path.glob(".*"))


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="can't be saved in"):
        ProfileStore(tmp_path / "file" / "profiles").save(PROFILE)


def test_nothing_is_left_of_a_save_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ProfileError, match="No space left"):
        ProfileStore(tmp_path).save(PROFILE)
    assert not list(tmp_path.iterdir())


class Clock:
    """A measured timer; every time is another one, and it may vanish."""

    measured = True

    def __init__(self, dies_at: int | None = None) -> None:
        self.asked = 0
        self.dies_at = dies_at

    def seconds(self, kind: str, n_tb: int, k_chunk: int) -> float:
        if self.asked == self.dies_at:
            raise TimerError("the device is gone; is the external graphics card still there?")
        self.asked += 1
        return 1.0 + 0.00101 * k_chunk + 1e-9 * self.asked


def test_a_device_that_vanishes_leaves_its_times(tmp_path: Path) -> None:
    file = tmp_path / "new" / "a.journal"
    with pytest.raises(TimerError, match="gone"):
        tune(LAYERS, JournalTimer(Clock(dies_at=40), file), budget_percent=5, sm_count=8)
    clock = Clock()
    timer = JournalTimer(clock, file)
    assert timer.resumed == 40
    assert timer.measured
    resumed = tune(LAYERS, timer, budget_percent=5, sm_count=8)
    whole = Clock()
    assert resumed.k_chunk == tune(LAYERS, whole, budget_percent=5, sm_count=8).k_chunk
    assert clock.asked == whole.asked - 40
    timer.discard()
    assert not file.exists()
    timer.discard()


def test_a_tuning_that_was_stopped_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "a.journal"
    first = Clock()
    with pytest.raises(Cancelled):
        tune(LAYERS, JournalTimer(first, file), budget_percent=5, sm_count=8, cancelled=lambda: first.asked == 25)
    second = JournalTimer(Clock(), file)
    assert second.resumed == 25
    assert [second.seconds("o", 0, 0) for _ in range(2)] == [1.0 + 1e-9, 1.0 + 2e-9]


def test_a_repeated_tuning_measures_nothing(tmp_path: Path) -> None:
    file = tmp_path / "a.journal"
    found = tune(LAYERS, JournalTimer(Clock(), file), budget_percent=5, sm_count=8)
    assert tune(LAYERS, JournalTimer(Clock(dies_at=0), file), budget_percent=5, sm_count=8) == found


@pytest.mark.parametrize("end", ["", '\n["o", 4, 8', '\n["o", 4, 8, 0.', "\n\x00\x00", '\n["o", 4, 8]', "\nnull"])
def test_a_journal_that_was_cut_off_goes_on(tmp_path: Path, end: str) -> None:
    file = tmp_path / "a.journal"
    JournalTimer(Clock(), file).seconds("o", 4, 8)
    file.write_text(file.read_text() + end)
    again = JournalTimer(Clock(), file)
    assert again.resumed == 1
    again.seconds("o", 4, 8)
    assert again.seconds("o", 4, 16) > 0
    assert JournalTimer(Clock(), file).resumed == 2


@pytest.mark.parametrize("line", ['["o", 4, 8, -1.0]', '["o", 4, 8, NaN]', '["o", 4.0, 8, 1.0]', "[1, 4, 8, 1.0]"])
def test_times_that_cannot_be_are_left_out(tmp_path: Path, line: str) -> None:
    file = tmp_path / "a.journal"
    file.write_text(line)
    assert JournalTimer(Clock(), file).resumed == 0


def test_a_journal_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    timer = JournalTimer(Clock(), tmp_path / "file" / "a.journal")
    assert timer.seconds("o", 4, 8) > 0
    timer.discard()


def test_budgets_share_a_journal(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    assert store.journal(KEY) == store.journal(dataclasses.replace(KEY, budget_percent=20.0))
    assert store.journal(KEY) != store.journal(dataclasses.replace(KEY, driver="1"))
