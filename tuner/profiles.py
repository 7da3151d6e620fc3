"""Tuning results and half-finished tunings, kept between runs.

A profile belongs to everything that its times depend on: device, driver, model, recipe, versions, budget. What can't be
read, or was written for something else, counts as absent and is measured again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

from tuner.candidates import CHUNK
from tuner.curve import Curve
from tuner.errors import ProfileError
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
        """Short hash of all of it; names the profile's file."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a tuning found."""

    key: ProfileKey
    """What it was found for."""
    configuration: Configuration
    """What holds the budget."""
    measured_slowdown_percent: float
    """Of decoding, measured from end to end."""
    curve: tuple[Curve, ...]
    """Knee curves around the configuration."""
    seconds: float
    """How long the tuning took."""
    date: str
    """When it ended, in ISO format."""


class Keyed(Protocol):
    """What was found for a key."""

    @property
    def key(self) -> ProfileKey:
        """What it was found for."""
        ...


K = TypeVar("K", bound=Keyed)


class KeyedStore(Generic[K]):
    """What tunings found, in a folder, one file for each key.

    Args:
        folder: Where; made when the first one is saved.
        read: Makes one from its key and its body; raises KeyError, TypeError or ValueError where it is not one.
        form: Version of the files.
        suffix: What their names end with.
    """

    def __init__(
        self, folder: Path, read: Callable[[ProfileKey, Mapping[str, Any]], K], *, form: int, suffix: str
    ) -> None:
        self.folder = folder
        self._read, self._form, self._suffix = read, form, suffix

    def find(self, key: ProfileKey) -> K | None:
        """What was found for this key; None if there is nothing, or nothing that can be read."""
        try:
            data = json.loads(self._file(key).read_text(encoding="utf-8"))
            if data["format"] != self._form or data["key"] != json.loads(json.dumps(asdict(key))):
                return None
            return self._read(key, data["profile"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def save(self, profile: K) -> None:
        """Save it in one step: whoever reads finds the former profile or this one, never a part.

        Raises:
            ProfileError: the folder can't be written.
        """
        body = {name: value for name, value in asdict(cast("Any", profile)).items() if name != "key"}
        text = json.dumps({"format": self._form, "key": asdict(profile.key), "profile": body}, indent=1, sort_keys=True)
        try:
            self._sweep()
            _write(self._file(profile.key), text)
        except OSError as error:
            raise ProfileError(f"the tuning cannot be saved in {self.folder}: {error.strerror or error}") from error

    def _file(self, key: ProfileKey) -> Path:
        return self.folder / f"{key.digest()}{self._suffix}"

    def _sweep(self) -> None:
        """Remove what a process left that was killed while it saved."""
        for stray in self.folder.glob(".*.json-*"):
            with contextlib.suppress(OSError):
                if time.time() - stray.stat().st_mtime > _STALE_SECONDS:
                    stray.unlink()


class ProfileStore(KeyedStore[Profile]):
    """Profiles of decoding, and the times of tunings that are under way.

    Args:
        folder: Where; made when the first one is saved.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, _profile, form=_FORMAT, suffix=".json")

    def journal(self, key: ProfileKey) -> Path:
        """The file for times of a tuning that is under way: the same one for every budget."""
        return self.folder / f"{replace(key, budget_percent=0.0).digest()}.journal"


def _write(file: Path, text: str) -> None:
    """Write a file in one step, and its folder where that is missing; raises what the system says."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


class JournalTimer:
    """A timer that writes every measured time down and, started again, first repeats what stands there.

    A file that can't be written costs the resumption and nothing else; a line that was cut off is left out.

    Args:
        timer: Measures what is not written down.
        file: The journal; one per device, model and versions (see `ProfileStore.journal`).
    """

    def __init__(self, timer: Timer, file: Path) -> None:
        self._timer = timer
        self._file = file
        self._kept = _read_journal(file)
        self.resumed = sum(len(times) for times in self._kept.values())
        """Times that were found in the journal."""

    @property
    def measured(self) -> bool:
        """Whether the times come from a clock."""
        return self._timer.measured

    def seconds(self, kind: str, n_tb: int, k_chunk: int) -> float:
        """Time of one product (see `Timer`): the next that is written down for it, or a new one.

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
                stream.write("\n" + json.dumps([kind, n_tb, k_chunk, seconds]))  # after a line that was cut off, too
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
        KeyError, TypeError, ValueError: it is not one.
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
    """A value of a file that has to be a count."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value
