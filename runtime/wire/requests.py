"""Requests under `/runtime/*`, and what an inspection answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from models.recipe import DEFAULT_GROUP_SIZE, LARGEST_BITS, SMALLEST_BITS, AskedMethod
from models.spec import LAYER_KINDS
from runtime.compensation import (
    CHUNK,
    EXACT,
    LARGEST_BUDGET_PERCENT,
    Compensation,
    Exact,
    in_block,
    is_layer,
    of_settings,
)
from runtime.drafting import LARGEST_GAMMA, Speculate
from runtime.kv.kinds import KVKind
from runtime.wire.codec import OneOf, Within

MAX_MESSAGES = 16_384
"""Most messages of a conversation: more than fit in any context."""
Name = Annotated[str, Within(1, 300)]
Chunk = Annotated[int, Within(0, CHUNK)]
Budget = Annotated[float, Within(0, LARGEST_BUDGET_PERCENT)]


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedMessage:
    """A message of the conversation."""

    role: Annotated[str, OneOf(("system", "user", "assistant"))]
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectRequest:
    """`POST /runtime/inspect`: the answer to re-read token by token."""

    model: Annotated[str, Within(1, 300)]
    """The model to read it with; loaded first if necessary."""
    messages: Annotated[Sequence[InspectedMessage], Within(0, MAX_MESSAGES)]
    """The messages before the answer."""
    answer: Annotated[str, Within(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    text: str
    """The token on its own."""
    logit: float | None
    """Its logit; None: far from the best."""
    probability: float | None
    """Its probability, before temperature, penalties and filters."""
    base_logit: float | None = None
    """The logit without compensation; None: far from the best, or nothing is compensated."""
    base_probability: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedToken:
    """A token of the answer, and its alternatives."""

    text: str
    """The text it adds to the answer; empty if a character needs the next token too."""
    candidates: Sequence[Candidate]
    """The most likely tokens and the token itself, most likely first."""
    chosen: int
    """Index of the token among the candidates."""
    base_best: int | None = None
    """Index of the most likely one without compensation; None if nothing is compensated."""
    draft: int | None = None
    """Index of the drafted one; None if nothing is drafted, as for the first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The tokens of an answer."""

    tokens: Sequence[InspectedToken]
    model: str
    """The model that read them."""
    compensated: bool
    """Whether they were read both with and without compensation."""
    complete: bool = True
    """Whether these are all tokens of the answer, rather than its beginning."""
    phase: Literal["done"] = "done"
    """Distinguishes the result from progress reports."""


class _Layer:
    """Allowed keys of a k_chunk."""

    def __contains__(self, value: str) -> bool:
        return is_layer(value)

    def __str__(self) -> str:
        return f"one of {', '.join(LAYER_KINDS)}, or one of them in a block, such as {in_block(3, 'down')}"


Layer = Annotated[str, _Layer()]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """`POST /runtime/load`: load a model. None leaves a choice to the runtime."""

    model: Name
    """Name of a stored or bundled model."""
    kv: KVKind | None = None
    """Precision of the KV cache."""
    k_chunk: Chunk | Mapping[Layer, Chunk] | None = None
    """Compensated channels per 1024: one number, or one by layer type, and for types in single blocks; None: decided by
    the budget."""
    budget: Budget | Exact | None = None
    """Slowdown budget of decoding in percent; 0 is no compensation. Ignored if there is a k_chunk, but for `exact`: the
    source's own weights answer, and nothing is compensated."""
    or_usual: bool = False
    """Whether the default budget does where answers can't be exact, and `DeviceReport.problems` says why; else that is
    an error."""
    prompt_budget: Budget | None = None
    """Slowdown budget of prompts in percent; 0 is no compensation."""
    speculate: bool | None = None
    """Whether the model drafts for itself, with a hierarchical cache if `kv` is None. None: if the cache is
    hierarchical and drafting was measured to pay. Drafts are copied from the text unless this is False."""
    gamma: Annotated[int, Within(1, LARGEST_GAMMA)] | None = None
    """Tokens that the model drafts per round; None: chosen by measured costs and acceptance."""
    sensitive_layers: Annotated[int, Within(0)] = 0
    """Layers whose cache the model's drafts read at 8 bits instead of 4, with `speculate`."""
    context: Annotated[int, Within(1)] | None = None
    """Tokens of context."""
    num_parallel: Annotated[int, Within(1, 64)] | None = None
    """Most requests answered at the same time."""
    backend: Annotated[str, Within(1, 40)] = "auto"
    experts_on_device: Annotated[int, Within(0)] | None = None
    """Experts of each block on a GPU, of a mixture; None: as many as fit."""
    layers_on_device: Annotated[int, Within(0)] | None = None
    """First blocks on a GPU, where the processor runs the others; None: as many as fit."""

    @property
    def speculation(self) -> Speculate | None:
        """The requested drafting mode; None: see `speculate`."""
        return Speculate(gamma=self.gamma, sensitive_layers=self.sensitive_layers) if self.speculate else None

    @property
    def compensation(self) -> Compensation | None:
        """The requested compensation; None: the runtime's default. Raises `RequestError` if `exact` is not alone."""
        if self.budget == EXACT:
            return Compensation.asked(self.k_chunk, EXACT, self.prompt_budget, or_usual=self.or_usual)
        if self.k_chunk is None and self.budget is None and self.prompt_budget is None:
            return None
        return of_settings(self.k_chunk, self.budget, prompt_budget=self.prompt_budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """`POST /runtime/tune`: change the compensation of the loaded model."""

    budget: Budget | Exact | None = None
    """Slowdown budget of decoding in percent; None is the default, 0 no compensation. To or from `exact`, the model is
    loaded again."""
    k_chunk: Chunk | Mapping[Layer, Chunk] | None = None
    """Compensated channels per 1024, instead of a budget."""
    prompt_budget: Budget | None = None
    """Slowdown budget of prompts in percent; None is the default, 0 no compensation."""
    force: bool = False
    """Whether to measure again even if there is a profile."""

    @property
    def compensation(self) -> Compensation:
        """The requested compensation; raises `RequestError` if both kinds are given."""
        return Compensation.asked(self.k_chunk, self.budget, self.prompt_budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeRequest:
    """`POST /runtime/quantize`: quantize a checkpoint."""

    source: Annotated[str, Within(1, 4096)]
    """A checkpoint's folder or GGUF file, its short name, or its name on the hub."""
    bits: Annotated[float, Within(SMALLEST_BITS, LARGEST_BITS)] = 4
    """Bits of the base weights."""
    keep: bool = False
    """Whether a checkpoint that `run` would keep as it is, is kept; `bits` and the rest are for all others."""
    method: AskedMethod = "auto"
    group_size: int = DEFAULT_GROUP_SIZE
    residual_bits: int = 4
    smooth_attention: bool = False
    """Whether to equalize key channels for low-bit KV caches."""
    name: Name | None = None
    """Name of the new model; None: derived from source and recipe."""
    force: bool = False
    """Whether to replace an existing model of that name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRequest:
    """`POST /runtime/pull`: download a checkpoint."""

    name: Name
    """Its name on the hub, or its short name."""
    revision: Annotated[str, Within(1, 200)] | None = None
    """Branch, tag or commit; None is the hub's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveRequest:
    """`POST /runtime/remove`: delete a stored model."""

    name: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetRequest:
    """`POST /runtime/forget`: delete cached conversations."""

    chat: Annotated[str, Within(1, 200)] | None = None
    """The client's name of a conversation; None: all."""
