"""A model of a step's time: products by bytes or by latency, plus what each kernel costs that waits for another.

    python -m tests.bench.kernels.token_time

Launches are counted (test_variants.py), bytes are the layout's, bandwidths the data sheets'; the latency of a block of
codes was measured on an H200, the cost of a kernel is an assumption, hence a range.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from triton import cdiv

from models.recipe import Recipe
from models.spec import LAYER_TYPES, ModelSpec
from runtime.backends.triton.backend import BACKEND
from runtime.backends.triton.codes import Form
from runtime.backends.triton.kernels.gemv import OVERHEAD, TILE_ROWS, configure, resident
from runtime.backends.triton.sizes import BLOCK, CONCURRENT_ROWS, linear_bytes, weight_bytes
from runtime.kv.kinds import KINDS, bytes_per_token
from tests.bench.gpu.sizes import FULL
from tuner.devices import DEVICES

EFFICIENCY = 0.8
"""Share of the memory's bandwidth that products reach (`tuner.simulate`)."""
KERNEL_US = (2.5, 5.0)
"""Microseconds of a kernel beyond its bytes: its start behind another, the first bytes' latency, the end."""
JOIN_US = 1.5
"""Microseconds for which a product waits for another stream at its beginning and end, together."""
HOST_US = (25.0, 40.0)
"""Microseconds of Python for a launch that is not captured."""
CONTEXT = 2048
"""Tokens in the cache."""
BLOCK_US = 3.0
"""Microseconds in which a program multiplies a block of codes, however fast the memory: on an H200, the four matrices
of a block of Llama 3 8B then take what was measured, within 15 % (tests/bench/results/h200-2026-11-26)."""
H200_GB_S, H200_SMS = 4800.0, 132
"""Bandwidth of an H200's memory, and its multiprocessors; the others' are in `tuner.devices`."""
HOPPER, ADA = 9, 8
"""Major compute capabilities."""
ROWS = (1, 2, 4, 8, 16)
"""Rows of a step."""
MEASURED = Path(__file__).resolve().parents[1] / "results" / "h200-2026-11-26" / "gpu-decode.json"
"""What decoding on a card took."""
KNOWN = ("rtx-4050m", "rtx-4070m", "rtx-4090")
"""Devices of the tables, by their names in `tuner.devices`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """Triton kernels of a compensated step."""

    chain: int
    """Those that wait for one another."""
    beside: int
    """Those of compensation, on the other stream."""
    forks: int
    """Products beside which they run."""

    @property
    def total(self) -> int:
        """All."""
        return self.chain + self.beside


def launches(layers: int, rows: int, *, head: bool = True) -> Launches:
    """Launches of a step whose rows all want logits.

    A layer has four products, two norms, heads, attention and its merge, and the gate; the head a norm and a product. A
    product of 9 to 16 rows is two launches. Compensation is one launch for one row; for several, the selection, the
    union of what they chose, its copy, and the sums; for more than 8, all of that follows the product. `head`: whether
    the head's rows share what they fetch; of large vocabularies there is no room for that.
    """
    products = -(-rows // TILE_ROWS)
    each = 1 if rows == 1 else 4
    chain, beside = layers * (4 * products + 6) + products + 1, each * (4 * layers + 1)
    beside -= 0 if head or rows == 1 else 2
    if rows > CONCURRENT_ROWS:
        return Launches(chain=chain + beside, beside=0, forks=0)
    return Launches(chain=chain, beside=beside, forks=4 * layers + 1)


def page() -> Iterator[str]:
    """The tables, as lines of Markdown."""
    spec, recipe = FULL.spec, Recipe(bits=3, group_size=128)
    cache = CONTEXT * bytes_per_token(KINDS["int4"], spec)
    nbytes = weight_bytes(spec, recipe, compensated=True) + cache
    yield f"Llama 3 8B at 3 bits, {CONTEXT} tokens in an `int4` cache, k_chunk 16, one row: {nbytes / 1e9:.2f} GB. "
    yield f"Assumed: {EFFICIENCY:.0%} of the memory's bandwidth, but {BLOCK_US} µs for each block of codes that a "
    yield f"program multiplies, as measured on an H200; {_range(KERNEL_US)} µs for each kernel that waits for the one "
    yield f"before it, and {JOIN_US} µs for each product that waits for another stream.\n\n"
    yield "| device | products and cache, ms | kernels, ms | tokens/s | limit by memory | what limits | next lever |\n"
    yield "|---|--:|--:|--:|--:|---|---|\n"
    for name, gb_s, sms, major in _devices():
        own = products_ms(spec, recipe, gb_s, sms, major) + cache / gb_s / 1e6 / EFFICIENCY
        memory, gaps = nbytes / gb_s / 1e6, [_gaps_ms(spec, 1, us) for us in KERNEL_US]
        rates = [1e3 / (own + gap) for gap in reversed(gaps)]
        yield f"| {name} | {own:.2f} | {_range(gaps, 2)} | {_range(rates, 0)} | {1e3 / memory:.0f} "
        yield f"| {_limits(memory / EFFICIENCY, own, gaps)} |\n"
    yield f"\n{_measured()}\n\n"
    yield "Kernels of a step by its rows, and milliseconds of an H200 for it: launched one by one from Python, at "
    yield f"{_range(HOST_US)} µs a launch, and captured (at most 16 rows read the weights once).\n\n"
    yield "| rows | kernels in the chain | of compensation | launched, ms | captured, ms |\n|--:|--:|--:|--:|--:|\n"
    for rows in ROWS:
        found = launches(spec.num_layers, rows)
        own = products_ms(spec, recipe, H200_GB_S, H200_SMS, HOPPER, rows) * -(-rows // TILE_ROWS)
        host = [found.total * us / 1e3 for us in HOST_US]
        captured = [own + _gaps_ms(spec, rows, us) for us in KERNEL_US]
        yield f"| {rows} | {found.chain} | {found.beside} | {_range(host, 0)} | {_range(captured, 1)} |\n"
    yield from _prompts(spec, recipe)


def products_ms(spec: ModelSpec, recipe: Recipe, gb_s: float, sms: int, major: int, rows: int = 1) -> float:
    """Milliseconds of the products of a step of up to `TILE_ROWS` rows: by bytes or by latency, whichever is more."""
    total = 0.0
    for name in spec.linear_names():
        (N, K), bits = spec.linear_shape(name), recipe.layer_bits(name)
        form = Form(recipe.group_size, bits, CODEBOOK=False, SPAN=recipe.group_size, EVEN_K=True, TAIL=0)
        held = resident(min(rows, TILE_ROWS), form, major)
        split = configure(N, K, sms, held).split
        waves = cdiv(cdiv(cdiv(N, 64) * split, sms), held)
        latency = waves * (cdiv(cdiv(K, BLOCK), split) + OVERHEAD) * BLOCK_US
        read = linear_bytes((N, K), bits, recipe.group_size, bias=False) / (EFFICIENCY * gb_s) / 1e3
        total += max(latency, read)
    return total / 1e3


def _measured() -> str:
    """What a card showed, as a sentence."""
    report = json.loads(MEASURED.read_text(encoding="utf-8"))
    rows = [row for row in report["parts"]["decode"]["rows"] if row["what"] == "decode" and row["bits"] == 3]
    times = {row["budget_percent"]: row["milliseconds_per_token"] for row in rows}
    return (
        f"Measured on an {report['device']['name'].removeprefix('NVIDIA ')} on {report['date'][:10]}, with the code of "
        f"{report['commit'].rstrip('+')}: {times[0.0]:.2f} ms a token without compensation, {times[10.0]:.2f} with "
        "what a budget of 10 % bought."
    )


def _prompts(spec: ModelSpec, recipe: Recipe) -> Iterator[str]:
    """What a fully compensated prompt copies over the link."""
    shapes = [spec.linear_shape(kind) for kind in LAYER_TYPES]
    nbytes = spec.num_layers * sum(N * K for N, K in shapes) * recipe.residual_bits // 8
    choices = sorted(BACKEND.step_rows)
    yield f"\nA fully compensated prompt copies {nbytes / 1e9:.2f} GB of residuals in each of its steps, beside the "
    yield f"products. Seconds of the link for {CONTEXT:,} tokens, by the rows of a step:\n\n"
    yield f"| device | {' | '.join(f'{rows} rows' for rows in choices)} |\n|---|{'--:|' * len(choices)}\n"
    for device in KNOWN:
        link = DEVICES[device].pcie_gb_s * 1e9
        seconds = (-(-CONTEXT // rows) * nbytes / link for rows in choices)
        yield f"| {_name(device)} | {' | '.join(f'{value:.2f}' for value in seconds)} |\n"


def _devices() -> Iterator[tuple[str, float, int, int]]:
    for device in KNOWN:
        yield _name(device), DEVICES[device].memory_gb_s, DEVICES[device].sm_count, ADA
    yield "H200", H200_GB_S, H200_SMS, HOPPER


def _name(device: str) -> str:
    return DEVICES[device].name.removeprefix("NVIDIA GeForce ")


def _gaps_ms(spec: ModelSpec, rows: int, kernel_us: float) -> float:
    found = launches(spec.num_layers, rows)
    return (found.chain * kernel_us + found.forks * JOIN_US) / 1e3


def _limits(memory: float, own: float, gaps: list[float]) -> str:
    """What limits, and what to do about it next."""
    if own > 1.5 * memory:
        return "latency | fewer kernels: attention's merge in its last program, norms in products, dependent launches"
    if memory > 2 * gaps[1]:
        return "memory | a larger share of its bandwidth: `make first-light` measures each product"
    return "memory and kernels | fewer kernels: attention's merge in its last program"


def _range(values: tuple[float, ...] | list[float], digits: int = 1) -> str:
    low, high = (f"{value:,.{digits}f}" for value in (values[0], values[-1]))
    return low if low == high else f"{low} to {high}"


if __name__ == "__main__":
    print("".join(page()))
