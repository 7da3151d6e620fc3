"""Units: the implementations of a program's instructions, compiled separately.

They are listed here by name, for `runtime.backends.cpu.link`. The modules in this folder define the functions and
import numba; they are only imported for compiling.
"""

from __future__ import annotations

from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data.pages import HALF, TWO_PLANES
from runtime.backends.cpu.machine.unit import Unit, unit

_BACKEND = __name__.rpartition(".")[0]


def _named(place: str) -> Unit:
    module, _, name = place.rpartition(".")
    return unit(f"{_BACKEND}.{module}", name)


execute, set_active = _named("executor.execute"), _named("executor.set_active")
"""The executor, and the function that sets its number of threads."""
INPUTS = {
    op.Embed: _named("units.inputs.embed"),
    op.Gather: _named("units.inputs.gather"),
    op.Check: _named("units.inputs.check"),
    op.Norm: _named("units.inputs.norm"),
    op.Gate: _named("units.inputs.gate"),
    op.Merge: _named("units.inputs.merge"),
}
ROUTING = {
    op.Score: _named("units.experts.score_experts"),
    op.Route: _named("units.experts.route"),
    op.Spread: _named("units.experts.spread"),
    op.GateExperts: _named("units.experts.gate_experts"),
}
"""The same of a mixture of experts."""
EXPERTS = {
    op.UNIFORM: {bits: _named(f"units.experts.multiply_experts_{bits}") for bits in (3, 4, 5, 8)},
    op.MINIMUMS: {bits: _named(f"units.experts.multiply_experts_minimums_{bits}") for bits in (4, 5)},
    op.TWO_LEVELS: {bits: _named(f"units.experts.multiply_experts_two_levels_{bits}") for bits in (4, 6)},
    op.FLOATS: {4: _named("units.experts.multiply_experts_floats")},
    op.FLOATS_8: {8: _named("units.experts.multiply_experts_floats_8")},
    op.TRELLIS: {bits: _named(f"units.experts.multiply_trellis_experts_{bits}") for bits in (2, 3, 4)},
}
"""Products with experts, by the form and the bits of their matrices."""
SHARE_EXPERTS = {bits: _named(f"units.experts.share_experts_{bits}") for bits in (2, 4, 8, 16)}
"""Compensation of an expert's rows by channels that they share, by the residuals' bits."""
norm_inplace = _named("units.inputs.norm_inplace")
"""Norms whose results stay in float32."""
PRODUCTS = {
    op.UNIFORM: {
        3: _named("units.products.multiply_uniform_3"),
        4: _named("units.products.multiply_uniform_4"),
        5: _named("units.products.multiply_uniform_5"),
        8: _named("units.products.multiply_uniform_8"),
    },
    op.MINIMUMS: {bits: _named(f"units.products.multiply_minimums_{bits}") for bits in (4, 5)},
    op.TWO_LEVELS: {bits: _named(f"units.products.multiply_two_levels_{bits}") for bits in (4, 6)},
    op.FLOATS: {4: _named("units.products.multiply_floats")},
    op.FLOATS_8: {8: _named("units.products.multiply_floats_8")},
    op.CODEBOOK: {bits: _named(f"units.products.multiply_codebook_{bits}") for bits in (3, 4)},
    op.TRELLIS: {bits: _named(f"units.products.multiply_trellis_{bits}") for bits in (2, 3, 4)},
    op.PER_TOKEN: {4: _named("units.w4a8.multiply_w4a8")},
}
"""Products with matrices, by their form and bits."""
REPACK_UNIFORM = {
    3: _named("units.repacking.repack_uniform_3"),
    **dict.fromkeys((4, op.FIVE, op.SIX), _named("units.repacking.repack_uniform_4")),
}
"""Repacking of a matrix, by its bits; at 5 and 6 of its lower four."""
REPACK_CODEBOOK = {3: _named("units.repacking.repack_codebook_3"), 4: _named("units.repacking.repack_codebook_4")}
"""Repacking of a matrix with codebooks."""
COMPENSATE = {bits: _named(f"units.products.compensate_{bits}") for bits in (2, 4, 8, 16)}
"""Compensation of a row by its own channels, by the residuals' bits; as are the next."""
SHARE = {bits: _named(f"units.panels.share_{bits}") for bits in (2, 4, 8, 16)}
PANEL = {bits: _named(f"units.panels.panel_{bits}") for bits in (2, 4, 8, 16)}
multiply_panel, add_whole = _named("units.panels.multiply_panel"), _named("units.products.add_whole")
"""Products of prompt rows with residuals: added to the weights, or in a separate product."""
EXACT = {number: _named(f"units.exact.multiply_{kind}") for number, kind in enumerate(op.EXACT_KINDS)}
"""Products with full-precision weights, by their kind."""
pick = _named("units.inputs.pick")
"""The input of the latter."""
SELECT = {
    op.SELECT_APPROX: _named("units.selection.select_by_buckets"),
    op.SELECT_EXACT: _named("units.selection.select_largest"),
    op.SELECT_STATIC: _named("units.selection.select_always"),
    op.SELECT_RANDOM: _named("units.selection.select_any"),
}
"""By mode."""
add_recall = _named("units.selection.add_recall")
"""Measures a selection."""
attend = _named("units.attention.attend")
"""Attention."""
convolve = _named("units.states.convolve")
"""The gated short convolution."""
DELTA = {
    op.Mix: _named("units.states.mix"),
    op.DeltaRule: _named("units.states.delta_rule"),
    op.Finish: _named("units.states.finish"),
}
"""The gated delta rule, by the instruction."""
STREAMS = {
    op.Level: _named("units.streams.level"),
    op.Streams: _named("units.streams.streams"),
    op.Cut: _named("units.streams.cut"),
}
"""Several streams and gates that are cut, by the instruction."""
restore = _named("units.paging.restore")
"""Restores a page into a window."""
_PAGES = {
    2: _named("units.attention.pages_2"),
    4: _named("units.attention.pages_4"),
    8: _named("units.attention.pages_8"),
    TWO_PLANES: _named("units.attention.pages_planes"),
}
_CORRECTED_PAGES = {
    2: _named("units.attention.corrected_pages_2"),
    4: _named("units.attention.corrected_pages_4"),
}


def product_unit(weights: op.Weights) -> Unit:
    """The unit of a matrix's products."""
    return PRODUCTS[weights.form][weights.bits]


def page_unit(form: int, rank: int) -> Unit | None:
    """The unit for attention to pages, by the cache's form and rank; None if `attend` itself handles them."""
    return _CORRECTED_PAGES[form] if rank else _PAGES.get(form)


def heads_unit(form: int, window: int) -> Unit:
    """The unit of HEADS instructions, by the cache's form, and whether it has a window."""
    place = "window" if window else "halves" if form == HALF else "codes"
    return _named(f"units.attention.heads_to_{place}")


def flush_unit(rank: int) -> Unit:
    """The unit that flushes a page, by the cache's rank."""
    return _named("units.paging.flush_corrected" if rank else "units.paging.flush")
