"""What is measured on a card: parts in their order, what tells most first, and the seconds that each has."""

from __future__ import annotations

FIRST_LIGHT = {
    "start": 45,
    "graph": 55,
    "tokens": 75,
    "shapes": 95,
    "chat": 45,
    "memory": 45,
    "overlap": 40,
    "link": 25,
    "draw": 15,
    "tune": 45,
}
"""Whether the program works on a card that it has never run on: nine minutes."""
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
"""Speeds beside the device's limits and other programs' kernels."""
TESTS = {"tests": ("gpu", 150), "oracle": ("not gpu and not slow", 360)}
"""Tests of kernels, compiled on this card: those that need one, and the others against their oracles."""
PARTS = FIRST_LIGHT | BENCHMARK
