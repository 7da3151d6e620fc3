"""Decoder: the interface of a loaded model on a backend. It turns a step of tokens into logits, and holds the KV cache.

A step is a flat batch of rows: each row is one token of one sequence (`slot`) at one position. Prefill is many rows of
one slot, decode one row for each running slot, verification a few rows of each. Batching is thus decided by the
scheduler, which chooses the rows of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from models.packed import SourceWeights
from models.part import seams
from models.spec import ModelSpec
from runtime.compensation import k_chunk_by_type
from runtime.errors import RequestError
from runtime.kv.control import KVCache
from runtime.kv.kinds import KVKind as KVKind
from runtime.text.sampling import Draw, Drawn
from tuner.placement import ExpertPlacement

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
Selector = Literal["approx", "exact", "static", "random"]
MTP_KV: KVKind = "int8"
"""Kind of cache of a block that predicts further tokens: one that can be cut back anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderOptions:
    """Options of a loaded model."""

    kv: KVKind = "fp16"
    """Kind of KV cache: see `runtime.kv.kinds`."""
    context: int = 4096
    """Positions per slot, in tokens."""
    slots: int = 1
    """Number of sequences in the cache (B)."""
    pages: int | None = None
    """Pages of the cache that all slots share; None = as many as `slots` sequences of `context` tokens need."""
    k_chunk: Mapping[str, int] | int = 0
    """Salient channels compensated per 1024 input channels: one number, or one by layer type (`qkv`, `o`, `gate_up`,
    `down`, `head`; absent = 0). A narrower matrix gets its share, rounded up; 1024 compensates every channel."""
    prompt_k_chunk: Mapping[str, int] | int = 0
    """Channels per 1024 whose residuals all rows of a prompt share, counted like `k_chunk`. The static selection
    chooses them, so that a prompt's cache entries do not depend on how it was split into steps. For the head, whether
    the last row is compensated like a decoded token."""
    draft_k_chunk: Mapping[str, int] | int = 0
    """Channels per 1024 compensated in drafted tokens, counted like `k_chunk`."""
    sensitive_layers: tuple[int, ...] = ()
    """Layers whose pages drafts read as the target does, if the kind of cache has a draft (QuantSpec, Algorithm 1: L_S
    of them)."""
    exact: SourceWeights | None = None
    """The source's own weights, which all steps but drafts multiply with, in float32, instead of low-bit ones. Nothing
    is compensated then. Only on the CPU backend."""
    n_tb: Mapping[str, int] = field(default_factory=dict)
    """Thread blocks for compensation on a GPU, by layer type (QDEC §4.4); unused on CPUs."""
    experts_on_device: int | None = None
    """Experts of each block, shared ones among them, whose weights are on a GPU; the others' are read from page-locked
    main memory. None: all. Unused on CPUs."""
    layers_on_device: int | None = None
    """First blocks on a GPU, where the processor runs the others. Only used where a model is shared by both."""
    select: Selector = "approx"
    """Selector of salient channels (QDEC §4.3): bucketed approximate top-k, exact top-k, static, random."""
    max_rows: int = 128
    """Most rows of one step (M)."""
    threads: int = 0
    """Threads of the CPU backend; 0 = physical cores."""
    seed: int = 0
    """Seed of the random selector."""
    mtp: bool = False
    """Whether to load the block that predicts further tokens, if the model has one (`PredictsFurther`)."""
    measure_recall: bool = False
    """Whether to compare every selection with exact top-k (slower; for `eval`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward pass. Rows of a slot are adjacent, in ascending positions."""

    tokens: Int32Array
    """[M] token ids."""
    slots: Int32Array
    """[M] sequence of each row, in [0, options.slots)."""
    positions: Int32Array
    """[M] position of each row, in [0, options.context). A slot's rows are consecutive and begin at its length at most;
    beginning lower truncates the sequence. Attention of a row sees positions up to its own in its own slot."""
    logit_rows: Int32Array
    """[R] rows whose logits are wanted, ascending."""
    compensate: bool = True
    """Whether error compensation applies."""
    prefill: bool = False
    """Whether these are rows of a prompt, which are compensated together; see `compensation_of`."""
    draft: bool = False
    """Whether these rows are drafts that a later step verifies. They are compensated by `draft_k_chunk`, and attention
    reads only the upper plane of the pages if the cache has two (`CacheKind.has_draft`) and the layer is not one of
    `DecoderOptions.sensitive_layers`, otherwise everything."""
    flush: bool = True
    """Whether pages may be flushed from windows before this step; see `KVCache.begin`."""
    stream: Float32Array | None = None
    """[M, C] the residual stream that earlier blocks left, for a part of a model that goes on from it
    (`models.part`); what the model left for the token before each row's, for a block that predicts further tokens."""

    @classmethod
    def of(
        cls,
        tokens: npt.ArrayLike,
        start: int = 0,
        wanted: npt.ArrayLike | None = None,
        *,
        slot: int = 0,
        stream: Float32Array | None = None,
        **how: bool,
    ) -> Step:
        """Rows of one slot, one behind the other.

        Args:
            tokens: [M] token ids.
            start: Position of the first.
            wanted: `logit_rows`; None: all rows.
            slot: The slot.
            stream: What earlier blocks left of these rows.
            how: The flags of the step.
        """
        ids = np.asarray(tokens, np.int32)
        return cls(
            tokens=ids,
            slots=np.full(ids.size, slot, np.int32),
            positions=np.arange(start, start + ids.size, dtype=np.int32),
            logit_rows=np.arange(ids.size, dtype=np.int32) if wanted is None else np.asarray(wanted, np.int32),
            stream=stream,
            **how,
        )


