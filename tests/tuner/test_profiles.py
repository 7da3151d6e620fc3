from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tuner.errors import ProfileError
from tuner.ladder import Setting
from tuner.offers import DecodingMode, Offers
from tuner.profiles import Profile, ProfileKey, ProfileStore, PromptProfile, PromptReading

KEY = ProfileKey(
    backend="triton",
    device="NVIDIA GeForce RTX 4050 Laptop GPU",
    driver="580.10",
    capability="8.9",
    model="demo",
    content="0123abcd",
    recipe="awq 3 bits, groups of 128, 4-bit residuals",
    versions={"lowbit-chat": "0.1.0", "torch": "2.13.0", "triton": "3.7.1"},
)
SETTING = Setting(
    target=4.0,
    k_chunk={"o": 55, "down": 0, "layers.3.down": 64},
    n_tb={"o": 4, "down": 8},
    predicted_slowdown_percent=2.4,
    predicted_won=0.2,
    slowdowns=(1.7, -0.1, 2),
    loss=0.4,
)
PLAIN = DecodingMode(target="plain", gamma=0, seconds=0.010, perplexity=12.0)
DRAFTED = DecodingMode(target="residual", gamma=3, seconds=0.0125, perplexity=10.03, acceptance_rate=0.9)
PROFILE = Profile(
    key=KEY,
    times=(("o", 0, 0, 0.001), ("o", 4, 8, 1.01)),
    settings=(SETTING, replace(SETTING, target=8.0, predicted_won=None, slowdowns=(), loss=None)),
    lost=0.5,
    text="0123",
    without=0.6,
    tuned=(2.5, 5.0),
    refined=(5.0,),
    prompts=(
        PromptProfile(
            budget_percent=20.0,
            k_chunk=256,
            readings=(
                PromptReading(k_chunk=1024, slowdown_percent=25.0),
                PromptReading(k_chunk=256, slowdown_percent=6.0),
            ),
            tokens=512,
            seconds=2.0,
            date="2026-11-21T12:00:00+00:00",
        ),
    ),
    offers=(Offers(budget_percent=5.0, ways=(PLAIN, DRAFTED), full=None, seconds=3.0, date="2026-11-22"),),
    seconds=12.5,
    date="2026-11-21T12:00:00+00:00",
)
NONE = Profile(key=KEY)


def saved(store: ProfileStore, profile: Profile = PROFILE) -> ProfileStore:
    store.update(KEY, lambda _: profile)
    return store


def test_a_profile_comes_back_as_it_was(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "new" / "profiles")
    assert store.find(KEY) == NONE
    saved(store)
    assert store.find(KEY) == PROFILE
    assert [file.suffix for file in store.folder.iterdir()] == [".json"]
    store.update(KEY, lambda stored: replace(stored, seconds=13.0))
    assert store.find(KEY) == replace(PROFILE, seconds=13.0)


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
        {"versions": {"lowbit-chat": "0.2.0", "torch": "2.13.0", "triton": "3.7.1"}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_profile_belongs_to_all_of_its_key(tmp_path: Path, change: dict[str, Any]) -> None:
    store = saved(ProfileStore(tmp_path))
    other = dataclasses.replace(KEY, **change)
    assert store.find(other) == Profile(key=other)
    (file,) = tmp_path.glob("*.json")
    file.rename(tmp_path / f"{other.digest()}.json")
    assert store.find(other) == Profile(key=other)


def test_the_order_of_versions_does_not_matter() -> None:
    assert dataclasses.replace(KEY, versions=dict(reversed(KEY.versions.items()))).digest() == KEY.digest()


Damage = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.update(format=2),
        lambda data: data.pop("profile"),
        lambda data: data["profile"].pop("seconds"),
        lambda data: data["profile"].update(more=1),
        lambda data: data["profile"].update(seconds="12"),
        lambda data: data["profile"].update(lost=float("nan")),
        lambda data: data["profile"].update(date=None),
        lambda data: data["profile"].update(settings=None),
        lambda data: data["profile"]["settings"][0].update(k_chunk={"o": -1, "down": 0}),
        lambda data: data["profile"]["settings"][0].update(k_chunk={"o": 1.5, "down": 0}),
        lambda data: data["profile"]["settings"][0].update(k_chunk={"o": True, "down": 0}),
        lambda data: data["profile"]["settings"][0].update(k_chunk={"o": 5000, "down": 0}),
        lambda data: data["profile"]["settings"][0].update(k_chunk={}),
        lambda data: data["profile"]["settings"][0].update(slowdowns=[float("inf")]),
        lambda data: data["profile"]["settings"].append(3),
        lambda data: data["profile"]["times"].append(["o", 0, 0]),
        lambda data: data["profile"]["prompts"][0].update(k_chunk=255),
        lambda data: data["profile"]["prompts"][0].update(readings={}),
        lambda data: data["profile"]["offers"][0].update(ways=[]),
        lambda data: data["profile"]["offers"][0].update(full=-1.0),
        lambda data: data["profile"]["offers"][0]["ways"][1].update(target="magic"),
        lambda data: data["profile"]["offers"][0]["ways"][1].update(seconds=0.0),
        lambda data: data["profile"]["offers"][0]["ways"][1].update(gamma=-1),
    ],
)
def test_damaged_content_is_absent(tmp_path: Path, damage: Damage) -> None:
    store = saved(ProfileStore(tmp_path))
    (file,) = tmp_path.glob("*.json")
    data = json.loads(file.read_text())
    damage(data)
    file.write_text(json.dumps(data))
    assert store.find(KEY) == NONE
    file.write_text("[" * 100_000)
    assert store.find(KEY) == NONE
    saved(store)
    assert store.find(KEY) == PROFILE


