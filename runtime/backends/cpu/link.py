"""Linking: which units a program's instructions need, and writing their addresses into them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data.pages import cache_of, form_of
from runtime.backends.cpu.executor import execute, set_active
from runtime.backends.cpu.kernels.select import SELECT_APPROX, SELECT_EXACT, SELECT_RANDOM, SELECT_STATIC
from runtime.backends.cpu.machine.build import build
from runtime.backends.cpu.machine.unit import Unit
from runtime.backends.cpu.parts import parts_of
from runtime.backends.cpu.units import (
    attention,
    inputs,
    outputs,
    paging,
    panels,
    products,
    repacking,
    residuals,
    selection,
    w4a8,
)
from runtime.kv.kinds import CacheKind
from runtime.weights import Weights

_INPUTS = {
    op.Embed: inputs.embed,
    op.Gather: inputs.gather,
    op.Check: outputs.check,
    op.Norm: inputs.norm,
    op.Gate: inputs.gate,
    op.Merge: inputs.merge,
}
_UNIFORM = {3: products.multiply_uniform_3, 4: products.multiply_uniform_4}
_CODEBOOK = {3: products.multiply_codebook_3, 4: products.multiply_codebook_4}
_W4A8 = {4: w4a8.multiply_w4a8}
_STORED, _STORED_CODEBOOK = (_UNIFORM, repacking.UNIFORM), (_CODEBOOK, repacking.CODEBOOK)
_STORED_W4A8 = (_W4A8, repacking.UNIFORM)
"""What a matrix needs, by its bits: to be multiplied, and to be repacked first."""
_COMPENSATE = {
    2: products.compensate_2,
    4: products.compensate_4,
    8: products.compensate_8,
    16: products.compensate_16,
}
_SHARE = {2: residuals.share_2, 4: residuals.share_4, 8: residuals.share_8, 16: residuals.share_16}
_PANEL = {2: panels.panel_2, 4: panels.panel_4, 8: panels.panel_8, 16: panels.panel_16}
_SELECT = {
    SELECT_APPROX: selection.select_by_buckets,
    SELECT_EXACT: selection.select_largest,
    SELECT_STATIC: selection.select_always,
    SELECT_RANDOM: selection.select_any,
}


def needed(kind: CacheKind) -> list[Unit]:
    """The units that every model needs with some cache; those of its products depend on its weights.

    Args:
        kind: The kind of cache.
    """
    form = form_of(kind)
    paged = attention.page_unit(form, kind.rank)
    heads = attention.heads_unit(form, int(kind.windowed))
    windowed = [_flush_unit(kind.rank), paging.restore] if kind.windowed else []
    return [execute, set_active, *_INPUTS.values(), heads, attention.attend, *([paged] if paged else []), *windowed]


def units_of(model: Weights, kind: CacheKind, *, compensated: bool) -> list[Unit]:
    """The units that a model needs, so that they can be compiled before it is opened.

    Args:
        model: The stored model.
        kind: The kind of cache.
        compensated: Whether channels will be chosen, by the paper's approximation, and compensated.
    """
    found = {*needed(kind)}
    for name in model.spec.linear_names():
        linear = model.linear(name)
        stored = _STORED_W4A8 if linear.per_token else _STORED if linear.codebook is None else _STORED_CODEBOOK
        found |= {own[linear.bits] for own in stored if linear.bits in own}
        if compensated and linear.residual is not None:
            found |= {_COMPENSATE[linear.residual.bits], _SELECT[SELECT_APPROX]}
            found |= {panels.multiply_panel, _PANEL[linear.residual.bits], _SHARE[linear.residual.bits]}
    return sorted(found, key=lambda unit: unit.name)


def link(program: npt.NDArray[np.int64], threads: int) -> None:
    """Write into a program's instructions the addresses of the units that they need, the bytes of scratch, and parts.

    Compiles what is missing.

    Args:
        program: int64 [instructions, WIDTH]; what it points to has to be alive.
        threads: Threads that will share its instructions.

    Raises:
        BackendError: a unit cannot be compiled here.
    """
    instructions = [op.read(words) for words in program]
    units = [_units(instruction) for instruction in instructions]
    build([unit for both in units for unit in both if unit is not None])
    for words, instruction, (own, inner) in zip(program, instructions, units, strict=True):
        header = op.header_of(words)
        header["unit"], header["inner"] = own.address, 0 if inner is None else inner.address
        header["scratch"] = scratch_of(instruction)
        header["parts"], header["parts_of_many"] = parts_of(instruction, threads)


def most_scratch(program: npt.NDArray[np.int64]) -> int:
    """Bytes of scratch that a thread needs for a linked program."""
    return int(op.headers_of(program)["scratch"].max())


def is_linked(program: npt.NDArray[np.int64]) -> bool:
    """Whether `link` has seen a program."""
    return bool(op.header_of(program[-1])["unit"])


def _units(instruction: op.Instruction) -> tuple[Unit, Unit | None]:
    """The unit that runs an instruction, and the one that this calls."""
    match instruction:
        case op.Linear(weights=weights, total=total, residual=residual, kept=kept, whole=whole):
            stored = _W4A8 if weights.group_scales else _CODEBOOK if weights.codebooks else _UNIFORM
            own = stored[weights.bits]
            if whole.codes:
                return own, products.add_whole
            return own, _SHARE[residual.bits] if kept else _COMPENSATE[residual.bits] if total else None
        case op.Panel(residual=residual):
            return panels.multiply_panel, _PANEL[residual.bits]
        case op.Select(mode=mode, measure=measure):
            return _SELECT[mode], selection.add_recall if measure else None
        case op.Heads(stored=stored):
            cache = cache_of(stored.cache)
            return attention.heads_unit(int(cache["form"]), int(cache["window"])), None
        case op.Attend(stored=stored):
            cache = cache_of(stored.cache)
            return attention.attend, attention.page_unit(int(cache["form"]), int(cache["rank"]))
        case op.Flush(page=of):
            return _flush_unit(int(cache_of(of.cache)["rank"])), None
        case op.Restore():
            return paging.restore, None
    return _INPUTS[type(instruction)], None


def scratch_of(instruction: op.Instruction) -> int:
    """Bytes of scratch that a thread needs for an instruction."""
    match instruction:
        case op.Linear():
            return products.linear_scratch(instruction)
        case op.Panel():
            return panels.panel_scratch(instruction)
        case op.Select():
            return selection.select_scratch(instruction)
        case op.Attend(stored=stored):
            return attention.attend_scratch(instruction, cache_of(stored.cache))
        case op.Flush(page=of) | op.Restore(page=of):
            return paging.paging_scratch(cache_of(of.cache))
    return 0


def _flush_unit(rank: int) -> Unit:
    return paging.flush_corrected if rank else paging.flush
