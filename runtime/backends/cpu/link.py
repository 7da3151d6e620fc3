"""Linker: finds the units of a program's instructions, and writes their addresses and numbers of parts into them.

An instruction has enough parts for threads to finish together, but few, since taking a part costs time. A thread takes
a part in some 50 to 100 ns, and reading weights from memory is fastest in long runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from models.packed import PackedLinear, Weights
from models.spec import ModelSpec, expert_of
from runtime.backends.cpu import units
from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data.pages import cache_of, form_of
from runtime.backends.cpu.data.records import PARTS_OF_WEIGHTS, tiles_of_line
from runtime.backends.cpu.machine.build import build
from runtime.backends.cpu.machine.unit import Unit
from runtime.backends.cpu.scratch import scratch_of
from runtime.backends.cpu.tiles import matrix_form
from runtime.kv.kinds import CacheKind

_ALONE_BYTES = 16 << 10
"""Bytes of weights that one thread reads in less time than another needs to join."""
_LARGE_BYTES = 256 << 10
"""From this many bytes of weights on, each thread gets a large part, with small ones at the end
(`share_of_weights`)."""
_ALONE_CHANNELS = 4096
"""Channels that one thread normalizes, gates or rotates in less time than another needs to join."""
_MANY = 4
"""Parts per thread of a product with several rows."""
_UNEVEN = 16
"""The same of a product with experts, which have different numbers of rows."""
_DOT = 16
"""Products of a router that take as long as a channel's norm."""


