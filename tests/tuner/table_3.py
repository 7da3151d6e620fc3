"""The paper's Table 3: its tuner's results for Llama-3-8B at 3 bits, and how closely simulations match.

Source: QDEC Table 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from tuner.devices import DEVICES
from tuner.search import Configuration, tune
from tuner.shapes import SHAPES
from tuner.simulate import FITTED, Constants, SimulatedTimer

KINDS = ("qkv", "o", "gate_up", "down")
BUDGETS = (2.5, 5.0, 10.0, 20.0)
"""Target slowdowns in percent: the columns of each entry below."""

Rows = dict[str, tuple[tuple[int, tuple[int, int, int, int]], ...]]
"""By device: for each budget n_tb_max and k_chunk of the four layer types."""

AWQ: Rows = {
    "rtx-4090": ((24, (4, 4, 8, 9)), (24, (5, 7, 9, 10)), (24, (10, 11, 11, 11)), (24, (15, 15, 16, 15))),
    "rtx-4080s": ((6, (9, 5, 9, 6)), (16, (10, 10, 11, 9)), (24, (18, 20, 23, 18)), (24, (26, 27, 25, 24))),
    "rtx-4070s": ((28, (25, 26, 26, 26)), (24, (31, 31, 35, 29)), (24, (35, 35, 36, 34)), (28, (44, 44, 41, 42))),
    "rtx-4070m": ((16, (38, 39, 39, 40)), (16, (42, 43, 42, 42)), (16, (46, 46, 44, 45)), (16, (50, 50, 49, 50))),
    "rtx-4050m": ((8, (55, 56, 58, 55)), (8, (59, 59, 59, 58)), (10, (62, 62, 62, 62)), (10, (70, 70, 68, 68))),
}
"""Uniform weights: the column that the constants were fitted to."""

SQUEEZELLM: Rows = {
    "rtx-4090": ((56, (2, 0, 2, 2)), (56, (1, 1, 2, 6)), (38, (5, 4, 5, 7)), (28, (10, 10, 10, 10))),
    "rtx-4080s": ((24, (10, 11, 14, 16)), (24, (14, 14, 14, 14)), (24, (18, 19, 18, 17)), (38, (23, 24, 22, 23))),
    "rtx-4070s": ((19, (16, 15, 24, 21)), (24, (21, 22, 24, 24)), (24, (28, 30, 30, 27)), (24, (35, 36, 34, 35))),
    "rtx-4070m": ((12, (28, 28, 35, 29)), (16, (33, 34, 36, 33)), (16, (37, 38, 37, 37)), (16, (42, 42, 41, 41))),
    "rtx-4050m": ((7, (45, 45, 50, 44)), (9, (48, 48, 48, 48)), (10, (52, 53, 52, 52)), (10, (59, 60, 57, 58))),
}
"""Codebook weights: held out, but for one constant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table beside the same row simulated."""

    device: str
    """Name of the device."""
    budget_percent: float
    """Target slowdown."""
    paper_n_tb_max: int
    """Bound of the thread blocks that the paper's tuner chose."""
    paper: tuple[int, int, int, int]
    """The paper's k_chunk by layer type, as `KINDS`."""
    simulated: Configuration
    """What the search finds on the simulated device."""

    @property
    def k_chunk(self) -> tuple[int, ...]:
        """The simulated k_chunk by layer type, as `KINDS`."""
        return tuple(self.simulated.k_chunk[kind] for kind in KINDS)

    @property
    def differences(self) -> tuple[float, ...]:
        """|simulated - paper| / paper by layer type; where the paper has 0: 0 if so has the simulation, else 1."""
        return tuple(
            abs(ours - theirs) / theirs if theirs else float(ours > 0)
            for ours, theirs in zip(self.k_chunk, self.paper, strict=True)
        )


def simulate(method: str, constants: Constants = FITTED) -> tuple[Row, ...]:
    """All rows of one column of the table.

    Args:
        method: `awq` or `squeezellm`.
        constants: Of the cost model.
    """
    layers = SHAPES["llama-3-8b"].layers
    rows = []
    for device, entries in (AWQ if method == "awq" else SQUEEZELLM).items():
        spec = DEVICES[device]
        timer = SimulatedTimer(spec, layers, 3, codebook=method == "squeezellm", constants=constants)
        for budget, (n_tb_max, k_chunk) in zip(BUDGETS, entries, strict=True):
            found = tune(
                layers, timer, budget_percent=budget, sm_count=spec.sm_count, limit=spec.shared_bytes_per_block
            )
            rows.append(
                Row(device=device, budget_percent=budget, paper_n_tb_max=n_tb_max, paper=k_chunk, simulated=found)
            )
    return tuple(rows)


def quantile(rows: tuple[Row, ...], part: float) -> float:
    """The relative difference that a part of all layer types of these rows stays within (nearest rank)."""
    differences = sorted(difference for row in rows for difference in row.differences)
    return differences[max(0, math.ceil(part * len(differences)) - 1)]


def order_breaks(rows: tuple[Row, ...]) -> tuple[str, ...]:
    """Neighbouring rows whose order of k_chunk is not the table's, by layer type.

    The table's order: no smaller k_chunk with a larger budget, a larger one on the device with the greater ratio of
    link to memory bandwidth.
    """
    at = {(row.device, row.budget_percent): row.simulated.k_chunk for row in rows}
    devices = list(dict.fromkeys(row.device for row in rows))
    budgets = [
        f"{device} {kind}: {after:g} % below {before:g} %"
        for device in devices
        for before, after in pairwise(BUDGETS)
        for kind in KINDS
        if at[device, after][kind] < at[device, before][kind]
    ]
    order = [
        f"{budget:g} % {kind}: {after} not above {before}"
        for before, after in pairwise(devices)
        for budget in BUDGETS
        for kind in KINDS
        if at[after, budget][kind] <= at[before, budget][kind]
    ]
    return (*budgets, *order)
