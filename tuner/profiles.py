"""Stored tuning results, and the journals of unfinished tunings.

A profile's key contains everything that its times depend on: device, driver, model, recipe, versions, budget. An
unreadable profile, or one with another key, counts as absent, and tuning measures again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

from tuner.candidates import CHUNK
from tuner.curve import Curve
from tuner.errors import ProfileError
from tuner.files import replacing
from tuner.search import Configuration
from tuner.timer import Timer

_FORMAT = 2
_STALE_SECONDS = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """Everything that a tuning's times depend on."""

    backend: str
    """`triton` or `cpu`."""
    device: str
    """Name of the graphics card or processor."""
    driver: str
    """Version of its driver; empty for a processor."""
    capability: str
    """Compute capability, or threads and instruction set of a processor."""
    model: str
    """Name of the model."""
    content: str
    """Identity of its content: a hash of the checkpoint."""
    recipe: str
    """How it was quantized."""
    versions: Mapping[str, str]
    """Versions of this program and of the libraries that compile its kernels, by name."""
    budget_percent: float
    """Slowdown budget."""

    def digest(self) -> str:
        """Short hash of the key, used as the file's name."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The result of a tuning."""

    key: ProfileKey
    """The key of the result."""
    configuration: Configuration
    """The configuration that keeps within the budget."""
    measured_slowdown_percent: float
    """Slowdown of decoding, measured end to end."""
    curve: tuple[Curve, ...]
    """Knee curves around the configuration."""
    seconds: float
    """Duration of the tuning in seconds."""
    date: str
    """Time of its end in ISO format."""


class Keyed(Protocol):
    """A stored result."""

    @property
    def key(self) -> ProfileKey:
        """The key of the result."""
        ...


K = TypeVar("K", bound=Keyed)


