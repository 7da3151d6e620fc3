"""Linking: which units a program's instructions need, and writing their addresses into them."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data import pages as page
from runtime.backends.cpu.data.pages import form_of
from runtime.backends.cpu.executor import execute
from runtime.backends.cpu.kernels.select import SELECT_APPROX, SELECT_EXACT, SELECT_RANDOM, SELECT_STATIC
from runtime.backends.cpu.machine.unit import Unit
from runtime.backends.cpu.units import attention, inputs, paging, products, selection
from runtime.kv.kinds import CacheKind

_ALWAYS = {
    op.EMBED: inputs.embed,
    op.GATHER: inputs.gather,
    op.NORM: inputs.norm,
    op.GATE: inputs.gate,
    op.MERGE: inputs.merge,
    op.RESTORE: paging.restore,
}
_UNIFORM = {3: products.multiply_uniform_3, 4: products.multiply_uniform_4}
_CODEBOOK = {3: products.multiply_codebook_3, 4: products.multiply_codebook_4}
_COMPENSATE = {
    2: products.compensate_2,
    4: products.compensate_4,
    8: products.compensate_8,
    16: products.compensate_16,
}
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
    paged = attention.page_unit(form)
    heads = attention.heads_unit(form, int(kind.windowed))
    always = [unit for operation, unit in _ALWAYS.items() if operation != op.RESTORE]
    windowed = [_flush_unit(kind.rank), paging.restore] if kind.windowed else []
    return [execute, *always, heads, attention.attend, *([paged] if paged else []), *windowed]


def link(program: npt.NDArray[np.int64]) -> None:
    """Write the addresses of the units that a program needs into its instructions; compiles what is missing.

    Args:
        program: int64 [instructions, WIDTH]; what it points to has to be alive.

    Raises:
        BackendError: a unit cannot be compiled here.
    """
    for words in program:
        own, inner = _units(words)
        words[op.UNIT], words[op.INNER] = own.address, 0 if inner is None else inner.address


def _units(words: npt.NDArray[np.int64]) -> tuple[Unit, Unit | None]:
    """The unit that runs an instruction, and the one that this calls."""
    operation = int(words[0])
    operands = dict(zip(op.OPERANDS[operation], words[1:].tolist(), strict=False))
    if operation == op.LINEAR:
        own = (_CODEBOOK if operands["codebooks"] else _UNIFORM)[operands["bits"]]
        return own, _COMPENSATE[operands["residual_bits"]] if operands["total"] else None
    if operation == op.SELECT:
        return _SELECT[operands["mode"]], selection.add_recall if operands["measure"] else None
    if operation == op.HEADS:
        form, window = _described(operands["cache"], page.FORMAT), _described(operands["cache"], page.WINDOW)
        return attention.heads_unit(form, window), None
    if operation == op.ATTEND:
        return attention.attend, attention.page_unit(_described(operands["cache"], page.FORMAT))
    if operation == op.FLUSH:
        return _flush_unit(_described(operands["cache"], page.RANK)), None
    return _ALWAYS[operation], None


def _flush_unit(rank: int) -> Unit:
    return paging.flush_corrected if rank else paging.flush


def _described(cache: int, index: int) -> int:
    """A word of the description at an address (`runtime.backends.cpu.data.pages`)."""
    return ctypes.c_int64.from_address(cache + 8 * index).value
