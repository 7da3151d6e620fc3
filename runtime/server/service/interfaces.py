"""Protocols between the server's parts. Free of torch and HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from models.progress import Cancelled, ProgressCallback
from runtime.drafting import Drafts
from runtime.engine.generation import Piece
from runtime.errors import Problem
from runtime.text.sampling import Float32Array, SamplingOptions
from runtime.wire.answers import CacheFacts, Holding, ModelEntry
from runtime.wire.device import DeviceReport, PromptTuning, Tuning
from runtime.wire.inspection import Inspection
from runtime.wire.requests import LoadRequest, QuantizeRequest, TuneRequest
from tuner.placement import ExpertPlacement


class EngineLike(Protocol):
    """The part of `runtime.engine.engine.Engine` used for serving."""

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer together."""
        ...

    @property
    def chat_stops(self) -> tuple[str, ...]:
        """Stop strings for chat answers, in addition to the caller's own."""
        ...

    def reasoning_opened(self, prompt: Sequence[int]) -> str:
        """The tag of reasoning that a prompt ends with."""
        ...

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Tokens of a conversation; options are those of `runtime.text.tokenizer.Tokenizer.chat`."""
        ...

    def text_prompt(self, text: str) -> list[int]:
        """Tokens of a text to be continued."""
        ...

    @property
    def running(self) -> int:
        """Requests being answered. Thread-safe, as `waiting` is."""
        ...

    @property
    def waiting(self) -> int:
        """Requests waiting for a slot or for room in the cache."""
        ...

    def submit(
        self,
        prompt: Sequence[int],
        options: SamplingOptions,
        receive: Callable[[Piece | Exception], None],
        cancelled: Cancelled,
        *,
        trim: bool = False,
        chat: str | None = None,
    ) -> None:
        """Queue a prompt, to be answered by later steps. Raises at once if that is impossible."""
        ...

    def step(self) -> bool:
        """Run one step of all requests. Returns whether work remains."""
        ...

    def abandon(self, error: Exception) -> None:
        """End all requests with an error."""
        ...

    def embed(self, tokens: Sequence[int], cancelled: Cancelled) -> Float32Array:
        """The embedding of a text, float32 [C], normalized. Raises if the text cannot be read."""
        ...

    def inspect(
        self, prompt: Sequence[int], answer: str, progress: ProgressCallback, cancelled: Cancelled
    ) -> Inspection:
        """Inspect the tokens of an answer. Raises if it cannot be read."""
        ...

    def forget(self, chat: str | None = None) -> None:
        """Drop the cached tokens of a chat, or of all."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A loaded model."""

    name: str
    """Its name."""
    engine: EngineLike
    """Answers prompts."""
    backend: str
    """Name of the backend."""
    reason: str
    """The reason for this backend."""
    bits: float
    """Bits of the base weights."""
    kv: str
    """Precision of the KV cache."""
    k_chunk: Mapping[str, int]
    """Compensated channels per 1024, by layer type."""
    context: int
    """Tokens of context."""
    weight_bytes: int
    """Bytes of weights read per token."""
    kv_bytes: int
    """Bytes of the KV cache."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Sampling settings recommended by its maker (`models.generation_config`)."""
    slots: int = 1
    """Most requests answered at the same time."""
    tuning: Tuning | None = None
    """Tuning result; None with a fixed k_chunk or without tuning."""
    prompts: PromptTuning | None = None
    """Prompt tuning result; None without a prompt budget."""
    drafts: Drafts = None
    """The requested drafting mode."""
    speculation: Drafts = None
    """The actual drafting mode."""
    problems: Sequence[Problem] = ()
    """Problems: why a budget has no effect, or what could not be page-locked."""
    caches: Mapping[str, CacheFacts] = field(default_factory=dict)
    """Sizes of every kind of cache for it."""
    experts: Callable[[], ExpertPlacement | None] = lambda: None
    """Where its experts are now; see `DeviceReport.experts`."""


class Catalogue(Protocol):
    """The loadable models. Methods read files: call them in a worker thread."""

    def entries(self) -> list[ModelEntry]:
        """All models by name."""
        ...

    def find(self, name: str) -> ModelEntry | None:
        """A model by name; None if there is none."""
        ...

    def remove(self, name: str) -> None:
        """Delete a stored model.

        Raises:
            ModelError: there is none, it is bundled, or the system refuses.
        """
        ...


class Workshop(Protocol):
    """Creates models: long work with progress reports that can be cancelled. Called in a worker thread."""

    def quantize(self, request: QuantizeRequest, progress: ProgressCallback, cancelled: Cancelled) -> ModelEntry:
        """Quantize a checkpoint."""
        ...

    def pull(self, name: str, revision: str | None, progress: ProgressCallback, cancelled: Cancelled) -> str:
        """Download a checkpoint. Returns its folder."""
        ...


class Loader(Protocol):
    """Loads models and tunes them; called in the engine's thread.

    Both raise `runtime.errors.Cancelled` if `cancelled` says so.
    """

    def load(self, request: LoadRequest, progress: ProgressCallback, cancelled: Cancelled) -> LoadedModel:
        """Load a model."""
        ...

    def tune(
        self, loaded: LoadedModel, request: TuneRequest, progress: ProgressCallback, cancelled: Cancelled
    ) -> LoadedModel:
        """Change the compensation of a loaded model. If cancelled, everything stays as it was."""
        ...

    def refine(self, loaded: LoadedModel, cancelled: Cancelled) -> LoadedModel:
        """Take one step to a better tuning of a loaded model: its prompts, if they were put off, then its budget.

        Called while nothing else runs, until it returns what it got. `cancelled` is polled every few steps; then
        everything stays as it was, and the next call continues.
        """
        ...

    def forget(self, chat: str | None) -> Holding:
        """Delete the saved caches of a conversation, or of all. Returns the deleted files.

        Raises:
            SavedCacheError: the system refused.
        """
        ...

    def held(self) -> Holding:
        """Saved caches on disk."""
        ...


Inspector = Callable[[bool], DeviceReport]
"""Inspects the device itself; called in a worker thread. Its argument: whether the device is idle."""
