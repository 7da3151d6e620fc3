"""What a runtime is asked under `/runtime/*`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from models.recipe import DEFAULT_GROUP_SIZE, DEFAULT_METHOD, LARGEST_BITS, SMALLEST_BITS, Method
from models.spec import LAYER_KINDS
from runtime.compensation import CHUNK, LARGEST_BUDGET_PERCENT, Compensation, of_settings
from runtime.drafting import LARGEST_GAMMA, Speculate
from runtime.kv.kinds import KVKind
from runtime.wire.codec import OneOf, Within

Name = Annotated[str, Within(1, 300)]
Chunk = Annotated[int, Within(0, CHUNK)]
Budget = Annotated[float, Within(0, LARGEST_BUDGET_PERCENT)]
LayerKind = Annotated[str, OneOf(LAYER_KINDS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """`POST /runtime/load`: which model is to be loaded, and how. None leaves the choice to the runtime."""

    model: Name
    """Name of a stored model, or of the bundled one."""
    kv: KVKind | None = None
    """Precision of the KV cache."""
    k_chunk: Chunk | Mapping[LayerKind, Chunk] | None = None
    """Compensated channels per 1024: one number, or one by layer type; None leaves it to the budget."""
    budget: Budget | None = None
    """Slowdown of decoding, in percent, that compensation may cost; 0 is none. Means nothing beside a k_chunk."""
    prompt_budget: Budget | None = None
    """How much longer, in percent, a prompt may take by compensation; 0 is none."""
    speculate: bool | None = None
    """Whether the model drafts tokens and verifies several at a time, with a hierarchical cache if `kv` is None. None:
    where the cache is that and it was measured to pay. Drafts are copied from the text unless this is False."""
    gamma: Annotated[int, Within(1, LARGEST_GAMMA)] | None = None
    """Tokens that the model drafts in each round; None is the best by what steps cost and what is accepted."""
    context: Annotated[int, Within(1)] | None = None
    """Tokens of context."""
    num_parallel: Annotated[int, Within(1, 64)] | None = None
    """Requests that are answered at the same time."""
    backend: Annotated[str, Within(1, 40)] = "auto"
    """Which backend."""

    @property
    def speculation(self) -> Speculate | None:
        """How the model is to draft whatever was measured; None: see `speculate`."""
        return Speculate(gamma=self.gamma) if self.speculate else None

    @property
    def compensation(self) -> Compensation | None:
        """What decides how much is compensated; None leaves it to the runtime."""
        if self.k_chunk is None and self.budget is None and self.prompt_budget is None:
            return None
        return of_settings(self.k_chunk, self.budget, prompt_budget=self.prompt_budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """`POST /runtime/tune`: how much the loaded model is to be compensated from now on."""

    budget: Budget | None = None
    """Slowdown of decoding, in percent, that compensation may cost; None is the default, 0 none."""
    k_chunk: Chunk | Mapping[LayerKind, Chunk] | None = None
    """Compensated channels per 1024, instead of a budget."""
    prompt_budget: Budget | None = None
    """How much longer, in percent, a prompt may take by compensation; None is the default, 0 none."""
    force: bool = False
    """Whether to measure again even if a profile was saved."""

    @property
    def compensation(self) -> Compensation:
        """What decides how much is compensated from now on; a `RequestError` where both are given."""
        return Compensation(k_chunk=self.k_chunk, budget_percent=self.budget, prompt_budget_percent=self.prompt_budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeRequest:
    """`POST /runtime/quantize`: what low-bit model is to be made of what."""

    source: Annotated[str, Within(1, 4096)]
    """A checkpoint's folder or GGUF file, its short name, or its name on the hub."""
    bits: Annotated[float, Within(SMALLEST_BITS, LARGEST_BITS)] = 4
    """Bits of the base weights."""
    method: Method = DEFAULT_METHOD
    """Base quantizer."""
    group_size: int = DEFAULT_GROUP_SIZE
    """Input channels that share a scale."""
    residual_bits: int = 4
    """Bits of the residuals."""
    smooth_attention: bool = False
    """Whether key channels are evened out for a KV cache of few bits."""
    name: Name | None = None
    """Name of the new model; derived from source and recipe if None."""
    force: bool = False
    """Whether to replace a model of that name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRequest:
    """`POST /runtime/pull`: which checkpoint is to be downloaded."""

    name: Name
    """Its name on the hub, or its short name."""
    revision: Annotated[str, Within(1, 200)] | None = None
    """Branch, tag or commit; None is the hub's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveRequest:
    """`POST /runtime/remove`: which stored model is to be deleted."""

    name: Name
    """Its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetRequest:
    """`POST /runtime/forget`: what is to be deleted of what caches hold."""

    chat: Annotated[str, Within(1, 200)] | None = None
    """A conversation, by the name that its client gave it; None: all of them."""
