"""The mutation runner: distinguishes tests that notice a defect from those that do not, and restores the code."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.lab import mutations
from tests.lab.mutations import Break, MutationError, check, measure, read_breaks

ROOMS = (
    *("operations", "cpu kernels", "cpu decoder", "triton kernels", "triton decoder", "caches", "memory"),
    *("engine", "scheduling", "speculation", "text", "server", "wire", "client", "history", "tui", "cli", "settings"),
    *("tuner", "quantizers", "qoq", "store", "hub", "models"),
)
ENTRY = '[[break]]\nname = "{}"\nroom = "a room"\nfile = "a.py"\nold = "1"\nnew = "2"\ntests = ["test_a.py"]\n'


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    (tmp_path / "sums.py").write_text("def add(a, b):\n    return a + b\n\n\ndef double(a):\n    return 2 * a\n")
    (tmp_path / "test_sums.py").write_text("from sums import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n")
    before = time.time() - 60
    os.utime(tmp_path / "sums.py", (before, before))
    return tmp_path


def a_break(old: str, new: str, **changes: Any) -> Break:
    usual = {"file": "sums.py", "old": old, "new": new, "tests": ("test_sums.py",)}
    return Break(name=f"{old} -> {new}", room="sums", **{**usual, **changes})


def test_what_tests_notice_is_caught_and_the_rest_survives(copy: Path) -> None:
    whole = (copy / "sums.py").read_bytes()
    found = measure([a_break("a + b", "a - b"), a_break("2 * a", "3 * a"), a_break("def add(", "def ad(")], copy)
    assert [outcome.caught for outcome in found] == [True, False, True]
    assert found[0].by == "test_sums.py::test_add"
    assert found[1].by == ""
    assert (copy / "sums.py").read_bytes() == whole


def test_what_noticed_a_break_before_is_asked_first(copy: Path) -> None:
    (copy / "test_sums.py").write_text(
        "from sums import add, double\n\n\ndef test_double():\n    assert double(1) == 2\n\n\n"
        "def test_add():\n    assert add(2, 3) == 5\n\n\ndef test_both():\n    assert double(add(1, 1)) == 4\n"
    )
    breaks = [a_break("a + b", "a - b"), a_break("2 * a", "3 * a"), a_break("def add(", "def ad(")]
    noticed = ("test_sums.py::test_both", "test_sums.py::test_add", "test_sums.py::test_gone")
    found = measure(breaks, copy, {one.name: test for one, test in zip(breaks, noticed, strict=True)})
    assert all(outcome.caught for outcome in found)
    assert [outcome.by for outcome in found[:2]] == ["test_sums.py::test_both", "test_sums.py::test_double"]


def test_tests_that_fail_anyway_show_nothing(copy: Path) -> None:
    (copy / "sums.py").write_text("def add(a, b):\n    return a * b\n")
    with pytest.raises(MutationError, match=r"test_sums\.py fails without any break"):
        measure([a_break("a * b", "a - b")], copy)


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (a_break("a plus b", "c"), "sums.py holds its text 0 times"),
        (a_break("a", "c"), "sums.py holds its text 5 times"),
        (a_break("a + b", "a + b"), "it changes nothing"),
        (a_break("a + b", "c", file="plus.py"), "plus.py is not there"),
        (a_break("a + b", "c", tests=("test_sums.py", "test_plus.py")), "test_plus.py is not there"),
    ],
)
def test_a_break_that_does_not_fit_is_named(copy: Path, one: Break, said: str) -> None:
    with pytest.raises(MutationError, match=f"{re.escape(one.name)}' does not fit: {said}"):
        measure([one], copy)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ENTRY.format("one") * 2, "two breaks are called 'one'"),
        (ENTRY.format("one").replace("old", "odd"), "the break 'one' is not complete"),
    ],
)
def test_a_wrong_list_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "list.toml").write_text(text)
    with pytest.raises(MutationError, match=said):
        read_breaks(tmp_path / "list.toml")


def test_the_list_covers_every_room() -> None:
    breaks = read_breaks()
    assert {one.room for one in breaks} == set(ROOMS)
    assert len(breaks) >= 100


@pytest.mark.parametrize("one", read_breaks(), ids=lambda one: one.name)
def test_every_break_fits_the_code_as_it_is(one: Break) -> None:
    """A text that nobody finds any more breaks nothing."""
    check(one, mutations.ROOT)