def parts_of(instruction: op.Instruction, threads: int) -> tuple[int, int]:
    """The number of parts of an instruction.

    Returns:
        Parts in a step of one row, and in one of several rows, as in `Header`.
    """
    match instruction:
        case op.Linear(weights=weights, residual=residual, kept=kept) if kept:
            return (_shared(weights, residual, threads),) * 2
        case op.Linear(weights=weights) | op.Panel(weights=weights):
            return _product(weights, threads)
        case op.Experts():
            return _experts(instruction, threads)
        case op.Score(scores=scores, channels=channels):
            return _even(scores * channels // _DOT, threads), threads * _MANY
        case op.Route():
            return 1, 1
        case op.Spread():
            return 1, threads
        case op.Select(routes=routes, measure=measure) if routes.counts:
            return (1, 1) if measure else (threads, threads)
        case op.GateExperts():
            return threads, threads
        case op.Attend():
            return 0, 0
        case op.Norm(to=to) | op.Gate(to=to):
            return _even(to.width, threads), threads
        case op.Select(measure=measure):
            return 1 if measure else op.BESIDE, threads
        case op.Heads(heads=heads, kv_heads=kv_heads, dim=dim):
            return _even((heads + 2 * kv_heads) * dim, threads), threads
        case op.Convolve(to=to):
            return (1, 1) if to.per_token else (_even(to.width, threads), threads)
        case op.Mix(channels=channels):
            return _even(channels, threads), threads
        case op.DeltaRule(heads=heads):
            return min(heads, threads), min(heads, threads * _MANY)
        case op.Flush() | op.Restore():
            return threads, threads
    return 1, threads


def _even(channels: int, threads: int) -> int:
    return 1 if channels < _ALONE_CHANNELS else threads


def _shared(weights: op.Weights, residual: op.Residual, threads: int) -> int:
    """Parts that read whole cache lines of the residual rows, several lines each."""
    lines = -(-weights.tiles // tiles_of_line(residual.bits))
    return min(lines, threads * min(_MANY, max(1, lines // (2 * threads))))


def _experts(of: op.Experts, threads: int) -> tuple[int, int]:
    """Parts of a product with experts. Those that add up are divided by tiles, and each needs its own."""
    sizes = of.sizes
    most = -(-sizes.tiles // tiles_of_line(sizes.residual_bits)) if of.kept else sizes.tiles
    most = most if of.sum.at else 1 << 16
    return min(most, PARTS_OF_WEIGHTS * threads if threads > 1 else 1), min(most, threads * _UNEVEN)


def _product(weights: op.Weights, threads: int) -> tuple[int, int]:
    size = weights.tiles * weights.blocks * 16 * 32 * weights.bits // 8
    if size < _ALONE_BYTES:
        return 1, threads
    parts = PARTS_OF_WEIGHTS * threads if size >= _LARGE_BYTES and threads > 1 else threads
    return min(weights.tiles, parts), min(weights.tiles, threads * _MANY)


def paging_units(kind: CacheKind) -> list[Unit]:
    """Units that a cache with windows needs from its first page on, so not for a short answer."""
    attended = units.page_unit(form_of(kind), kind.rank)
    return [units.flush_unit(kind.rank), *([attended] if attended else []), units.restore] if kind.windowed else []


def needed(kind: CacheKind) -> list[Unit]:
    """Units needed by every model with a kind of cache, except `paging_units` and those of its products."""
    form = form_of(kind)
    paged = None if kind.windowed else units.page_unit(form, kind.rank)
    heads = units.heads_unit(form, int(kind.windowed))
    return [
        units.execute,
        units.set_active,
        *units.INPUTS.values(),
        heads,
        units.attend,
        *([paged] if paged else []),
    ]


def state_units(spec: ModelSpec) -> list[Unit]:
    """Units of layers with a state."""
    if not spec.state_layers:
        return []
    return [units.convolve] if spec.delta is None else [*units.DELTA.values()]


def units_of(model: Weights, kind: CacheKind, *, compensated: bool) -> list[Unit]:
    """Units to compile before a model is opened: what it needs, except `paging_units` and `prompt_units`.

    Args:
        model: The stored model.
        kind: The kind of cache.
        compensated: Whether channels are selected by the paper's approximation, and compensated.
    """
    found = {*needed(kind), *state_units(model.spec)}
    if model.spec.norm_after or model.spec.joins or model.spec.qk_norm_form == "all":
        found.add(units.norm_inplace)
    if model.spec.altup is not None:
        found |= {*units.STREAMS.values()}
    if model.spec.mixture is not None:
        found |= _for_experts(model, compensated=compensated)
    for name in model.spec.linear_names():
        if expert_of(name) is not None:
            continue
        linear = model.linear(name)
        found |= _stored(linear, units.PRODUCTS)
        if compensated and linear.residual is not None:
            found |= {units.COMPENSATE[linear.residual.bits], units.SELECT[op.SELECT_APPROX]}
    return sorted(found, key=lambda unit: unit.name)


def _stored(linear: PackedLinear, products: Mapping[int, Mapping[int, Unit]]) -> set[Unit]:
    """Units of a matrix: its product, of those by form and bits, and its repacking if it needs any."""
    form = matrix_form(linear)
    repack = units.REPACK_CODEBOOK if form == op.CODEBOOK else {} if form == op.TRELLIS else units.REPACK_UNIFORM
    return {own[linear.bits] for own in (products[form], repack) if linear.bits in own}


def _for_experts(model: Weights, *, compensated: bool) -> set[Unit]:
    """Units that the experts of a model need."""
    found = {*units.ROUTING.values()}
    for linear in map(model.linear, (name for name in model.spec.linear_names() if expert_of(name) == 0)):
        found |= _stored(linear, units.EXPERTS)
        if compensated and linear.residual is not None:
            bits = linear.residual.bits
            found |= {units.COMPENSATE[bits], units.SHARE_EXPERTS[bits], units.SELECT[op.SELECT_APPROX]}
    return found


def prompt_units(model: Weights) -> list[Unit]:
    """Units that compensate prompts, which a first answer does without."""
    found: set[Unit] = set()
    for linear in (model.linear(name) for name in model.spec.linear_names() if expert_of(name) is None):
        if linear.residual is None:
            continue
        bits = linear.residual.bits
        if has_residuals_beside(linear):
            found |= {units.pick, units.add_whole} if bits == op.WHOLE_BITS else {units.SHARE[bits]}
        else:
            found |= {units.multiply_panel, units.PANEL[bits], units.SHARE[bits]}
    return sorted(found, key=lambda unit: unit.name)


def has_residuals_beside(linear: PackedLinear) -> bool:
    """Whether the residuals of prompt rows are multiplied beside a matrix, which takes none into its tiles."""
    return linear.per_token or linear.trellis


def link(program: npt.NDArray[np.int64], threads: int) -> None:
    """Write unit addresses, scratch sizes and part counts into a program's instructions.

    Compiles missing units.

    Args:
        program: int64 [instructions, WIDTH]; arrays it refers to must be alive.
        threads: Threads that will run it.

    Raises:
        BackendError: a unit cannot be compiled here.
    """
    link_written(program, [op.read(words) for words in program], threads)


def link_written(
    program: npt.NDArray[np.int64], instructions: Sequence[op.Instruction], threads: int, *, paged: bool = True
) -> None:
    """See `link`, for a caller that still has the instructions written into the program.

    Without `paged`, attention to pages is left out; link the program again before the cache has a page.
    """
    linked = [_units(instruction) for instruction in instructions]
    if not paged:
        linked = [
            (own, None if isinstance(instruction, op.Attend) else inner)
            for instruction, (own, inner) in zip(instructions, linked, strict=True)
        ]
    build([unit for both in linked for unit in both if unit is not None])
    headers = op.headers_of(program)
    headers["unit"] = [own.address for own, _ in linked]
    headers["inner"] = [0 if inner is None else inner.address for _, inner in linked]
    headers["scratch"] = [scratch_of(instruction) for instruction in instructions]
    headers["parts"], headers["parts_of_many"] = zip(*(parts_of(own, threads) for own in instructions), strict=True)


def most_scratch(program: npt.NDArray[np.int64]) -> int:
    """Bytes of scratch per thread for a linked program."""
    return int(op.headers_of(program)["scratch"].max())


def is_linked(program: npt.NDArray[np.int64]) -> bool:
    """Whether a program has been linked."""
    return bool(op.header_of(program[-1])["unit"])


def _units(instruction: op.Instruction) -> tuple[Unit, Unit | None]:
    """The unit of an instruction, and the one that it calls."""
    match instruction:
        case op.Linear(weights=weights, total=total, residual=residual, kept=kept, whole=whole, exact=exact):
            own = units.product_unit(weights)
            if exact.weights:
                return own, units.EXACT[exact.kind]
            if whole.codes:
                return own, units.add_whole
            return own, units.SHARE[residual.bits] if kept else units.COMPENSATE[residual.bits] if total else None
        case op.Panel(residual=residual):
            return units.multiply_panel, units.PANEL[residual.bits]
        case op.Experts(sizes=sizes, total=total, kept=shared):
            inner = units.SHARE_EXPERTS if shared else units.COMPENSATE
            return units.EXPERTS[sizes.form][sizes.bits], inner[sizes.residual_bits] if shared or total else None
        case op.Score() | op.Route() | op.Spread() | op.GateExperts():
            return units.ROUTING[type(instruction)], None
        case op.Select(mode=mode, measure=measure):
            return units.SELECT[mode], units.add_recall if measure else None
        case op.Heads(stored=stored):
            cache = cache_of(stored.cache)
            return units.heads_unit(int(cache["form"]), int(cache["window"])), None
        case op.Attend(stored=stored):
            cache = cache_of(stored.cache)
            return units.attend, units.page_unit(int(cache["form"]), int(cache["rank"]))
        case op.Flush(page=of):
            return units.flush_unit(int(cache_of(of.cache)["rank"])), None
        case op.Restore():
            return units.restore, None
        case op.Convolve():
            return units.convolve, None
        case op.Mix() | op.DeltaRule() | op.Finish():
            return units.DELTA[type(instruction)], None
        case op.Level() | op.Streams() | op.Cut():
            return units.STREAMS[type(instruction)], None
        case op.NormInplace():
            return units.norm_inplace, None
        case op.Pick():
            return units.pick, None
    return units.INPUTS[type(instruction)], None
