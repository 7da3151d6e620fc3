"""Memory plan: compares a model's memory needs with the free memory, before anything is loaded.

The plan chooses the context if the user does not, and refuses a model that does not fit, with numbers and advice; see
design decision 14. Does not import torch.
"""

from __future__ import annotations

import os
import time
from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from models.part import part_of, seams
from models.rope import table_bytes
from models.spec import ModelSpec
from runtime.backends import Footprint
from runtime.backends.decoder import MTP_KV, KVKind, checked_seam
from runtime.errors import OutOfMemoryError, RequestError, byte_count
from runtime.kv.groups import bytes_of_token, cache_bytes
from runtime.kv.kinds import DEFAULT_KV, KINDS, CacheKind, bytes_per_token
from runtime.kv.states import states_bytes
from runtime.wire.answers import CacheFacts
from tuner.detect import MemoryInfo, detect_memory
from tuner.placement import BlockPlacement

MIB, GIB = 1 << 20, 1 << 30

DEFAULT_CONTEXT = 8192
"""Default context in tokens, unless the model or the memory requires less."""
SMALLEST_CONTEXT = 256
"""A model is only loaded if this many tokens of context (or its maximum, if less) fit."""
CONVERSATIONS = 4
"""Cached sequences for chats, if memory allows; they share the pages of one context."""
PARALLEL = 4
"""Default number of requests answered at the same time."""
_SHARE_OF_SPARE = 2
"""Limit for pages beyond one context, as a share of the memory that the plan leaves free: one half."""
_STEP = 64
"""A planned context is a multiple of this, unless it is the model's own maximum."""
_ADVISED: tuple[KVKind, ...] = ("int8", "int4")
"""Kinds of cache named in advice: the cheapest of 8 and of 4 bits. Those of 2 bits lose too much (docs/kv.md)."""
_CLEARLY_LESS = 0.8
"""Advice names a kind only if it takes less than this share of the current one."""
_MARGIN = 256 * MIB
"""Reserve for unplanned memory: allocator slack, the tokenizer, the rest of the system."""
_LARGE_CONTEXT = 1024
"""Advice does not suggest a shorter context below this length: it would hardly save anything."""
_HOLDER_S = 5
"""Advice names the process that held most memory at most so many seconds ago."""