class KeyedStore(Generic[K]):
    """Results of tunings in a folder, one file for each key.

    Args:
        folder: The folder; created when the first one is saved.
        read: Makes a result from its key and body; raises KeyError, TypeError or ValueError if the body is malformed.
        form: Version of the file format.
        suffix: Suffix of the files' names.
    """

    def __init__(
        self, folder: Path, read: Callable[[ProfileKey, Mapping[str, Any]], K], *, form: int, suffix: str
    ) -> None:
        self.folder = folder
        self._read, self._form, self._suffix = read, form, suffix

    def find(self, key: ProfileKey) -> K | None:
        """The result for a key; None if there is no readable one."""
        try:
            data = json.loads(self._file(key).read_text(encoding="utf-8"))
            if data["format"] != self._form or data["key"] != json.loads(json.dumps(asdict(key))):
                return None
            return self._read(key, data["profile"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def save(self, profile: K) -> None:
        """Save a result atomically: readers find the previous one or this one, never a part.

        Raises:
            ProfileError: the folder can't be written.
        """
        body = {name: value for name, value in asdict(cast("Any", profile)).items() if name != "key"}
        text = json.dumps({"format": self._form, "key": asdict(profile.key), "profile": body}, indent=1, sort_keys=True)
        try:
            self._sweep()
            _write(self._file(profile.key), text)
        except OSError as error:
            raise ProfileError(f"the tuning can't be saved in {self.folder}: {error.strerror or error}") from error

    def _file(self, key: ProfileKey) -> Path:
        return self.folder / f"{key.digest()}{self._suffix}"

    def _sweep(self) -> None:
        """Remove the temporary files of processes that were killed while saving."""
        for stray in self.folder.glob(".*.json-*"):
            with contextlib.suppress(OSError):
                if time.time() - stray.stat().st_mtime > _STALE_SECONDS:
                    stray.unlink()


class ProfileStore(KeyedStore[Profile]):
    """Profiles of decoding, and the journals of unfinished tunings.

    Args:
        folder: The folder; created when the first one is saved.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, _profile, form=_FORMAT, suffix=".json")

    def journal(self, key: ProfileKey) -> Path:
        """The journal of an unfinished tuning; it is the same for every budget."""
        return self.folder / f"{replace(key, budget_percent=0.0).digest()}.journal"


def _write(file: Path, text: str) -> None:
    """Write a file atomically, creating its folder if needed; raises OSError."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replacing(file) as stream:
        stream.write(text.encode())


class JournalTimer:
    """A timer that records every measured time and, after a restart, replays the recorded times first.

    If the file can't be written, only resuming is lost. An incomplete line is ignored.

    Args:
        timer: Measures times that are not recorded.
        file: The journal; one per device, model and versions (see `ProfileStore.journal`).
    """

    def __init__(self, timer: Timer, file: Path) -> None:
        self._timer = timer
        self._file = file
        self._kept = _read_journal(file)
        self.resumed = sum(len(times) for times in self._kept.values())
        """Number of times found in the journal."""

    @property
    def measured(self) -> bool:
        """Whether the times come from a clock."""
        return self._timer.measured

    def seconds(self, kind: str, n_tb: int, k_chunk: int) -> float:
        """Time of one product (see `Timer`): its next recorded time, or a new one.

        Raises:
            TimerError: it could not be timed.
        """
        kept = self._kept.get((kind, n_tb, k_chunk))
        if kept:
            return kept.pop(0)
        seconds = self._timer.seconds(kind, n_tb, k_chunk)
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as stream:
                stream.write("\n" + json.dumps([kind, n_tb, k_chunk, seconds]))  # also after an incomplete line
        return seconds

    def discard(self) -> None:
        """Remove the journal, once the tuning is done."""
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)


def _read_journal(file: Path) -> dict[tuple[str, int, int], list[float]]:
    kept: dict[tuple[str, int, int], list[float]] = {}
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return kept
    for line in lines:
        try:
            kind, n_tb, k_chunk, seconds = json.loads(line)
        except (ValueError, TypeError):
            continue
        if isinstance(kind, str) and type(n_tb) is int and type(k_chunk) is int and _time(seconds):
            kept.setdefault((kind, n_tb, k_chunk), []).append(seconds)
    return kept


def _profile(key: ProfileKey, data: Mapping[str, Any]) -> Profile:
    """Read a profile's body.

    Raises:
        KeyError, TypeError, ValueError: it is malformed.
    """
    if data.keys() != {field.name for field in fields(Profile)} - {"key"}:
        raise ValueError("not the fields of a profile")
    curve = tuple(
        Curve(
            kind=_text(line["kind"]),
            n_tb=count_of(line["n_tb"]),
            points=tuple((count_of(k_chunk), _number(value)) for k_chunk, value in line["points"]),
        )
        for line in data["curve"]
    )
    found = data["configuration"]
    configuration = Configuration(
        n_tb_max=None if found["n_tb_max"] is None else count_of(found["n_tb_max"]),
        n_tb={_text(kind): count_of(count) for kind, count in found["n_tb"].items()},
        k_chunk={_text(kind): count_of(count) for kind, count in found["k_chunk"].items()},
        predicted_slowdown_percent=_number(found["predicted_slowdown_percent"]),
        predicted_loss_won=_optional(found["predicted_loss_won"]),
        loss_without=_optional(found["loss_without"]),
    )
    if configuration.n_tb.keys() != configuration.k_chunk.keys() or max(configuration.k_chunk.values()) > CHUNK:
        raise ValueError("not a configuration")
    return Profile(
        key=key,
        configuration=configuration,
        measured_slowdown_percent=_number(data["measured_slowdown_percent"]),
        curve=curve,
        seconds=_number(data["seconds"]),
        date=_text(data["date"]),
    )


def _time(value: object) -> bool:
    return isinstance(value, float) and 0 < value < math.inf


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def _optional(value: object) -> float | None:
    return None if value is None else _number(value)


def count_of(value: object) -> int:
    """Check that a value from a file is a count."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value
