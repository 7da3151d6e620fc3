"""One model under measurement: its checkpoint, texts and low-bit forms, and the digests that identify its numbers."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from models.checkpoint import Checkpoint
from models.quantize import quantize
from models.recipe import Recipe
from models.store import Store, StoredModel
from tests.bench.caches.shape_sizes import described
from tests.bench.quality.measure import making_code
from tests.bench.reporting.cases import Case
from tests.bench.reporting.origin import code_of_patterns
from tests.bench.reporting.results import Entry, Results, digest, digest_files
from tests.bench.reporting.run import Tell

BITS = 4
"""Bits of the low-bit weights."""
K_CHUNK = 64
"""Salient channels per 1024 that they are compensated by."""
_STORING = ("kv/kinds.py", "kv/control.py", "kv/oracle/*.py", "kv/torch_store.py")
_REFERENCE = (*_STORING, "measure/evaluate.py", "backends/reference/*.py", "backends/operations/*.py")
_CPU = (
    *("kv/kinds.py", "kv/control.py", "measure/evaluate.py"),
    *("backends/cpu/**/*.py", "backends/operations/channels.py"),
)
_SAVE_S = 10
"""Seconds of work that a kill may cost."""


@cache
def _code(patterns: tuple[str, ...]) -> str:
    return code_of_patterns("runtime", patterns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """Digests of the code that decides numbers."""

    storing: str
    """What a page of each kind holds."""
    reference: str
    """What the reference backend answers."""
    cpu: str
    """What the CPU backend answers, and how fast."""
    making: str
    """What a stored model holds."""

    @classmethod
    def now(cls) -> Codes:
        """Of the code as it is."""
        return cls(storing=_code(_STORING), reference=_code(_REFERENCE), cpu=_code(_CPU), making=making_code())


def is_old(entry: Entry) -> bool:
    """Whether an entry was measured with other code than there is now."""
    return entry["code"] not in _codes_now()


@cache
def _codes_now() -> frozenset[str]:
    codes = Codes.now()
    parts = (codes.storing, codes.reference, codes.cpu, codes.making)
    pairs = ((codes.storing, codes.cpu), (codes.cpu, codes.making), (codes.reference, codes.making))
    return frozenset({*parts, *(digest(list(pair)) for pair in pairs), digest([codes.cpu, described()])})


class Notebook:
    """The results with what is asked for again, and a line for each thing done.

    Args:
        results: What is known already, and where numbers go.
        tell: Receives a line for each thing done.
        again: Sections whose known numbers do not count.
    """

    def __init__(self, results: Results, tell: Tell, again: frozenset[str] = frozenset()) -> None:
        self.results, self.tell, self.codes = results, tell, Codes.now()
        self.skipped: dict[str, str] = {}
        self.done: set[str] = set()
        self._again, self._saved = again, time.monotonic()

    def known(self, section: str, identity: object, code: str, measure: Callable[[], Mapping[str, Any]]) -> Entry:
        """An entry of a section; it is measured if it is not known, or is asked for again.

        Args:
            section: Where it is kept.
            identity: JSON value: everything that decides the numbers but the code.
            code: Digest of the code that decides them.
            measure: Makes it.
        """
        found = None if section in self._again else self.results.find(section, identity, code)
        if found is not None:
            return found
        found = self.results.add(section, identity, code, measure())
        if time.monotonic() - self._saved > _SAVE_S:
            self.results.save()
            self._saved = time.monotonic()
        return found

    def attempt(self, what: str, act: Callable[[], object]) -> None:
        """Do something; where that fails the report goes on and says so."""
        try:
            act()
            self.done.add(what)
        except Exception as error:  # noqa: BLE001  one thing that can't be measured must not end the report
            self.skipped[what] = f"{type(error).__name__}: {error}"
            self.tell(f"{what} left out: {self.skipped[what]}")


class Laboratory:
    """One model.

    Args:
        case: The model and its texts.
        store: Where low-bit models are kept between runs.
        notebook: What is known, and where numbers go.
        limit: Most tokens of the text; None for the case's own number.
    """

    def __init__(self, case: Case, store: Store, notebook: Notebook, limit: int | None = None) -> None:
        self.case, self.notebook = case, notebook
        self.checkpoint = Checkpoint.open(case.folder)
        self.tokens = case.text(limit)
        self.calibration = case.calibration()
        self._store = store
        self.source = self._digest(case.folder)
        """Digest of checkpoint and calibration text."""

    def recipe(self, *, smooth: bool = False) -> Recipe:
        """How its low-bit form is made: rounded plainly, for a cache is compared with fp16 over the same weights."""
        return Recipe(method="rtn", bits=BITS, group_size=self.case.group_size, smooth_attention=smooth)

    def low_bit(self, *, smooth: bool = False) -> StoredModel:
        """The low-bit form, made if it is not there."""
        identity = [self.source, self.recipe(smooth=smooth).to_json(), self.notebook.codes.making]
        name = f"kv-{digest(identity)}"
        if name not in self._store:
            self.notebook.tell(f"{self.case.name}: quantizing to {BITS} bits{', smoothed keys' if smooth else ''}")
            recipe = self.recipe(smooth=smooth)
            quantize(self.case.folder, self._store, recipe, name=name, calibration=self.calibration, force=True)
        return self._store.open(name)

    def elsewhere(self, name: str, folder: Path) -> Laboratory:
        """The same texts with another checkpoint."""
        other = object.__new__(Laboratory)
        other.case, other.notebook = replace(self.case, name=name, folder=folder), self.notebook
        other.checkpoint, other.tokens = Checkpoint.open(folder), self.tokens
        other.calibration, other._store = self.calibration, self._store
        other.source = other._digest(folder)
        return other

    def _digest(self, folder: Path) -> str:
        files = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".json"))
        return digest([digest_files(files), hashlib.sha256(self.calibration.encode()).hexdigest()])
