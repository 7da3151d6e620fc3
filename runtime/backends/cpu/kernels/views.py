"""Views: records in memory that Python writes and compiled code reads, by field name.

A record is declared once, as a NamedTuple of integers, floats, truths and other records; Python writes it by the numpy
dtype that `runtime.backends.cpu.data.records` makes of it. Compiled code takes its address for a *view*, whose fields
are attributes; those that are records themselves are views in turn. After inlining an attribute is one load from a
constant offset.

Fields are read as constants (`!invariant.load`), so that a loop that stores floats still reads them once. While a unit
runs, nothing may write to a record that it views, unless the view is marked `changes`.

Those of the records of `runtime.backends.cpu.data` follow.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, lower_getattr_generic, models, register_model

from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data import records as steps
from runtime.backends.cpu.data.pages import CACHE
from runtime.backends.cpu.data.records import COUNTS, EXPERT, FIRST, PAIR, PARAMETERS, SEGMENT, Parameters
from runtime.backends.cpu.machine.emit import I8, I64, Builder, define
from runtime.backends.cpu.machine.emit import offset as moved
from runtime.backends.cpu.machine.kernel import kernel, routine

_POINTER = I8.as_pointer()
_SCALARS = {
    np.dtype(np.int64): (types.int64, I64),
    np.dtype(np.int32): (types.int32, ir.IntType(32)),
    np.dtype(np.float32): (types.float32, ir.FloatType()),
}
"""Types of fields other than records."""


class ViewType(types.Type):
    """A numba type whose value is a pointer to a record.

    Args:
        label: Name in messages.
        dtype: The record.
        changes: Whether others may write it while a unit runs.
    """

    def __init__(self, label: str, dtype: np.dtype[Any], *, changes: bool) -> None:
        self.label, self.dtype, self.changes = label, dtype, changes
        # The type's name enters the digests of units, so it must identify the layout.
        layout = hashlib.sha256(_described(dtype).encode()).hexdigest()[:12]
        super().__init__(name=f"View_{label}_{layout}{'_changing' * changes}")


def _described(dtype: np.dtype[Any]) -> str:
    """Names, types and offsets of all fields."""
    if dtype.fields is None:
        return dtype.str
    return "{" + ",".join(f"{name}:{own[1]}:{_described(own[0])}" for name, own in dtype.fields.items()) + "}"


@register_model(ViewType)
class _ViewModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: ViewType) -> None:
        super().__init__(manager, numba_type, _POINTER)


def _field(view: ViewType, name: str) -> types.Type | None:
    """Type of a view's attribute; None where it has none of that name."""
    if view.dtype.fields is None or name not in view.dtype.fields:
        return None
    dtype = view.dtype.fields[name][0]
    if dtype.fields is not None:
        return ViewType("record", dtype, changes=view.changes)  # one type for all of one layout
    return _SCALARS[dtype][0]


@infer_getattr
class _ViewAttributes(AttributeTemplate):
    key = ViewType

    def generic_resolve(self, view: Any, name: str) -> Any:  # type: ignore[override]  # numba marks it absent
        return _field(view, name)


@lower_getattr_generic(ViewType)
def _read_field(_context: Any, b: Builder, view: ViewType, value: Any, name: str) -> Any:
    assert view.dtype.fields is not None
    dtype, offset = view.dtype.fields[name][:2]
    at = b.gep(value, [ir.Constant(I64, offset)], inbounds=True)
    if dtype.fields is not None:
        return at
    loaded = b.load(b.bitcast(at, _SCALARS[dtype][1].as_pointer()), align=dtype.alignment)
    if not view.changes:
        loaded.set_metadata("invariant.load", b.module.add_metadata([]))
    return loaded


def view(label: str, dtype: np.dtype[Any], *, offset: int = 0, changes: bool = False) -> Any:
    """Intrinsic that converts an address to a view of a record.

    Args:
        label: Name in messages.
        dtype: The record: fields of int64, int32 and float32, and records of those.
        offset: Bytes from the address to the record.
        changes: Whether others may write the record while compiled code reads it.
    """
    numba_type = ViewType(label, dtype, changes=changes)

    def emit(b: Builder, address: Any) -> Any:
        return b.inttoptr(moved(b, address, offset), _POINTER)

    emit.__name__ = f"{label}_at"
    emit.__doc__ = f"The {label} at the address."
    return define(numba_type, types.int64)(emit)


def _view(operation: type[op.Instruction]) -> Any:
    return view(operation.__name__.lower(), op.RECORDS[operation], offset=op.HEADER.itemsize)


header_at = view("header", op.HEADER)
"""The header of the instruction at an address."""
changing_header_at = view("changing_header", op.HEADER, changes=True)
"""The same, for code that runs longer than one instruction."""
embed_at, gather_at, pick_at, check_at = map(_view, (op.Embed, op.Gather, op.Pick, op.Check))
"""The instruction at an address; so are the others."""
norm_at, norm_inplace_at, gate_at, merge_at = map(_view, (op.Norm, op.NormInplace, op.Gate, op.Merge))
select_at, linear_at, heads_at, attend_at = map(_view, (op.Select, op.Linear, op.Heads, op.Attend))
panel_at, flush_at, restore_at = map(_view, (op.Panel, op.Flush, op.Restore))
convolve_at, mix_at, delta_rule_at, finish_at = map(_view, (op.Convolve, op.Mix, op.DeltaRule, op.Finish))
score_at, route_at, spread_at = map(_view, (op.Score, op.Route, op.Spread))
gate_experts_at, experts_at = map(_view, (op.GateExperts, op.Experts))
level_at, streams_at, cut_at = map(_view, (op.Level, op.Streams, op.Cut))

expert_at, counts_at = view("expert", EXPERT), view("counts", COUNTS)
"""Records of a mixture of experts at an address; so are the others."""
segment_at, pair_at = view("segment", SEGMENT), view("pair", PAIR)

cache_at = view("cache", CACHE)
"""The description of a cache at an address."""
parameters_at = view("parameters", PARAMETERS, offset=8 * FIRST)
"""The parameters in the control block at an address."""
changing_parameters_at = view("changing_parameters", PARAMETERS, offset=8 * FIRST, changes=True)
"""The same, for code that runs longer than one step."""

share_of = routine(steps.share_of)
"""See there, and so below."""
share_of_weights = routine(steps.share_of_weights)
tiles_of_line = routine(steps.tiles_of_line)


@kernel
def rows_of(control: int, wanted: int) -> int:
    """Rows of the step, or those whose logits are wanted."""
    step: Parameters = parameters_at(control)
    return step.wanted_rows if wanted != 0 else step.rows
