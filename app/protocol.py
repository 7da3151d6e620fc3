"""What a runtime's answers mean: records, errors and reports, read from JSON. Importing this is cheap."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from app.errors import ClientError, ProtocolError, answer_error

_STATUS_OF_CODE = {
    "model_not_found": 404,
    "busy": 409,
    "out_of_memory": 503,
    "backend_unavailable": 503,
    "model_unavailable": 503,
    "overloaded": 503,
    "cancelled": 503,
}
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What the runtime is doing and with what; fields about a model are None while none is loaded."""

    state: str
    """`empty`, `loading`, `ready`, `generating` or `failed`."""
    model: str | None
    """The model that is loaded, or being loaded."""
    backend: str | None
    """What runs it."""
    reason: str | None
    """Why that."""
    bits: float | None
    """Bits of its base weights."""
    kv: str | None
    """Precision of its KV cache."""
    k_chunk: Mapping[str, int] | None
    """Compensated channels per 1024, by layer type."""
    budget_percent: float | None
    """Slowdown that compensation may cost; None where k_chunk was given instead."""
    slowdown_percent: float | None
    """Slowdown of decoding that was measured; None where none was."""
    n_tb: Mapping[str, int] | None
    """Thread blocks of the compensation kernel, by layer type; None where blocks mean nothing."""
    context: int | None
    """Tokens of context."""
    memory_bytes: int | None
    """Memory that the runtime process holds."""
    weight_bytes: int | None
    """Bytes of weights read for one token."""
    kv_bytes: int | None
    """Bytes of the KV cache."""
    waiting: int
    """Requests that wait for their turn."""
    pid: int
    """Process id of the runtime."""
    version: str
    """Version of the program that runs it."""
    error: Mapping[str, str | None] | None
    """Why the last load failed: message, type, param, code."""


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
    method: str
    """Base quantizer."""
    smooth_attention: bool
    """Whether its key channels were evened out for a KV cache of few bits."""
    bundled: bool
    """Whether it came with the program."""
    perplexity_before: float | None
    """Of the full-precision model, on a short text."""
    perplexity_after: float | None
    """Of the low-bit model, on the same text."""
    warning: str | None
    """What a person should know before using it."""
    loaded: bool
    """Whether it is loaded now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """What an answer cost."""

    ttft_s: float
    """Seconds from the request to the first token."""
    prefill_tokens_per_s: float
    """Speed of reading the prompt."""
    decode_tokens_per_s: float
    """Speed of writing the answer."""
    prompt_tokens: int
    """Tokens of the prompt."""
    cached_tokens: int
    """Of these, tokens that were in the cache still."""
    completion_tokens: int
    """Tokens of the answer."""
    k_chunk: Mapping[str, int] | None
    """Compensated channels per 1024, by layer type."""
    slowdown_percent: float | None
    """Slowdown of decoding by that compensation, where it was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KneeCurve:
    """How the time of one layer type grows with k_chunk (QDEC Fig. 17)."""

    kind: str
    """`qkv`, `o`, `gate_up`, `down` or `head`."""
    n_tb: int
    """Thread blocks of the compensation; 0 where blocks mean nothing."""
    points: Sequence[tuple[int, float]]
    """(k_chunk, time relative to none), k_chunk ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What the tuner found for a model on a device."""

    device: str
    """What it was found on."""
    budget_percent: float
    """Slowdown that was allowed."""
    n_tb_max: int | None
    """Most thread blocks of any layer type; None where blocks mean nothing."""
    n_tb: Mapping[str, int]
    """Thread blocks by layer type."""
    k_chunk: Mapping[str, int]
    """Compensated channels per 1024, by layer type."""
    predicted_slowdown_percent: float
    """From the times of the layers alone."""
    measured_slowdown_percent: float | None
    """Of whole decoding steps."""
    seconds: float
    """How long tuning took."""
    date: str
    """When, in UTC, as ISO 8601 writes it; empty where nothing was tuned."""
    curve: Sequence[KneeCurve]
    """What its plot shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProblem:
    """Something that is wrong with the device."""

    what: str
    """What is wrong, in one line."""
    fix: str
    """What to do about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFacts:
    """What a kind of KV cache would mean for the loaded model."""

    bytes_per_token: float
    """Bytes of a token."""
    context: int
    """Tokens that fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """The device that runs models, and how the loaded model was tuned to it."""

    machine: Mapping[str, Any]
    """`cpu`, `memory`, `gpu`, `pcie`, `backend`, `reason`, as `lowbit-chat doctor --json` has them."""
    bandwidth_gb_s: float | None
    """Measured read bandwidth of the memory, in 10^9 bytes per second."""
    tuning: Tuning | None
    """None where nothing was tuned."""
    problems: Sequence[DeviceProblem]
    """What is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCaches:
    """What is on disk of conversations' caches."""

    files: int
    """How many files."""
    bytes: int
    """What they take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caches:
    """Caches of conversations: what is on disk, and what each kind means for the loaded model."""

    saved: SavedCaches
    """What is on disk."""
    kinds: Mapping[str, CacheFacts]
    """By the kind's name; empty where no model is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How an answer is drawn. None leaves it to the runtime."""

    model: str | None = None
    """Model that answers; None is the one that is loaded, or was loaded last through this client."""
    temperature: float | None = None
    """Spread of sampling; 0 takes the most likely token."""
    top_p: float | None = None
    """Share of probability sampled from."""
    top_k: int | None = None
    """Most tokens sampled from; 0 is all."""
    min_p: float | None = None
    """Least probability relative to the best."""
    repetition_penalty: float | None = None
    """Divides the logits of tokens seen before."""
    max_tokens: int | None = None
    """Most tokens of the answer."""
    seed: int | None = None
    """Makes draws repeatable."""
    stop: Sequence[str] | None = None
    """Texts that end the answer."""
    chat: str | None = None
    """The conversation that the answer belongs to, by a name of its own; `RuntimeClient.forget` takes it."""
    continue_final: bool = False
    """Whether the last message, the assistant's, is continued rather than answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDelta:
    """A piece of an answer."""

    text: str
    """What was added; maybe empty."""
    finish_reason: str | None = None
    """`stop` or `length`, in the last piece."""
    timings: Timings | None = None
    """In the last piece."""


def status_error(status: int, content: bytes) -> ClientError:
    """The error of an answer with an error status."""
    try:
        body = json.loads(content)
    except ValueError:
        body = None
    return _error(status, body if isinstance(body, dict) else {})


def stream_error(event: Mapping[str, Any]) -> ClientError:
    """The error that came in the middle of a stream, where there is no status: its code tells the kind."""
    found = event.get("error")
    told = found if isinstance(found, dict) else {}
    refusal = 400 if told.get("type") == "invalid_request_error" else 500
    return _error(_STATUS_OF_CODE.get(str(told.get("code")), refusal), event)


def _error(status: int, body: Mapping[str, Any]) -> ClientError:
    found = body.get("error")
    told = found if isinstance(found, dict) else {}
    message, param, code = told.get("message"), told.get("param"), told.get("code")
    return answer_error(
        status,
        message if isinstance(message, str) and message else f"the runtime answered with status {status}",
        param=param if isinstance(param, str) else None,
        code=code if isinstance(code, str) else None,
    )


def read_object(data: str | bytes) -> dict[str, Any]:
    """A JSON object."""
    try:
        body = json.loads(data)
    except ValueError as error:
        raise ProtocolError("the runtime answered with something that is not JSON") from error
    if not isinstance(body, dict):
        raise ProtocolError("the runtime answered with something that is not a JSON object")
    return body


def read_items(value: object) -> list[dict[str, Any]]:
    """A list of JSON objects."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ProtocolError("the runtime's answer lacks a list that it should have")
    return value


