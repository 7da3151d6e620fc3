"""What is measured on a card: parts in their order, what tells most first, and the seconds that each has."""

from __future__ import annotations

FIRST_LIGHT = {
    "start": 20,
    "graph": 55,
    "tokens": 75,
    "shapes": 95,
    "draw": 15,
    "chat": 30,
    "memory": 25,
    "overlap": 30,
    "link": 15,
    "tune": 35,
}
"""Whether the program works on a card that it has never run on: the first call of `make first-light`."""
SPEEDS = {
    "decode": 110,
    "timeline": 40,
    "w4a8": 80,
    "families": 75,
    "gemv": 60,
    "attention": 35,
    "synccheck": 45,
    "memcheck": 45,
}
"""How fast it is there: the second call. Together they take less than fifteen minutes."""
TOGETHER = ("graph", "tokens", "shapes", "draw")
"""Parts that judge numbers, not times: they run at the same time, so that one compiles while another computes, and each
may take the time of all of them."""
BENCHMARK = {
    "bandwidth": 30,
    "gemv": 70,
    "knee": 80,
    "prefill": 30,
    "attention": 100,
    "decode": 200,
    "families": 120,
    "w4a8": 120,
}
"""Speeds beside the device's limits and other programs' kernels, at leisure."""
TESTS = {"tests": 150, "oracle": 360}
"""Tests of kernels, compiled on this card: those that need one, and the others against their oracles."""
SANITIZED = "fused or experts or pairs"
"""Tests that compute-sanitizer watches: where programs wait for others, or read what others wrote."""
CHOSEN = {"tests": ("-m", "gpu"), "oracle": ("-m", "not gpu and not slow")} | dict.fromkeys(
    ("synccheck", "memcheck"), ("-m", "not slow", "-k", SANITIZED)
)
"""How pytest chooses the tests of the parts that are tests; the last two run under tools of compute-sanitizer."""
PARTS = FIRST_LIGHT | SPEEDS | BENCHMARK
SETS = {"first-light": FIRST_LIGHT, "speeds": SPEEDS, "benchmark": BENCHMARK, "tests": TESTS}
