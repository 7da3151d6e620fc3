"""What a runtime tells of itself, of its models and of what answers cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from models.recipe import DEFAULT_METHOD
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
"""HTTP status of an error by its code, where it is neither 400 nor 500: in the middle of a stream there is only the
code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRecord:
    """An error as the OpenAI protocol writes it, under `error`."""

    message: str
    """What happened and what to do, for a person."""
    type: str
    """`invalid_request_error`, `server_error`, ..."""
    param: str | None = None
    """The request's field at fault."""
    code: str | None = None
    """Short name of the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """`GET /runtime/status`: what it is doing and with what. Fields about a model are None while none is loaded."""

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
    prompt_k_chunk: int | None = None
    """Channels per 1024 that the rows of a prompt share."""
    prompt_slowdown_percent: float | None = None
    """How much longer a prompt takes by that, as it was measured; None where it was not."""
    n_tb: Mapping[str, int] | None = None
    """Thread blocks of the compensation kernel, by layer type; None where blocks mean nothing."""
    context: int | None = None
    """Tokens of context."""
    memory_bytes: int | None = None
    """Memory that the runtime process holds."""
    weight_bytes: int | None = None
    """Bytes of weights read for one token."""
    kv_bytes: int | None = None
    """Bytes of the KV cache."""
    sampling: Mapping[str, float] | None = None
    """The sampling that its maker recommends, by the keys of generation_config.json."""
    speculates: bool = False
    """Whether the model drafts tokens and verifies several at a time."""
    running: int = 0
    """Requests that are being answered."""
    waiting: int = 0
    """Requests that wait: for a slot, for room in the cache, or for what must be done before."""
    slots: int = 0
    """Requests that can be answered at the same time."""
    pid: int = 0
    """Process id of the runtime."""
    version: str = ""
    """Version of the program that runs it."""
    error: ErrorRecord | None = None
    """Why the last load failed."""


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
    loaded: bool = False
    """Whether it is loaded now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelList:
    """`GET /runtime/models`."""

    models: Sequence[ModelEntry]
    """All that can be loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The end of a load's or a tuning's progress."""

    status: Status
    """What runs now."""
    phase: Literal["done"] = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """The end of a quantization's progress."""

    model: ModelEntry
    """What was made."""
    phase: Literal["done"] = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """The end of a download's progress."""

    name: str
    """The checkpoint."""
    path: str
    """Its folder."""
    phase: Literal["done"] = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What some saved caches of conversations take; `POST /runtime/forget` tells what it deleted."""

    files: int = 0
    """How many there are."""
    bytes: int = 0
    """What they take on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFacts:
    """What a kind of cache would mean for the loaded model."""

    bytes_per_token: float
    """Bytes of a token, once it is in a page."""
    context: int
    """Tokens that fit one conversation, at most the model's own maximum; 0 where none do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caches(Holding):
    """`GET /runtime/caches`: what all saved caches take, and what each kind of cache would mean."""

    kinds: Mapping[str, CacheFacts]
    """By the kind's name; empty where no model is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationRecord:
    """What speculation did in an answer."""

    gamma: Count
    """Tokens that the model drafts a round at the end; 0: that did not pay. Where it drafts none, how many were copied
    a round, on average."""
    acceptance_rate: Number
    """Part of the drafted tokens that stayed."""
    tokens_per_verify: Number
    """Tokens that a round gave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """What an answer cost: `timings` beside the last of what OpenAI's protocol has."""

    ttft_s: Number
    """Seconds from the request to the first token."""
    prefill_tokens_per_s: Number
    """Speed of reading the prompt."""
    decode_tokens_per_s: Number
    """Speed of writing the answer."""
    prompt_tokens: Count
    """Tokens of the prompt."""
    cached_tokens: Count
    """Of these, tokens that were in the cache still."""
    completion_tokens: Count
    """Tokens of the answer."""
    k_chunk: Mapping[str, Count] | None
    """Compensated channels per 1024, by layer type."""
    slowdown_percent: float | None
    """Slowdown of decoding by that compensation, where it was measured."""
    prompt_slowdown_percent: float | None = None
    """How much longer the prompt took by compensation, as it was measured when the model was tuned."""
    speculation: SpeculationRecord | None = None
    """What speculation did; None where nothing was drafted, nor was to be by the model."""