def read_record(kind: type[R], body: Mapping[str, Any]) -> R:
    """A dataclass from a JSON object; fields that this version does not know are left out."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    missing = [name for name in names if name not in body]
    if missing:
        raise ProtocolError(f"the runtime's answer lacks {', '.join(missing)}")
    return kind(**{name: body[name] for name in names})


def read_device(body: Mapping[str, Any]) -> DeviceReport:
    """The answer of GET /runtime/device."""
    tuning, machine = body.get("tuning"), body.get("machine")
    return DeviceReport(
        machine=machine if isinstance(machine, dict) else {},
        bandwidth_gb_s=body.get("bandwidth_gb_s"),
        tuning=_read_tuning(tuning) if isinstance(tuning, dict) else None,
        problems=tuple(read_record(DeviceProblem, item) for item in read_items(body.get("problems"))),
    )


def read_caches(body: Mapping[str, Any]) -> Caches:
    """The answer of `GET /runtime/caches`."""
    kinds = body.get("kinds")
    return Caches(
        saved=read_record(SavedCaches, body),
        kinds={
            name: read_record(CacheFacts, item)
            for name, item in (kinds if isinstance(kinds, dict) else {}).items()
            if isinstance(item, dict)
        },
    )


def _read_tuning(body: Mapping[str, Any]) -> Tuning:
    curve = []
    for item in read_items(body.get("curve")):
        try:
            points = tuple((int(k_chunk), float(time)) for k_chunk, time in item.get("points", ()))
        except (TypeError, ValueError) as error:
            raise ProtocolError("the runtime's answer has a curve that cannot be read") from error
        curve.append(read_record(KneeCurve, {**item, "points": points}))
    return read_record(Tuning, {**body, "curve": tuple(curve)})


def read_delta(choice: Mapping[str, Any], timings: object) -> ChatDelta:
    """One choice of a chunk."""
    delta, finish = choice.get("delta"), choice.get("finish_reason")
    text = delta.get("content") if isinstance(delta, dict) else None
    return ChatDelta(
        text=text if isinstance(text, str) else "",
        finish_reason=finish if isinstance(finish, str) else None,
        timings=read_record(Timings, timings) if isinstance(timings, dict) else None,
    )


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that are not left open."""
    return {key: value for key, value in options.items() if value is not None}
