"""What the server's parts ask of each other; free of torch and of HTTP."""

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


class EngineLike(Protocol):
    """The part of `runtime.engine.engine.Engine` that serving needs."""

    @property
    def context(self) -> int:
        """Tokens that prompt and answer may have together."""
        ...

    @property
    def chat_stops(self) -> tuple[str, ...]:
        """Stop strings that chat answers need beside the caller's own."""
        ...

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Tokens of a conversation; options are those of `runtime.text.tokenizer.Tokenizer.chat`."""
        ...

    def text_prompt(self, text: str) -> list[int]:
        """Tokens of a text to be continued."""
        ...

    @property
    def running(self) -> int:
        """Requests that are being answered; may be asked in any thread, as `waiting`."""
        ...

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot, or for room in the cache."""
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
        """Let a prompt be answered by the steps that follow. Refuses at once what it cannot answer."""
        ...

    def step(self) -> bool:
        """Do one step of all requests. Returns whether there is more to do."""
        ...

    def abandon(self, error: Exception) -> None:
        """End all requests with an error."""
        ...

    def embed(self, tokens: Sequence[int], cancelled: Cancelled) -> Float32Array:
        """The embedding of a text, float32 [C] of length 1. Refuses what it cannot read."""
        ...

    def inspect(
        self, prompt: Sequence[int], answer: str, progress: ProgressCallback, cancelled: Cancelled
    ) -> Inspection:
        """What the model thought at each token of an answer. Refuses what it cannot read."""
        ...

    def forget(self, chat: str | None = None) -> None:
        """Drop what is cached of a chat, or everything."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that is ready to answer."""

    name: str
    """What it is called."""
    engine: EngineLike
    """Answers prompts."""
    backend: str
    """`cpu` or `reference`."""
    reason: str
    """Why this backend."""
    bits: float
    """Bits of the base weights."""
    kv: str
    """Precision of the KV cache."""
    k_chunk: Mapping[str, int]
    """Compensated channels per 1024, by layer type."""
    context: int
    """Tokens of context."""
    weight_bytes: int
    """Bytes of weights read for one token."""
    kv_bytes: int
    """Bytes of the KV cache."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """The sampling that its maker recommends (`models.generation_config`)."""
    slots: int = 1
    """Requests that it answers at the same time."""
    tuning: Tuning | None = None
    """What the tuner found for the budget; None where k_chunk was given, or nothing was tuned."""
    prompts: PromptTuning | None = None
    """How far prompts are compensated; None where no budget decides that."""
    drafts: Drafts = None
    """How drafts were asked for."""
    speculation: Drafts = None
    """How it drafts tokens."""
    problems: Sequence[Problem] = ()
    """Why the budget has no effect, where it has none, and what could not be page-locked."""
    caches: Mapping[str, CacheFacts] = field(default_factory=dict)
    """What every kind of cache would mean for it."""


class Catalogue(Protocol):
    """The models that can be loaded. Methods read files: call them from a worker thread."""

    def entries(self) -> list[ModelEntry]:
        """All of them, by name."""
        ...

    def find(self, name: str) -> ModelEntry | None:
        """One of them; None if there is none of that name."""
        ...

    def remove(self, name: str) -> None:
        """Delete a stored model.

        Raises:
            ModelError: there is none, it is bundled, or the system refuses.
        """
        ...


class Workshop(Protocol):
    """Makes models: long work that reports where it stands and can be stopped. Called in a worker thread."""

    def quantize(self, request: QuantizeRequest, progress: ProgressCallback, cancelled: Cancelled) -> ModelEntry:
        """Make a low-bit model of a checkpoint."""
        ...

    def pull(self, name: str, revision: str | None, progress: ProgressCallback, cancelled: Cancelled) -> str:
        """Download a checkpoint. Returns its folder."""
        ...


class Loader(Protocol):
    """Loads models and tunes them; called in the engine's thread.

    Both stop with `runtime.errors.Cancelled` where `cancelled` says so.
    """

    def load(self, request: LoadRequest, progress: ProgressCallback, cancelled: Cancelled) -> LoadedModel:
        """Load a model."""
        ...

    def tune(
        self, loaded: LoadedModel, request: TuneRequest, progress: ProgressCallback, cancelled: Cancelled
    ) -> LoadedModel:
        """Change the compensation of a loaded model. Stopped, it leaves everything as it was."""
        ...

    def forget(self, chat: str | None) -> Holding:
        """Delete the saved caches of a conversation, or all of them. Returns what was deleted.

        Raises:
            SavedCacheError: the system refuses.
        """
        ...

    def held(self) -> Holding:
        """What the saved caches take on disk."""
        ...


Inspector = Callable[[bool], DeviceReport]
"""Looks at the device, not at what runs on it; called in a worker thread. Its argument: is the device idle?"""