_PlanAt = Callable[[int], "MemoryPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """A model's memory use. All sizes in bytes."""

    context: int
    """Context of each slot, in tokens."""
    slots: int
    pages: int | None
    """Pages shared by all slots; None = each slot has its own."""
    contexts: int
    """Number of full contexts that these pages hold."""
    weight_bytes: int
    """Weights in the backend's layout, without `host_bytes`."""
    residual_bytes: int
    """Residuals, in main memory."""
    residuals_beside: bool
    """Whether residuals must fit beside the weights, and count in `needed_bytes`."""
    kv_bytes: int
    """The KV cache at `context`, and the states of layers without one."""
    buffer_bytes: int
    """Activations of the widest step, logits and rotary tables."""
    margin_bytes: int
    available_bytes: int
    mtp_bytes: int = 0
    """Cache and buffers of the block that predicts further tokens."""
    experts: int = 0
    """Experts of a block that may be in main memory instead; 0 if none may."""
    experts_on_device: int = 0
    """Those of them that are not."""
    host_bytes: int = 0
    """Weights of experts in main memory."""
    layers_on_device: int | None = None
    """First blocks on the device, which these sizes are of; None: all."""
    rest: MemoryPlan | None = None
    """The plan of the other blocks, in main memory; None: there are none."""

    @property
    def needed_bytes(self) -> int:
        residuals = self.residual_bytes if self.residuals_beside else 0
        return self.weight_bytes + residuals + self.kv_bytes + self.buffer_bytes + self.mtp_bytes + self.margin_bytes

    @property
    def held_bytes(self) -> int:
        """Weights and cache, wherever they are."""
        own = self.weight_bytes + self.host_bytes + self.kv_bytes
        return own if self.rest is None else own + self.rest.held_bytes

    def blocks_of(self, spec: ModelSpec) -> BlockPlacement | None:
        """Where the blocks of the planned model are; None: all in one place."""
        here = self.layers_on_device
        return None if here is None else BlockPlacement(on_device=here, held=spec.num_layers)

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.available_bytes


def buffer_bytes(spec: ModelSpec, context: int, rows: int) -> int:
    """Bytes of the working buffers of a step: activations, one row of logits and rotary tables, fp32.

    Rows that go to experts stand in row blocks of 16 for each: gate, up and their product in fp32, channels chosen, and
    INT8 activations.
    """
    blocks = range(spec.num_layers)
    heads = max(2 * head.q_width + 2 * head.kv_width for head in map(spec.heads_of, blocks))
    widths = 3 * spec.hidden_size + heads + 3 * max(map(spec.mlp_width, blocks))
    if spec.token_width:
        widths += spec.hidden_size + 4 * spec.token_width
    if spec.altup is not None:  # streams, the first one predicted, and what linear layers make of the others
        widths += 2 * spec.stream_width
    total = 4 * (rows * widths + 2 * spec.vocab_size) + table_bytes(spec, context)
    if spec.mixture is None:
        return total
    pairs = rows * spec.mixture.experts_per_token
    slots = pairs + 15 * min(spec.mixture.num_experts, pairs)
    return total + slots * (16 * spec.mixture.width + 2 * max(spec.hidden_size, spec.mixture.width))


def plan(
    spec: ModelSpec,
    footprint: Footprint,
    *,
    kv: KVKind = DEFAULT_KV,
    context: int | None = None,
    slots: int = 1,
    shared: bool = False,
    parallel: int = 1,
    rows: int = 128,
    memory: MemoryInfo | None = None,
    experts_on_device: int | None = None,
    layers_on_device: int | None = None,
    main: MemoryInfo | None = None,
) -> MemoryPlan:
    """Plan a load, and choose the context if none is given, and how many experts are kept where weights are.

    Experts are moved to main memory before the context is shortened: a token reads few of them.

    Args:
        spec: The architecture.
        footprint: Its memory use on the chosen backend.
        kv: The kind of cache.
        context: Tokens of context; None for the minimum of the model's maximum, what fits, and `DEFAULT_CONTEXT`.
        slots: Number of cached sequences.
        shared: Whether the slots share the pages of one context, so that only windows are per slot; if even that is too
            much, the number of slots is reduced.
        parallel: Most full contexts of pages to allocate for the slots; limited to half of the memory that would be
            left.
        rows: Most rows of one step.
        memory: Free memory where weights and cache must fit; None: looked up in main memory.
        experts_on_device: Experts of each block that are kept there; None: as many as fit.
        layers_on_device: First blocks that are kept there, of a footprint with parts; None: as many as fit.
        main: Free main memory, for the other experts or blocks; None: looked up.

    Raises:
        RequestError: the context is not positive or longer than the model's, more experts are asked for than the model
            has, or blocks that it cannot be shared at.
        OutOfMemoryError: it does not fit; the message has numbers and advice.
    """
    if context is not None and not 0 < context <= spec.max_context:
        raise RequestError(
            f"a context of {context} tokens is not possible with this model: choose 1 to {spec.max_context}"
        )
    if footprint.parts is not None:
        how: dict[str, Any] = {"kv": kv, "slots": slots, "shared": shared, "parallel": parallel, "rows": rows}
        return _shared(spec, footprint, context, memory, main, layers_on_device, **how)
    free = memory if memory is not None else detect_memory()
    kind = KINDS[kv]
    buffers = footprint.buffer_bytes or (lambda tokens, most: buffer_bytes(spec, tokens, most))

    held = footprint.experts
    if experts_on_device is not None and experts_on_device > (spec.mixture.num_experts if spec.mixture else 0):
        raise RequestError(_too_many(experts_on_device, spec))

    def of_block(block: ModelSpec, tokens: int, count: int) -> int:
        cache = cache_bytes(KINDS[MTP_KV], block, context=tokens, slots=count, max_rows=rows)
        return cache + buffer_bytes(block, tokens, rows)

    def with_slots(tokens: int, here: int, count: int, contexts: int = 1) -> MemoryPlan:
        pages = contexts * kind.max_pages(tokens) if shared else None
        return MemoryPlan(
            context=tokens,
            slots=count,
            pages=pages,
            contexts=contexts if shared else count,
            weight_bytes=footprint.weight_bytes - (held - here) * footprint.expert_bytes,
            residual_bytes=footprint.residual_bytes,
            residuals_beside=footprint.residuals_beside,
            kv_bytes=cache_bytes(kind, spec, context=tokens, slots=count, max_rows=rows, pages=pages)
            + states_bytes(spec, count),
            buffer_bytes=buffers(tokens, rows),
            mtp_bytes=0 if footprint.mtp is None else of_block(footprint.mtp, tokens, count),
            margin_bytes=_MARGIN + footprint.overhead_bytes,
            available_bytes=free.available_bytes,
            experts=held,
            experts_on_device=here,
            host_bytes=(held - here) * footprint.expert_bytes,
        )

    def at(tokens: int, here: int) -> MemoryPlan:
        found = with_slots(tokens, here, slots)
        while shared and not found.fits and found.slots > 1:
            found = with_slots(tokens, here, found.slots - 1)
        spare = max(0, found.available_bytes - found.needed_bytes) // _SHARE_OF_SPARE
        for contexts in range(min(parallel, found.slots), 1, -1) if shared else ():
            roomy = with_slots(tokens, here, found.slots, contexts)
            if roomy.needed_bytes - found.needed_bytes <= spare:
                return roomy
        return found

    wanted = context if context is not None else min(spec.max_context, DEFAULT_CONTEXT)
    choices = range(held + 1) if experts_on_device is None else (min(experts_on_device, held),)
    here = choices[max(0, bisect(choices, 0, key=lambda count: not at(wanted, count).fits) - 1)]
    found = at(wanted, here)
    if found.fits:
        return _beside(found, main)
    smallest = min(SMALLEST_CONTEXT, spec.max_context)
    largest = _largest_fitting(lambda tokens: at(tokens, here), smallest, wanted)
    if context is None and largest is not None:
        return _beside(at(largest, here), main)
    lacking = found if context is not None else at(smallest, here)
    raise OutOfMemoryError(_explain(lacking, largest, kind, spec, free))


def _shared(
    spec: ModelSpec,
    footprint: Footprint,
    context: int | None,
    memory: MemoryInfo | None,
    main: MemoryInfo | None,
    layers_on_device: int | None,
    **how: Any,
) -> MemoryPlan:
    """Plan a load that two memories share: the first blocks with their cache are on a card, as many as fit.

    The context is only shortened if it is too long for a single block.
    """
    parts, blocks = footprint.parts, spec.num_layers
    assert parts is not None
    wanted = context if context is not None else min(spec.max_context, DEFAULT_CONTEXT)

    def at(seam: int, tokens: int | None) -> MemoryPlan:
        front = replace(parts(seam)[0], experts=0, expert_bytes=0)
        return plan(part_of(spec, 0, seam), front, context=tokens, memory=memory, **how)

    def fits(seam: int) -> bool:
        try:
            return at(seam, wanted).fits
        except OutOfMemoryError:
            return False

    fitting = 0 if layers_on_device is not None else bisect(footprint.seams, 0, key=lambda own: not fits(own))
    seam = footprint.seams[max(0, fitting - 1)] if layers_on_device is None else checked_seam(layers_on_device, spec)
    front = at(seam, wanted if context is not None or fits(seam) else None)
    how |= {"slots": front.slots, "parallel": front.contexts}
    behind = replace(parts(seam)[1], experts=0, expert_bytes=0)
    rest = plan(part_of(spec, seam, blocks), behind, context=front.context, memory=main, **how)
    pages = None if front.pages is None or rest.pages is None else min(front.pages, rest.pages)
    slots, contexts = min(front.slots, rest.slots), min(front.contexts, rest.contexts)
    return replace(front, slots=slots, contexts=contexts, pages=pages, layers_on_device=seam, rest=rest)


def _beside(planned: MemoryPlan, main: MemoryInfo | None) -> MemoryPlan:
    """The same plan, if main memory holds the experts that it leaves there; residuals are loaded as far as they fit.

    Raises:
        OutOfMemoryError: it does not.
    """
    if not planned.host_bytes:
        return planned
    free = (main if main is not None else detect_memory()).available_bytes
    if planned.host_bytes + _MARGIN <= free:
        return planned
    raise OutOfMemoryError(
        f"not enough main memory: {planned.experts - planned.experts_on_device} of {planned.experts} experts of each "
        f"block do not fit the card and take {byte_count(planned.host_bytes)}, and "
        f"{byte_count(_MARGIN)} as a margin, but {byte_count(free)} is free now; use fewer bits or a smaller model, or "
        "close other programs"
    )


def _too_many(asked: int, spec: ModelSpec) -> str:
    if spec.mixture is None:
        return f"{asked} experts on the device were requested, but the model has no experts: leave the number out"
    most = spec.mixture.num_experts
    return f"{asked} experts on the device were requested, but a block has {most}: choose 0 to that many"


def experts_within(asked: int | None, spec: ModelSpec) -> int | None:
    """A number of experts on the device that is meant for any model, as this one can have it; None: as many as fit."""
    return None if asked is None or spec.mixture is None else min(asked, spec.mixture.num_experts)


def layers_within(asked: int | None, spec: ModelSpec) -> int | None:
    """A number of blocks on the device that is meant for any model, as this one can have it; None: as many as fit."""
    if asked is None or not asked or asked >= spec.num_layers:
        return None if asked is None else min(asked, spec.num_layers)
    return max((seam for seam in seams(spec) if seam <= asked), default=0)


def cache_facts(spec: ModelSpec, planned: MemoryPlan, rows: int = 128) -> dict[str, CacheFacts]:
    """Sizes of every kind of cache for a model, given the memory that was free when it was planned."""
    if planned.layers_on_device is not None and planned.rest is not None:
        seam = planned.layers_on_device
        parts = (
            cache_facts(part_of(spec, *own), replace(one, layers_on_device=None, rest=None), rows)
            for own, one in (((0, seam), planned), ((seam, spec.num_layers), planned.rest))
        )
        front, rear = parts
        return {
            name: CacheFacts(
                bytes_per_token=front[name].bytes_per_token + rear[name].bytes_per_token,
                context=min(front[name].context, rear[name].context),
            )
            for name in KINDS
        }
    room = planned.available_bytes - (planned.needed_bytes - planned.kv_bytes - planned.buffer_bytes)

    def fitting(kind: CacheKind) -> int:
        def taken(tokens: int) -> int:
            pages = kind.max_pages(tokens)
            cache = cache_bytes(kind, spec, context=tokens, slots=1, max_rows=rows, pages=pages) + states_bytes(spec, 1)
            return cache + planned.buffer_bytes + table_bytes(spec, tokens - planned.context)

        if taken(spec.max_context) <= room:
            return spec.max_context
        low, high = 0, spec.max_context // _STEP
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if taken(middle * _STEP) <= room else (low, middle - 1)
        return low * _STEP

    return {
        name: CacheFacts(
            bytes_per_token=bytes_of_token(kind, spec, context=planned.context, max_rows=rows), context=fitting(kind)
        )
        for name, kind in KINDS.items()
    }


def describe(planned: MemoryPlan) -> str:
    """The plan in one line."""
    residuals = f"residuals {byte_count(planned.residual_bytes)}" if planned.residual_bytes else ""
    inside = f", {residuals}" if residuals and planned.residuals_beside else ""
    mapped = f"; in addition {residuals}, mapped" if residuals and not planned.residuals_beside else ""
    times = f"{planned.contexts} x " if planned.pages is not None and planned.contexts > 1 else ""
    if planned.host_bytes:
        mapped += (
            f"; in addition {byte_count(planned.host_bytes)} of experts in main memory, "
            f"{planned.experts_on_device} of {planned.experts} on the device"
        )
    if planned.rest is not None:
        mapped += f"; the processor has blocks from {planned.layers_on_device} on: {describe(planned.rest)}"
    block = f", drafts {byte_count(planned.mtp_bytes)}" if planned.mtp_bytes else ""
    return (
        f"{byte_count(planned.needed_bytes)} (weights {byte_count(planned.weight_bytes)}{inside}, "
        f"cache {byte_count(planned.kv_bytes)} for {times}{planned.context} tokens, "
        f"buffers {byte_count(planned.buffer_bytes)}{block}, margin {byte_count(planned.margin_bytes)}{mapped})"
    )


def _largest_fitting(at: _PlanAt, smallest: int, wanted: int) -> int | None:
    """The longest context that fits, a multiple of `_STEP` from `smallest` to `wanted`; None if there is none."""
    if smallest > wanted or not at(smallest).fits:
        return None
    low, high = smallest // _STEP, wanted // _STEP
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if at(middle * _STEP).fits else (low, middle - 1)
    return max(low * _STEP, smallest)


def _explain(planned: MemoryPlan, largest: int | None, kind: CacheKind, spec: ModelSpec, free: MemoryInfo) -> str:
    limited = f" of this container's {byte_count(free.limit_bytes)}" if free.limit_bytes is not None else ""
    advice = []
    if largest is not None:
        advice.append(f"a context of {largest} tokens fits")
    if planned.kv_bytes > planned.needed_bytes // 8 and (cheaper := _cheaper(kind, spec)):
        advice.append(cheaper)
    if planned.residuals_beside and planned.residual_bytes:
        advice.append(f"turn off compensation, whose residuals take {byte_count(planned.residual_bytes)}")
    if largest is None or planned.context <= _LARGE_CONTEXT:
        advice.append("use fewer bits or a smaller model")
    holder = _recent_holder(int(time.monotonic() / _HOLDER_S))
    advice.append(f"close other programs{f' ({holder})' if holder else ''}")
    free_now = f"{byte_count(free.available_bytes)}{limited}"
    if byte_count(planned.needed_bytes) == byte_count(free.available_bytes):  # which would not say why
        free_now = f"{byte_count(max(1 << 10, planned.needed_bytes - free.available_bytes))} less"
    return f"not enough memory: needs {describe(planned)}, but {free_now} is free now; " + ", or ".join(advice)


def _cheaper(kind: CacheKind, spec: ModelSpec) -> str | None:
    """The kinds of cache that take less, and their share of this one's size; None if there are none."""
    now = bytes_per_token(kind, spec)
    shares = {name: bytes_per_token(KINDS[name], spec) / now for name in _ADVISED}
    listed = [f"{name} {100 * share:.0f} %" for name, share in shares.items() if share < _CLEARLY_LESS]
    return f"another kind of cache takes less ({', '.join(listed)} of {kind.name}'s)" if listed else None


@lru_cache(maxsize=1)
def _recent_holder(_now: int) -> str | None:
    """`largest_process`, asked at most once in `_HOLDER_S`: a list of models is planned in one go."""
    return largest_process()


def largest_process() -> str | None:
    """The other process that uses most memory, as `name holds 2.1 GiB`; None if none uses 256 MiB."""
    import psutil

    processes = []
    for process in psutil.process_iter(["name", "memory_info"]):
        memory = process.info["memory_info"]
        if memory is not None and process.pid != os.getpid():
            processes.append((memory.rss, process.info["name"] or f"process {process.pid}"))
    held, name = max(processes, default=(0, ""))
    return f"{name} holds {byte_count(held)}" if held >= 256 * MIB else None