def test_no_cut_of_a_profile_is_taken_for_one(tmp_path: Path) -> None:
    store = saved(ProfileStore(tmp_path))
    (file,) = tmp_path.glob("*.json")
    whole = file.read_bytes()
    for size in range(0, len(whole) - 1, 7):
        file.write_bytes(whole[:size])
        assert store.find(KEY) == NONE
    file.write_bytes(b"\xff\xfe" + whole)
    assert store.find(KEY) == NONE
    file.write_text("[]")
    assert store.find(KEY) == NONE


def test_killed_while_saving_the_former_profile_stays(tmp_path: Path) -> None:
    store = saved(ProfileStore(tmp_path))
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
        "store.update(key, lambda stored: dataclasses.replace(stored, seconds=99.0))\n"
    )
    arguments = [str(tmp_path), str(Path(__file__).parents[2]), json.dumps(dataclasses.asdict(KEY))]
    result = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == -9, result.stderr
    assert store.find(KEY) == PROFILE
    (stray,) = tmp_path.glob(".*")
    os.utime(stray, (time.time() - 7200,) * 2)
    saved(store)
    assert not list(tmp_path.glob(".*"))


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="can't be saved in"):
        saved(ProfileStore(tmp_path / "file" / "profiles"))


def test_nothing_is_left_of_a_save_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ProfileError, match="No space left"):
        saved(ProfileStore(tmp_path))
    assert not list(tmp_path.iterdir())


def test_what_the_ladder_buys_and_where_its_curves_begin() -> None:
    """Losses on the text count where they were read; a setting that takes longer for less is passed over."""
    half = replace(SETTING, slowdowns=(4.0,) * 3, loss=0.3)
    worse = replace(half, target=8.0, slowdowns=(8.0,) * 3, loss=0.45)
    more = replace(half, target=16.0, slowdowns=(16.0,) * 3, loss=0.15)
    found = replace(PROFILE, settings=(half, worse, more))
    assert found.bought() == ((0.0, 0.0), (found.bound(half), 0.5), (found.bound(more), pytest.approx(0.75)))
    for budget, share in found.bought():
        assert found.best(budget) == {0.0: None, 0.5: half}.get(share, more), "that budget chooses it"
    assert found.lost_and_won(half) == (0.6, pytest.approx(0.3))
    assert found.lost_and_won(replace(half, loss=None)) == (0.5, 0.2)
    assert replace(found, lost=None, without=None).lost_and_won(half) == (None, None)
    assert replace(found, settings=()).bought() == ()
    assert found.curve("o", 4).points == ((0, 1.0), (8, 1.01))
    assert found.curve("o", 8).points == ((0, 1.0),)
