"""Measures points: quantizes into a store, opens the CPU decoder, computes the perplexity, and stores everything."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from assets import evaluation_text
from models.checkpoint import Checkpoint
from models.store import Store, StoredModel
from runtime.backends.decoder import DecoderOptions
from runtime.backends.operations.channels import total_budget
from runtime.budget.prompt_tuning import tune_prompts
from runtime.budget.refining import refine
from runtime.budget.tuning import tune
from runtime.compensation import DEFAULT_PROMPT_BUDGET_PERCENT
from runtime.load.open import open_decoder
from runtime.measure.evaluate import full_precision_perplexity, perplexity
from runtime.text.tokenizer import Tokenizer
from tests.bench.quality.making import make, weights_of
from tests.bench.quality.points import Point
from tests.bench.reporting.cases import Case
from tests.bench.reporting.losses import numbers
from tests.bench.reporting.origin import code_of_patterns
from tests.bench.reporting.results import Entry, Results, digest, digest_files
from tests.bench.reporting.run import Tell
from tuner.profiles import ProfileStore

_ORACLE = ("oracle.py", "architecture.py", "rope.py")
_MAKING = (*_ORACLE, "calibration.py", "packing.py", "salience.py", "quantize/*.py", "quantizers/*.py")
_RUNNING = ("measure/evaluate.py", "backends/cpu/**/*.py", "backends/operations/channels.py")
_TUNING = tuple(f"budget/{name}.py" for name in ("clocks", "prompt_tuning", "refining", "text", "tuning"))
_SAVE_S = 10
"""Seconds of work that a kill may cost."""


def oracle_code() -> str:
    """Digest of the code that decides what a checkpoint answers in full precision."""
    return _code("models", _ORACLE)


def making_code() -> str:
    """Digest of the code that decides what a stored model holds."""
    return _code("models", _MAKING)


def running_code() -> str:
    """Digest of the code that decides what a stored model answers."""
    return _code("runtime", _RUNNING)


def tuning_code() -> str:
    """Digest of the code that decides what a budget buys."""
    return digest([running_code(), _code("tuner", ("*.py",)), _code("runtime", _TUNING)])


@cache
def _code(package: str, patterns: tuple[str, ...]) -> str:
    return code_of_patterns(package, patterns)


def point_code(weights: str, running: str) -> str:
    """What decides a point's numbers: the weights of its model (`making.weights_of`), and the code that runs them."""
    return digest([weights, running])


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
        files = sorted(path for path in case.folder.iterdir() if path.suffix in (".safetensors", ".json"))
        self._source = digest([digest_files(files), hashlib.sha256(self.calibration.encode()).hexdigest()])
        self._text = {"text": digest(self.tokens), "window": case.window, "stride": case.stride}

    def full(self, *, as_chat: bool = False) -> Entry:
        """The checkpoint's own perplexity."""
        identity = {"source": self._source, **self._text, "as_chat": as_chat}
        found = self._results.find("full", identity, oracle_code())
        if found is None:
            case = self.case
            result = full_precision_perplexity(self.checkpoint, self.tokens, case.window, case.stride, as_chat=as_chat)
            way = "as a chat" if as_chat else "plain"
            self.tell(f"{case.name} in full precision, {way}: {result.perplexity:.3f} in {result.seconds:.1f} s")
            about = {"model": case.name, "as_chat": as_chat}
            found = self._results.add("full", identity, oracle_code(), {**about, **numbers(result)})
        return found

    def point(self, point: Point) -> Entry:
        """Measure a point, or look it up.

        Raises:
            MakingError: its model can't be made.
            RuntimeFailure: its model can't be run.
        """
        identity, stored = {"source": self._source, **self._text, **point.to_json()}, self.stored(point)
        code = point_code(stored["weights"], running_code())
        found = self._results.find("points", identity, code)
        if found is not None:
            return found
        options = DecoderOptions(
            context=self.case.window,
            k_chunk=point.k_chunk,
            prompt_k_chunk=point.prompt_k_chunk,
            select=point.select,
            measure_recall=point.measures_recall,
        )
        decoder, _ = open_decoder(self.open(point), options, "cpu")
        try:
            result = perplexity(decoder, self.tokens, self.case.window, self.case.stride, as_chat=point.as_chat)
        finally:
            decoder.close()
        self.tell(f"{point}: {result.perplexity:.3f} in {result.seconds:.1f} s")
        found_numbers = {**point.to_json(), "fetched_bytes": self._fetched(point), **numbers(result)}
        return self._results.add("points", identity, code, found_numbers)

    def budget(self, point: Point, percent: float, *, again: bool = False) -> Entry:
        """What a chat gets of a point's model where a budget decides k_chunk, and the default budget prompts.

        The budget is tuned and refined, as the program does it in the first minutes of a model on a device.

        Args:
            point: The model; how it is run does not count.
            percent: Slowdown of decoding that compensation may cost.
            again: Whether to tune and measure even where it is known.

        Raises:
            MakingError: its model can't be made.
            RuntimeFailure, TunerError: it can't be run or tuned.
        """
        stored = self.stored(point)
        recipe = point.recipe.to_json()
        identity = {"source": self._source, **self._text, "recipe": recipe, "budget": percent}
        code = point_code(stored["weights"], tuning_code())
        found = self._results.find("budgets", identity, code)
        if found is not None and not again:
            return found
        model = self.open(point)
        decoder, _ = open_decoder(model, DecoderOptions(context=2 * self.case.window), "cpu")
        profiles = ProfileStore(self._store.path(stored["name"]).parents[1] / "profiles")
        try:
            tuned = tune(decoder, model, budget_percent=percent, profiles=profiles, force=True)
            prompts = tune_prompts(
                decoder, model, budget_percent=DEFAULT_PROMPT_BUDGET_PERCENT, profiles=profiles, force=True
            )
            encode = Tokenizer(model.tokenizer_path).encode
            tuned = refine(decoder, model, tuned, profiles=profiles, text=evaluation_text(), encode=encode, force=again)
            result = perplexity(decoder, self.tokens, self.case.window, self.case.stride, as_chat=True)
        finally:
            decoder.close()
        self.tell(f"{stored['name']} with a budget of {percent:g} %: {result.perplexity:.3f}, {tuned.k_chunk}")
        about = {
            "model": point.model,
            "method": point.method,
            "bits": point.bits,
            "group_size": point.group_size,
            "budget_percent": percent,
            "k_chunk": dict(tuned.k_chunk),
            "slowdown_percent": tuned.measured_slowdown_percent,
            "prompt_k_chunk": prompts.k_chunk,
            "prompt_slowdown_percent": prompts.measured_slowdown_percent,
        }
        return self._results.add("budgets", identity, code, {**about, **numbers(result)})

    def stored(self, point: Point, *, again: bool = False) -> Entry:
        """Make a point's model, or look up what is known of it.

        Args:
            point: How it is made.
            again: Whether to make and time it even where it is known.

        Raises:
            MakingError: it can't be made.
        """
        recipe, code = point.recipe, making_code()
        identity = {"source": self._source, "model": point.model, "recipe": recipe.to_json()}
        name = f"{point.model}-{point.method}-{digest(identity)}"
        found = self._results.find("stored", identity, code)
        there = found is not None and name in self._store and found["weights"] == weights_of(self._store.path(name))
        if found is not None and there and not again:
            return found
        made = make(self.case.folder, self._store, recipe, name=name, calibration=self.calibration)
        model = self._store.open(name)
        summary = model.info.summary
        about = {
            "model": point.model,
            "name": name,
            "method": point.method,
            "bits": point.bits,
            "group_size": point.group_size,
            "residual_bits": point.residual_bits,
            "block_bits": None if model.recipe.block_bits is None else list(model.recipe.block_bits),
            "bits_per_weight": summary.bits_per_weight,
            "gpu_bytes": summary.gpu_bytes,
            "residual_bytes": summary.residual_bytes,
            "parameters": summary.parameters,
            "weights": weights_of(model.path),
            **made,
        }
        what = f"{point.model} {point.method} {point.bits:g} bits quantized"
        self.tell(f"{what} in {made['seconds']:.1f} s, {made['processor_seconds']:.1f} s of processor time")
        return self._results.add("stored", identity, code, about)

    def open(self, point: Point) -> StoredModel:
        """A point's model, made if it is not there.

        Raises:
            MakingError: it can't be made.
        """
        return self._store.open(self.stored(point)["name"])

    def known(self, section: str, about: object, code: str, measure: Callable[[], Mapping[str, Any]]) -> Entry:
        """An entry of another section that depends on the model and its texts alone.

        Args:
            section: Where it is kept.
            about: JSON value: what else decides it.
            code: Digest of the code that decides it.
            measure: Makes it if it is not known.
        """
        identity = {"source": self._source, **self._text, "about": about}
        found = self._results.find(section, identity, code)
        if found is None:
            found = self._results.add(section, identity, code, {"model": self.case.name, **measure()})
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
            rows, width = spec.linear_shape(name)
            total += total_budget(width, point.k_chunk) * rows * point.residual_bits // 8
        return total
