"""Measuring points: quantize into a store, open the CPU decoder, take the perplexity; everything measured is kept."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from models.checkpoint import Checkpoint
from models.quantize import quantize
from models.store import Store
from runtime.decoder import DecoderOptions
from runtime.evaluate import full_precision_perplexity, perplexity
from runtime.open import open_decoder
from runtime.operations.channels import total_budget
from tests.bench.quality.points import Point
from tests.bench.reporting.cases import ROOT, STRIDE, WINDOW, Case
from tests.bench.reporting.losses import numbers
from tests.bench.reporting.results import Entry, Results, digest, digest_files
from tests.bench.reporting.run import Tell

_MAKING = (
    "calibration.py",
    "oracle.py",
    "architecture.py",
    "packing.py",
    "rope.py",
    "quantize/*.py",
    "quantizers/*.py",
)
_RUNNING = ("evaluate.py", "backends/cpu/**/*.py", "operations/channels.py")
_SAVE_S = 10
"""Seconds of work that a kill may cost."""


def making_code() -> str:
    """Digest of the code that decides what a stored model holds."""
    return digest_files(file for pattern in _MAKING for file in (ROOT / "models").glob(pattern))


def running_code() -> str:
    """Digest of the code that decides what a stored model answers."""
    return digest_files(file for pattern in _RUNNING for file in (ROOT / "runtime").glob(pattern))


class Laboratory:
    """Measures the points of one model.

    Args:
        case: The model and its texts.
        store: Where quantized models are kept between points and runs.
        results: What is known already, and where numbers go.
        tell: Receives a line for each thing done.
        limit: Most tokens of the text; None for the case's own number.
    """

    def __init__(self, case: Case, store: Store, results: Results, tell: Tell, limit: int | None = None) -> None:
        self.case = case
        self.checkpoint = Checkpoint.open(case.folder)
        self.tokens = case.text(limit)
        self.calibration = case.calibration()
        self._store = store
        self._saved = time.monotonic()
        self._results = results
        self.tell = tell
        self._codes = (making_code(), digest([making_code(), running_code()]))
        files = sorted(path for path in case.folder.iterdir() if path.suffix in (".safetensors", ".json"))
        self._source = digest([digest_files(files), hashlib.sha256(self.calibration.encode()).hexdigest()])
        self._text = {"text": digest(self.tokens), "window": WINDOW, "stride": STRIDE}

    def full(self) -> Entry:
        """The checkpoint's own perplexity."""
        identity = {"source": self._source, **self._text}
        found = self._results.find("full", identity, self._codes[1])
        if found is None:
            result = full_precision_perplexity(self.checkpoint, self.tokens, WINDOW, STRIDE)
            self.tell(f"{self.case.name} in full precision: {result.perplexity:.3f}")
            found = self._results.add("full", identity, self._codes[1], {"model": self.case.name, **numbers(result)})
        return found

    def point(self, point: Point) -> Entry:
        """Measure a point, or look it up.

        Raises:
            ModelError: its model can't be made.
            RuntimeFailure: its model can't be run.
        """
        identity = {"source": self._source, **self._text, **point.to_json()}
        found = self._results.find("points", identity, self._codes[1])
        if found is not None:
            self.stored(point)
            return found
        name = self.stored(point)["name"]
        options = DecoderOptions(
            context=WINDOW, k_chunk=point.k_chunk, select=point.select, measure_recall=point.measures_recall
        )
        decoder, _ = open_decoder(self._store.open(name), options, "cpu")
        try:
            result = perplexity(decoder, self.tokens, WINDOW, STRIDE)
        finally:
            decoder.close()
        self.tell(
            f"{point.model} {point.method} {point.bits:g} bits, residual {point.residual_bits}, {point.select} "
            f"k_chunk {point.k_chunk}: {result.perplexity:.3f} in {result.seconds:.1f} s"
        )
        found_numbers = {**point.to_json(), "fetched_bytes": self._fetched(point), **numbers(result)}
        return self._results.add("points", identity, self._codes[1], found_numbers)

    def stored(self, point: Point) -> Entry:
        """Make a point's model, or look up what is known of it.

        Raises:
            ModelError: it can't be made.
        """
        recipe = point.recipe
        identity = {"source": self._source, "model": point.model, "recipe": recipe.to_json()}
        name = f"{point.model}-{point.method}-{digest([identity, self._codes[0]])}"
        found = self._results.find("stored", identity, self._codes[0])
        if found is not None and found["name"] in self._store:
            return found
        begin = time.perf_counter()
        info = quantize(self.case.folder, self._store, recipe, name=name, calibration=self.calibration, force=True)
        seconds = time.perf_counter() - begin
        numbers = {
            "model": point.model,
            "name": name,
            "method": point.method,
            "bits": point.bits,
            "group_size": point.group_size,
            "residual_bits": point.residual_bits,
            "block_bits": None if info.recipe.block_bits is None else list(info.recipe.block_bits),
            "bits_per_weight": info.summary.bits_per_weight,
            "gpu_bytes": info.summary.gpu_bytes,
            "residual_bytes": info.summary.residual_bytes,
            "parameters": info.summary.parameters,
            "seconds": round(seconds, 2),
        }
        self.tell(f"{point.model} {point.method} {point.bits:g} bits quantized in {seconds:.1f} s")
        return self._results.add("stored", identity, self._codes[0], numbers)

    def known(self, section: str, about: object, measure: Callable[[], Mapping[str, Any]]) -> Entry:
        """An entry of another section that depends on the model and its texts alone.

        Args:
            section: Where it is kept.
            about: JSON value: what else decides it.
            measure: Makes it if it is not known.
        """
        identity = {"source": self._source, **self._text, "about": about}
        found = self._results.find(section, identity, "")
        if found is None:
            found = self._results.add(section, identity, "", {"model": self.case.name, **measure()})
        return found

    def save_now_and_then(self) -> None:
        """Write the results file if the last time was a while ago."""
        if time.monotonic() - self._saved > _SAVE_S:
            self._results.save()
            self._saved = time.monotonic()

    def _fetched(self, point: Point) -> int:
        """Bytes of residual rows that a token fetches, without the scales."""
        spec = self.checkpoint.spec
        total = 0
        for name in spec.linear_names():
            rows, width = spec.linear_shape(name.rsplit(".", 1)[-1])
            total += total_budget(width, point.k_chunk) * rows * point.residual_bits // 8
        return total