CompensationMode = Literal["none", "rows", "shared"]


def compensation_of(step: Step, options: DecoderOptions) -> CompensationMode:
    """The compensation mode of a step.

    Returns:
        `rows`: each row by its own salient channels, as for a decoded token; `shared`: all rows by the same channels
        (`DecoderOptions.prompt_k_chunk`), the head by rows. A prompt's single row uses `rows` if prompts are
        compensated at all: reading all residuals for it would take several times as long. Draft rows have their own
        k_chunk.
        The source's own weights count as `rows`.
    """
    if not step.compensate:
        return "none"
    if options.exact is not None:
        return "none" if step.draft else "rows"
    if step.draft:
        return "rows" if any(k_chunk_by_type(options.draft_k_chunk).values()) else "none"
    if not step.prefill:
        return "rows"
    if not any(k_chunk_by_type(options.prompt_k_chunk).values()):
        return "none"
    return "rows" if step.tokens.size == 1 else "shared"


def options_of_mtp(options: DecoderOptions) -> DecoderOptions:
    """The options of a model's block that predicts further tokens; nothing is compensated."""
    return DecoderOptions(
        kv=MTP_KV,
        context=options.context,
        slots=options.slots,
        max_rows=options.max_rows,
        threads=options.threads,
    )


def check_step(step: Step, spec: ModelSpec, options: DecoderOptions) -> None:
    """Check that a decoder with these options can run a step.

    Raises:
        RequestError: too many rows or none, or a number out of range.
    """
    M = step.tokens.size
    if not 1 <= M <= options.max_rows:
        raise RequestError(f"a step has {M} rows; this decoder takes 1 to {options.max_rows}")
    limits = (
        ("token", step.tokens, spec.vocab_size),
        ("slot", step.slots, options.slots),
        ("position", step.positions, options.context),
        ("logit row", step.logit_rows, M),
    )
    if (spec.joins or not spec.embeds) and (step.stream is None or step.stream.shape != (M, spec.hidden_size)):
        raise RequestError(f"this part of a model goes on from a stream of {M} rows and {spec.hidden_size} channels")
    for name, values, limit in limits:
        if not values.size:
            continue
        # A decoded token has one number of each, and this runs hundreds of times a second.
        low, high = (values.item(),) * 2 if values.size == 1 else (values.min(), values.max())
        if low < 0 or high >= limit:
            raise RequestError(f"{name} {int(high)} is out of range: it must be from 0 to {limit - 1}")


def sensitive(layers: Sequence[int], spec: ModelSpec) -> tuple[int, ...]:
    """The value of `DecoderOptions.sensitive_layers` for some layers: each once, in ascending order.

    Raises:
        RequestError: the model has no such layer.
    """
    found = tuple(sorted(set(layers)))
    if found and not 0 <= found[0] <= found[-1] < spec.num_layers:
        raise RequestError(f"sensitive layers are {found}; the model's layers are 0 to {spec.num_layers - 1}")
    return found


def checked_seam(blocks: int | None, spec: ModelSpec) -> int:
    """The value of `DecoderOptions.layers_on_device` for a number of blocks that a GPU shares with the processor.

    Raises:
        RequestError: the model cannot be shared there.
    """
    possible = seams(spec)
    if blocks in possible:
        return blocks
    if not possible:
        raise RequestError("this model's blocks cannot be shared by a GPU and the processor: load it on one of them")
    together = len(possible) > possible[-1] - possible[0]
    choice = f"from {possible[0]} to {possible[-1]}" if together else f"of {', '.join(map(str, possible))}"
    raise RequestError(f"a GPU cannot run {blocks} blocks of this model and the processor the others: choose {choice}")


