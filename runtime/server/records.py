"""What the server's parts tell each other about models and states; free of torch and of HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from models.progress import Cancelled, ProgressCallback
from models.recipe import DEFAULT_METHOD
from runtime.decoder import KVKind
from runtime.engine import Piece
from runtime.kv.saved_folder import Holding
from runtime.memory import CacheFacts
from runtime.problem import Problem
from runtime.sampling import SamplingOptions
from runtime.tuning import Tuning

State = Literal["empty", "loading", "ready", "generating", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """Which model is to be loaded, and how. None leaves the choice to the loader."""

    model: str
    """Name of a stored model, or of the bundled one."""
    kv: KVKind | None = None
    """Precision of the KV cache."""
    k_chunk: Mapping[str, int] | int | None = None
    """Compensated channels per 1024: one number, or one by layer type; None leaves it to the budget."""
    budget: float | None = None
    """Slowdown of decoding, in percent, that compensation may cost; 0 is none. Means nothing beside a k_chunk."""
    context: int | None = None
    """Tokens of context."""
    backend: str = "auto"
    """Which backend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """How much the loaded model is to be compensated from now on."""

    budget: float | None = None
    """Slowdown of decoding, in percent, that compensation may cost; None is the default, 0 none."""
    k_chunk: Mapping[str, int] | int | None = None
    """Compensated channels per 1024, instead of a budget."""
    force: bool = False
    """Whether to measure again even if a profile was saved."""


class EngineLike(Protocol):
    """The part of `runtime.engine.Engine` that serving needs."""

    @property
    def context(self) -> int:
        """Tokens that prompt and answer may have together."""
        ...

    @property
    def chat_stops(self) -> tuple[str, ...]:
        """Stop strings that chat answers need beside the caller's own."""
        ...

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], *, continue_final: bool = False) -> list[int]:
        """Tokens of a conversation."""
        ...

    def text_prompt(self, text: str) -> list[int]:
        """Tokens of a text to be continued."""
        ...

    def generate(
        self,
        prompt: Sequence[int],
        options: SamplingOptions,
        cancelled: Cancelled,
        *,
        trim: bool = False,
        chat: str | None = None,
    ) -> Iterator[Piece]:
        """Answer a prompt. Refuses at once what it cannot answer; the work is done while iterating."""
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
    tuning: Tuning | None = None
    """What the tuner found for the budget; None where k_chunk was given, or nothing was tuned."""
    problems: Sequence[Problem] = ()
    """Why the budget has no effect, where it has none, and what could not be page-locked."""
    caches: Mapping[str, CacheFacts] = field(default_factory=dict)
    """What every kind of cache would mean for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRecord:
    """An error as the OpenAI protocol writes it."""

    message: str
    """What happened and what to do, for a person."""
    type: str
    """`invalid_request_error`, `server_error`, ..."""
    param: str | None = None
    """The request's field at fault."""
    code: str | None = None
    """Short name of the error."""

    def to_json(self) -> dict[str, str | None]:
        """The object under `error`."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What the runtime is doing and with what. Fields about a model are None while none is loaded."""

    state: State
    """What it is doing."""
    model: str | None = None
    """The model that is loaded, or being loaded."""
    backend: str | None = None
    """What runs it."""
    reason: str | None = None
    """Why that."""
    bits: float | None = None
    """Bits of its base weights."""
    kv: str | None = None
    """Precision of its KV cache."""
    k_chunk: Mapping[str, int] | None = None
    """Compensated channels per 1024, by layer type."""
    budget_percent: float | None = None
    """Slowdown that compensation may cost; None where k_chunk was given instead."""
    slowdown_percent: float | None = None
    """Slowdown of decoding that was measured; None where none was."""
    n_tb: Mapping[str, int] | None = None
    """Thread blocks of the compensation kernel, by layer type; None where blocks mean nothing."""
    context: int | None = None
    """Tokens of context."""
    memory_bytes: int | None = None
    """Memory that the process holds."""
    weight_bytes: int | None = None
    """Bytes of weights read for one token."""
    kv_bytes: int | None = None
    """Bytes of the KV cache."""
    waiting: int = 0
    """Requests that wait for their turn."""
    pid: int = 0
    """Process id of the runtime."""
    version: str = ""
    """Version of the program."""
    error: ErrorRecord | None = None
    """Why the last load failed."""

    def to_json(self) -> dict[str, Any]:
        """The object of `GET /runtime/status`."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model that can be loaded."""

    name: str
    """Its name."""
    bits: float
    """Bits of its base weights."""
    bits_per_weight: float
    """Bits of all linear layers, scales included, divided by their weights."""
    disk_bytes: int
    """Size on disk."""
    gpu_bytes: int
    """Bytes that a device needs for the weights."""
    residual_bytes: int
    """Bytes of the residual codes."""
    parameters: int
    """Weights of the full-precision model."""
    family: str
    """Architecture."""
    context: int
    """Longest context in tokens."""
    method: str = DEFAULT_METHOD
    """Base quantizer."""
    smooth_attention: bool = False
    """Whether its key channels were evened out for a KV cache of few bits."""
    bundled: bool = False
    """Whether it came with the program."""
    perplexity_before: float | None = None
    """Of the full-precision model, on a short text."""
    perplexity_after: float | None = None
    """Of the low-bit model, on the same text."""
    warning: str | None = None
    """What a person should know before using it."""
    created: int = 0
    """When its files were written, seconds since 1970."""

    def to_json(self, *, loaded: bool) -> dict[str, Any]:
        """The object of `GET /runtime/models`."""
        return {**asdict(self), "loaded": loaded}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeRequest:
    """What low-bit model is to be made of what."""

    source: str
    """A folder with a checkpoint, or the name of one that is in the download cache."""
    bits: float = 4
    """Bits of the base weights, 3 to 4."""
    method: str = DEFAULT_METHOD
    """Base quantizer, one of `models.recipe.METHODS`."""
    group_size: int = 128
    """Input channels that share a scale."""
    residual_bits: int = 4
    """Bits of the residuals."""
    smooth_attention: bool = False
    """Whether key channels are evened out for a KV cache of few bits."""
    name: str | None = None
    """Name of the new model; derived from source and recipe if None."""
    force: bool = False
    """Whether to replace a model of that name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What is known of the device."""

    machine: Mapping[str, Any]
    """`cpu`, `memory`, `gpu`, `pcie`, as `doctor` has them."""
    bandwidth_gb_s: float | None = None
    """Measured read bandwidth in 10^9 bytes per second; None where it was not measured yet."""
    problems: Sequence[Problem] = ()
    """What is wrong."""


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


Inspector = Callable[[bool], DeviceFacts]
"""Looks at the device; called in a worker thread. Its argument says whether the device is idle."""
