"""Views of `runtime.backends.cpu.data` for compiled code: its records and functions."""

from __future__ import annotations

from typing import Any

from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data import step as steps
from runtime.backends.cpu.data.experts import COUNTS, EXPERT, PAIR, SEGMENT
from runtime.backends.cpu.data.pages import CACHE
from runtime.backends.cpu.data.step import FIRST, PARAMETERS, Parameters
from runtime.backends.cpu.machine.kernel import kernel, routine
from runtime.backends.cpu.machine.view import view


def _view(operation: type[op.Instruction]) -> Any:
    return view(operation.__name__.lower(), op.RECORDS[operation], offset=op.HEADER.itemsize)


header_at = view("header", op.HEADER)
"""The header of the instruction at an address."""
changing_header_at = view("changing_header", op.HEADER, changes=True)
"""The same, for code that runs longer than one instruction."""
embed_at, gather_at, check_at = map(_view, (op.Embed, op.Gather, op.Check))
"""The instruction at an address; so are the others."""
norm_at, settle_at, gate_at, merge_at = map(_view, (op.Norm, op.Settle, op.Gate, op.Merge))
select_at, linear_at, heads_at, attend_at = map(_view, (op.Select, op.Linear, op.Heads, op.Attend))
panel_at, flush_at, restore_at = map(_view, (op.Panel, op.Flush, op.Restore))
convolve_at, mix_at, recur_at, finish_at = map(_view, (op.Convolve, op.Mix, op.Recur, op.Finish))
score_at, route_at, spread_at = map(_view, (op.Score, op.Route, op.Spread))
gate_experts_at, experts_at = map(_view, (op.GateExperts, op.Experts))

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
