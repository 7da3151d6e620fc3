"""Records on the runtime's status, its models, and the cost of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from models.recipe import DEFAULT_METHOD
from runtime.compensation import EXACT, Exact
from runtime.kv.kinds import DEFAULT_KV
from runtime.wire.codec import Count, Number

State = Literal["empty", "loading", "ready", "generating", "failed"]

STATUS_OF_CODE: Mapping[str, int] = {
    "model_not_found": 404,
    "busy": 409,
    "no_model": 409,
    "backend_unavailable": 503,
    "cancelled": 503,
    "disk": 503,
    "model_unavailable": 503,
    "out_of_memory": 503,
    "overloaded": 503,
}
"""HTTP status by error code, if it is neither 400 nor 500: errors inside a stream only carry the code."""
BASE = "base model"
CONTINUES = f"a {BASE}: it continues a text instead of answering"
"""What people are told of a model without a chat template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRecord:
    """An error in the OpenAI protocol's format, under `error`."""

    message: str
    """The problem and advice, for the user."""
    type: str
    """`invalid_request_error`, `server_error`, ..."""
    param: str | None = None
    code: str | None = None
    """Short name of the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """`GET /runtime/status`: the runtime's state. Fields about a model are None while none is loaded."""

    state: State
    model: str | None = None
    """The model that is loaded or being loaded."""
    also_loaded: Sequence[str] = ()
    """Other models that are loaded, the latest used first."""
    backend: str | None = None
    reason: str | None = None
    """The reason for this backend."""
    bits: float | None = None
    """Bits of its base weights."""
    base: bool = False
    """See `ModelEntry`."""
    kv: str | None = None
    """Precision of its KV cache."""
    k_chunk: Mapping[str, int] | None = None
    """Compensated channels per 1024, by layer type."""
    budget_percent: float | None = None
    """Slowdown budget; None with a fixed k_chunk."""
    exact: bool = False
    """Whether the source's own weights answer."""
    slowdown_percent: float | None = None
    """Measured slowdown of decoding; None if not measured."""
    prompt_k_chunk: int | None = None
    """Channels per 1024 shared by the rows of a prompt."""
    prompt_slowdown_percent: float | None = None
    """Measured slowdown of prompts by that; None if not measured."""
    n_tb: Mapping[str, int] | None = None
    """Thread blocks of the compensation kernel, by layer type; None on CPUs."""
    context: int | None = None
    """Tokens of context."""
    memory_bytes: int | None = None
    """Resident memory of the runtime process."""
    weight_bytes: int | None = None
    """Bytes of weights read per token."""
    kv_bytes: int | None = None
    """Bytes of the KV cache."""
    sampling: Mapping[str, float] | None = None
    """Sampling settings recommended by the model's maker, by the keys of generation_config.json."""
    speculates: bool = False
    """Whether the model drafts for itself, with its low-bit weights."""
    drafts_by_head: bool = False
    """Whether its block that predicts further tokens drafts."""
    running: int = 0
    waiting: int = 0
    """Requests waiting for a slot, for room in the cache, or for other work."""
    slots: int = 0
    """Most requests answered at the same time."""
    pid: int = 0
    """Process id of the runtime."""
    version: str = ""
    error: ErrorRecord | None = None
    """The error of the last load."""

    @property
    def budget(self) -> float | Exact | None:
        """The budget as a setting has it; None with a fixed k_chunk, or where no budget has an effect."""
        return EXACT if self.exact else self.budget_percent


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model that can be loaded."""

    name: str
    bits: float
    """Bits of its base weights."""
    bits_per_weight: float
    """Bits of all linear layers, including scales, divided by the number of weights."""
    disk_bytes: int
    gpu_bytes: int
    """Device memory of the weights in bytes."""
    residual_bytes: int
    """Bytes of the residual codes."""
    parameters: int
    """Weights of the full-precision model."""
    family: str
    context: int
    """Longest context in tokens."""
    active_bytes: int | None = None
    """Of `gpu_bytes`, what a token reads of a mixture of experts; None: all of them."""
    method: str = DEFAULT_METHOD
    smooth_attention: bool = False
    """Whether its key channels were equalized for low-bit KV caches."""
    bundled: bool = False
    """Whether it is bundled with the program."""
    perplexity_before: float | None = None
    """Perplexity of the full-precision model on a short text."""
    perplexity_after: float | None = None
    """Perplexity of the low-bit model on the same text."""
    warning: str | None = None
    """A note for the user."""
    base: bool = False
    """Whether it is a base model: it has no chat template, and continues a text instead of answering."""
    certificate: str | None = None
    """What it loses of its source, measured token by token; a line without a budget, a line with budgets."""
    created: int = 0
    """When its files were written, in seconds since 1970."""
    loaded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelList:
    """`GET /runtime/models`."""

    models: Sequence[ModelEntry]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The last item of a load's or a tuning's progress."""

    status: Status
    phase: Literal["done"] = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """The last item of a quantization's progress."""

    model: ModelEntry
    """Name of the new model."""
    phase: Literal["done"] = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """The last item of a download's progress."""

    name: str
    path: str
    phase: Literal["done"] = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Count and size of saved conversation caches; `POST /runtime/forget` returns those it deleted."""

    files: int = 0
    bytes: int = 0
    """Bytes on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFacts:
    """Sizes of a kind of cache for the loaded model."""

    bytes_per_token: float
    """Bytes per token of a conversation that fills the context, once in pages."""
    context: int
    """Tokens that fit in one conversation, at most the model's maximum; 0 if none do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caches(Holding):
    """`GET /runtime/caches`: all saved caches, and the sizes of each kind of cache."""

    kinds: Mapping[str, CacheFacts]
    """By kind; empty if no model is loaded."""
    usual: str = DEFAULT_KV
    """The loaded model's default kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationRecord:
    """Speculation statistics of an answer."""

    gamma: Count
    """Tokens that the model or its head drafts per round, at the end of the answer; 0: drafting did not pay. If neither
    does, the average number of copied tokens per round."""
    acceptance_rate: Number
    """Accepted share of the drafted tokens."""
    tokens_per_verify: Number
    """Tokens per round."""
    source: str | None = None
    """What drafted most: `copies` of the text, the model's `head` that predicts further tokens, or the `model`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Speed and cost of an answer: `timings`, an addition to the last item of OpenAI's protocol."""

    ttft_s: Number
    """Seconds from the request to the first token."""
    prefill_tokens_per_s: Number
    decode_tokens_per_s: Number
    prompt_tokens: Count
    """Tokens of the prompt."""
    cached_tokens: Count
    """Prompt tokens that were already in the cache."""
    completion_tokens: Count
    """Tokens of the answer."""
    k_chunk: Mapping[str, Count] | None
    """Compensated channels per 1024, by layer type."""
    slowdown_percent: float | None
    """Measured slowdown of decoding by that compensation."""
    prompt_slowdown_percent: float | None = None
    """Slowdown of the prompt by compensation, as measured when the model was tuned."""
    speculation: SpeculationRecord | None = None
    """Speculation statistics; None if nothing was drafted and the model was not asked to draft."""
