"""The comparison of numbers in tests, and its tolerances with reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

EVEN = 0.6
"""Errors of rounding are spread: their root mean square is at most so much of what the largest may be. One that reaches
its bound nearly everywhere is no rounding."""
_SEVERAL = 16
"""A mean of fewer numbers says nothing beside the largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far a number may be off: the sum of the four, each in its unit."""

    why: str
    """What the numbers may differ by, in words."""
    atol: float = 0.0
    """Whatever the number's size."""
    rtol: float = 0.0
    """In units of the number itself."""
    span: float = 0.0
    """In units of the largest of all numbers: for sums, whose terms may be much larger than their result."""
    spread: float = 0.0
    """In units of the root mean square of all numbers: likewise, where no few of them are much larger."""


TOLERANCES = {
    "exact": Tolerance(why="the same operations in the same order"),
    "float64": Tolerance(rtol=1e-12, why="a few operations in float64"),
    "rounding": Tolerance(rtol=1e-6, why="a few operations in float32, whose half step is 6e-8"),
    "sums": Tolerance(span=1e-5, why="sums of some thousand float32 products in another order"),
    "float32": Tolerance(rtol=1e-5, atol=1e-5, why="sums of numbers around 1, in float32 and another order"),
    "relative": Tolerance(rtol=1e-4, why="means and divergences of float32 sums, all positive: nothing cancels"),
    "model": Tolerance(rtol=1e-4, atol=1e-4, why="logits after some blocks in float32, their sums in another order"),
    "half": Tolerance(rtol=5e-4, atol=6e-8, why="rounded to half precision: half a step is 2^-11, or 2^-25 near zero"),
    "heads": Tolerance(rtol=5e-4, atol=2e-6, why="as half, after a rotation in which two float32 terms may cancel"),
    "stored half": Tolerance(rtol=2e-3, atol=1e-6, why="read back from half precision: two roundings, a scale's too"),
    "half attention": Tolerance(rtol=1e-3, atol=1e-3, why="weights and values rounded to half precision, outputs too"),
    "packed attention": Tolerance(
        rtol=4e-3, atol=4e-3, why="as half attention, and queries, factors and scales are rounded to half precision"
    ),
    "half cache": Tolerance(atol=5e-3, why="logits over a cache of halves, some of which round the other way"),
}
"""By name. A test that needs another one makes it where it uses it, and says why."""


def assert_close(actual: Any, expected: Any, tolerance: str | Tolerance = "float32", *, what: str = "") -> None:
    """Fail unless numbers are as near to what is expected as a tolerance allows, each of them and in the mean.

    Args:
        actual: Numbers, tensor or array of any type and device.
        expected: What they should be; broadcast to the shape of `actual` where it has fewer.
        tolerance: A name in `TOLERANCES`, or one of the test's own.
        what: What is compared, for the message.

    Raises:
        AssertionError: the shapes differ, a number is NaN or infinite where it should not be, or it is too far off; the
            message names the worst place.
    """
    __tracebackhide__ = True
    allowed = TOLERANCES[tolerance] if isinstance(tolerance, str) else tolerance
    found, wanted = _doubles(actual), _doubles(expected)
    what = f"{what}: " if what else ""
    assert wanted.ndim <= found.ndim, f"{what}shape {found.shape} instead of {wanted.shape}"
    assert wanted.size <= 1 or wanted.shape == found.shape, f"{what}shape {found.shape} instead of {wanted.shape}"
    wanted = np.broadcast_to(wanted, found.shape)
    if not found.size:
        return
    regular = np.isfinite(wanted)
    same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    error = np.where(
        regular & np.isfinite(found), np.abs(found - np.where(regular, wanted, 0)), np.where(same, 0, np.inf)
    )
    size = np.abs(np.where(regular, wanted, 0))
    bound = allowed.atol + allowed.rtol * size + allowed.span * size.max()
    bound = bound + allowed.spread * np.sqrt(np.mean(np.square(size)))
    share = np.divide(error, bound, out=np.where(error > 0, np.inf, 0.0), where=bound > 0)
    worst = np.unravel_index(int(share.argmax()), share.shape)
    place = f"{found[worst]!r} instead of {wanted[worst]!r} at {tuple(map(int, worst))}"
    summary = f"{what}{place}: off by {error[worst]:.3g}, allowed are {bound[worst]:.3g} ({allowed.why})"
    assert share[worst] <= 1, f"{summary}; {np.count_nonzero(share > 1)} of {share.size} are too far off"
    mean = float(np.sqrt(np.mean(np.square(share))))
    assert found.size < _SEVERAL or mean <= EVEN, (
        f"{what}the mean error is {mean:.2f} of what the largest may be; {summary}"
    )


def _doubles(numbers: Any) -> npt.NDArray[np.float64]:
    """Float64, from whatever holds them; a complex number gives two."""
    if hasattr(numbers, "detach"):
        numbers = numbers.detach().cpu().double().numpy()
    array = np.asarray(numbers)
    return np.stack([array.real, array.imag], -1) if np.iscomplexobj(array) else array.astype(np.float64)
