"""The gated delta rule of a prompt's rows, in chunks and one by one: microseconds, and percent of the device's limit.

Both contestants are whole calls, with what is read of tokens and what becomes of outputs. The states of a step say
which of the two a sequence takes (`runtime.kv.states.States.absorbs`). Operands stay where the last replay left them,
as those of a step do.

The limit is what takes longer: the bytes of operands and states, each once, at the measured bandwidth; or the
operations of the rule itself, row by row, as three products of bfloat16, at the measured rate of a large one.
"""

from __future__ import annotations

from functools import partial

import torch

from models import recurrent
from models.spec import DeltaSpec
from runtime.backends.triton.kernels.cache.pages import Rows
from runtime.backends.triton.kernels.convolution import Recent
from runtime.backends.triton.kernels.delta.heads import Mixed
from runtime.backends.triton.kernels.delta.kernel import DeltaLayer, Rates, recur
from runtime.backends.triton.sizes import CHUNK
from runtime.kv.states import RING, WAITING
from tests.bench.gpu.bandwidth import read_gb_s
from tests.bench.gpu.clock import race
from tests.bench.gpu.report import Part, Row
from tests.bench.gpu.sizes import Sizes

TAPS, EPS = 4, 1e-6
WAYS = {"chunks": 2, "row by row": 1}
"""What matrices do, by the way in which they meet rows: absorb them at once, or keep them waiting."""
TOLERANCE = 2e-3
"""Largest error of an output, relative to the largest one: they are rounded to half precision."""
PRODUCTS = 3
"""Products of bfloat16 that make one of float32 (`runtime.backends.triton.kernels.delta.chunks`)."""
WIDEST = 8192
"""Rows and columns of the product that shows what a device can do."""


class Rule:
    """A delta rule, and the rows of a prompt that it reads from the beginning.

    Args:
        spec: Its heads.
        rows: Number of rows.
        device: Where.
    """

    def __init__(self, spec: DeltaSpec, rows: int, device: torch.device) -> None:
        made = partial(torch.randn, device=device)
        self.y = made(rows, spec.inputs + spec.value_width)
        self.weights = made(TAPS, spec.channels), -made(spec.value_heads).exp(), made(spec.value_heads)
        conv, decay, dt = self.weights
        ring = torch.zeros(1, RING, -(-spec.inputs // 16) * 16 + 16, device=device)
        columns = -(-spec.value_dim // 16) * 16
        matrices = torch.zeros(1, spec.value_heads, spec.key_dim, columns, device=device)
        gain = made(spec.value_dim)
        self.layer = DeltaLayer(spec, Recent(ring, conv.flatten()), Rates(decay, dt), gain, EPS, matrices)
        positions = torch.arange(rows, dtype=torch.int32, device=device)
        self.rows = Rows(positions, torch.zeros_like(positions))
        self.mixed = Mixed(
            torch.zeros(WAITING, spec.inputs, device=device),
            torch.zeros(rows, spec.inputs, device=device),
            torch.zeros(rows, spec.value_heads, 2, CHUNK, device=device),
        )
        self.x = torch.zeros(rows, spec.value_width, dtype=torch.float16, device=device)

    def read(self, table: torch.Tensor) -> None:
        """Launch what writes the outputs to `x`."""
        recur(self.y, None, self.rows, table, self.layer, self.mixed, self.x)

    def table(self, absorbs: int) -> torch.Tensor:
        """The one run of the step."""
        return torch.tensor([[0, len(self.y), 0, absorbs]], dtype=torch.int32, device=self.y.device)

    def expected(self) -> torch.Tensor:
        """The outputs by the oracle, in float64."""
        spec, (conv, decay, dt) = self.layer.spec, (weight.double() for weight in self.weights)
        entered = torch.cat((self.y.new_zeros(TAPS - 1, spec.inputs), self.y[:, : spec.inputs])).double()
        found = recurrent.delta_inputs(spec, entered, conv, decay, dt)
        start = entered.new_zeros(spec.value_heads, spec.key_dim, spec.value_dim)
        gates, gain = self.y[:, spec.inputs :].double(), self.layer.gain.double()
        return recurrent.finish(recurrent.recur(found, start)[0], gates, gain, EPS)

    @property
    def operations(self) -> int:
        """Of the rule, row by row: what the matrix holds for the key, its change, and the output."""
        spec = self.layer.spec
        return 2 * 3 * len(self.y) * spec.value_heads * spec.key_dim * spec.value_dim

    @property
    def nbytes(self) -> int:
        """Bytes of the projection and the outputs, and of the matrices twice."""
        return self.y.nbytes + self.x.nbytes + 2 * self.layer.matrices.nbytes


def measure(part: Part, sizes: Sizes, device: torch.device) -> None:
    """A row for each number of rows and way, and one for each that says whether its numbers are right."""
    gb_s, tflop_s = read_gb_s(sizes, device), _tflop_s(sizes, device)
    part.add({"what": "read", "gb_s": gb_s})
    part.add({"what": "product of bfloat16", "tflop_s": round(tflop_s, 2)})
    for rows in sizes.delta_rows:
        rule = Rule(sizes.delta, rows, device)
        tables = {way: rule.table(absorbs) for way, absorbs in WAYS.items()}
        for way, table in tables.items():
            part.add(_check(rule, way, table))
        moving = rule.nbytes / gb_s / 1e9 if gb_s else 0.0
        limit = max(moving, PRODUCTS * rule.operations / tflop_s / 1e12)
        contestants = {way: [partial(rule.read, table)] for way, table in tables.items()}
        for way, times in race(contestants, device, rounds=max(1, sizes.rounds // 4)).items():
            row: Row = {"what": way, "rows": rows, **times.microseconds(), "us_a_row": round(1e6 * times.p50 / rows, 3)}
            row |= {"limit_us": round(1e6 * limit, 2), "percent_of_limit": round(100 * limit / times.p50, 1)}
            part.add(row)


def _check(rule: Rule, way: str, table: torch.Tensor) -> Row:
    """Whether a way gives what the oracle does: the speed of wrong numbers means nothing."""
    rule.layer.matrices.zero_()
    rule.x.fill_(torch.nan)
    rule.read(table)
    expected = rule.expected()
    error = float((rule.x.double() - expected).abs().max() / expected.abs().max())
    row: Row = {"what": f"check of {way}", "rows": len(rule.y), "largest_error": float(f"{error:.2g}")}
    return row | {"correct": error < TOLERANCE}


def _tflop_s(sizes: Sizes, device: torch.device) -> float:
    """The rate of torch's product of two large matrices of bfloat16."""
    width = WIDEST if device.type == "cuda" else sizes.spec.hidden_size
    a, b = (torch.randn(width, width, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    seconds = race({"product": [lambda: torch.matmul(a, b, out=out)]}, device, rounds=5)["product"].p50
    return 2 * width**3 / seconds / 1e12