class Decoder(Protocol):
    """A loaded model on a backend."""

    spec: ModelSpec
    options: DecoderOptions
    backend: str
    """Name of its backend, as in `runtime.backends`."""
    kv_bytes: int
    """Allocated size of the KV cache in bytes."""
    weight_bytes: int
    """Bytes of weights read per decoded token, without residuals and the embedding table."""

    @property
    def cache(self) -> KVCache:
        """The KV cache, for use between steps."""
        ...

    @property
    def recall(self) -> float | None:
        """Mean recall of the selector against exact top-k so far, if options.measure_recall, otherwise None."""
        ...

    def forward(self, step: Step) -> Float32Array:
        """Run one step.

        Returns:
            Logits float32 [R, V], or of a part without a head, the residual stream float32 [M, C]; the array is
            overwritten by the next call.

        Raises:
            InvalidActivationError: a NaN or infinity reached the logits.
        """
        ...

    def hidden(self, step: Step) -> Float32Array:
        """Run one step without logits.

        Returns:
            The rows float32 [M, C] after the final norm; overwritten by the next step.

        Raises:
            InvalidActivationError: a NaN or infinity is among them.
        """
        ...

    def set_k_chunk(self, k_chunk: Mapping[str, int] | int, n_tb: Mapping[str, int] | None = None) -> None:
        """Change the compensation of decoded tokens, from the next step on. Weights and cache are kept.

        Args:
            k_chunk: As in `DecoderOptions`.
            n_tb: Thread blocks by layer type, if the backend has them; None or an absent type: the backend's default.

        Raises:
            RequestError: k_chunk is malformed, or compensation was requested for a model without residuals.
        """
        ...

    def set_prompt_k_chunk(self, prompt_k_chunk: Mapping[str, int] | int) -> None:
        """Change the compensation of prompts, from the next step on. Weights and cache are kept.

        Raises:
            RequestError: it is malformed, or compensation was requested for a model without residuals.
            OutOfMemoryError: the device does not have enough memory.
        """
        ...

    def set_draft_k_chunk(self, draft_k_chunk: Mapping[str, int] | int) -> None:
        """Change the compensation of drafted tokens, from the next step on. Weights and cache are kept.

        Raises:
            RequestError: it is malformed, or compensation was requested for a model without residuals, or the backend
                only drafts without compensation.
        """
        ...

    def set_sensitive_layers(self, layers: Sequence[int]) -> None:
        """Change the layers whose pages drafts read as the target does, from the next step on. The cache is kept.

        Raises:
            RequestError: the model has no such layer.
        """
        ...

    def session(self) -> AbstractContextManager[None]:
        """A context in which the backend keeps its threads ready between steps; outside, it uses no processor time."""
        ...

    def close(self) -> None:
        """Release threads and buffers. Safe to call twice."""
        ...


@runtime_checkable
class DrawsTokens(Protocol):
    """Optional ability of a decoder: sampling on the device, so that only a few numbers leave it.

    Backends whose logits are in host memory do not need it; callers check with `isinstance`. What needs
    them on the host, such as a grammar, says so (`Sampler.needs_logits`).
    """

    def draw(self, step: Step, draws: Sequence[Draw]) -> list[Drawn]:
        """Run one step and sample a token from each of its rows of logits, as `runtime.text.sampling.Sampler` would.

        Args:
            step: As for `Decoder.forward`.
            draws: [R] sampling options of each row of logits.

        Returns:
            [R] the sampled tokens: if greedy, those the host would choose; otherwise those at the same place of the
            same distribution, whose sums may be rounded in another order.

        Raises:
            InvalidActivationError: a NaN or infinity reached the logits.
        """
        ...


@runtime_checkable
class PredictsFurther(Protocol):
    """Optional ability of a decoder: a block of the model drafts (`models.mtp`)."""

    mtp: Decoder | None
    """That block, with a cache of its own; its steps have a `Step.stream`. None: it was not loaded,
    or the model has none. It is closed with this decoder."""

    def left(self) -> Float32Array:
        """What the last step left for each of its rows, which the block reads. The decoder of the block has it, too.

        Returns:
            float32 [M, C], rows after the final norm; a copy.
        """
        ...


@runtime_checkable
class PlacesExperts(Protocol):
    """Optional property of a decoder: where experts are, if they can be in more than one place."""

    @property
    def experts(self) -> ExpertPlacement | None:
        """Where they are; None if all are on the device, or the model has none."""
        ...
