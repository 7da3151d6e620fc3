"""Specializations of the kernels of layers with a state: LFM2 1.2B's convolutions and Qwen3.5 4B's delta rules."""

from __future__ import annotations

from collections.abc import Iterator

from models.spec import DeltaSpec
from runtime.backends.triton.kernels import convolution, delta
from runtime.backends.triton.kernels.cache.pages import Rows
from runtime.backends.triton.kernels.rope import Projected
from runtime.kv.states import RING
from tests.bench.kernels.expert_specializations import ABSENT, types
from tests.bench.kernels.specialization import Specialization

RULE = DeltaSpec(key_heads=16, value_heads=32, key_dim=128, value_dim=128)
CHANNELS, TAPS = 2048, 3
"""Of a convolution alone."""
PROJECTED, ROWS = Projected("*fp32", "*fp32"), Rows("*i32", "*i32")
RECENT = convolution.Recent("*fp32", "*fp32", ABSENT)
MIXED = delta.Mixed("*fp32", "*fp32")


def convolve() -> Iterator[Specialization]:
    """Without a bias, and with one."""
    for name, bias in (("", ABSENT), (" bias", "*fp32")):
        yield Specialization(
            name=f"convolution C{CHANNELS}{name}",
            kernel=convolution._convolve_kernel,
            types={
                "projected": PROJECTED,
                "rows": ROWS,
                "recent": RECENT._replace(bias=bias),
                "x_ptr": "*fp16",
                "sums_ptr": "*fp32",
                **types(i32="M given"),
            },
            constants={
                "taps": convolution.Taps(TAPS, 4, CHANNELS, RING, CHANNELS + 16),
                "BLOCK_C": convolution.BLOCK_C,
            },
        )


def recur() -> Iterator[Specialization]:
    """What the delta rule reads of tokens, the rule itself, and what becomes of its outputs."""
    heads = delta.heads_of(RULE, RULE.value_dim)
    taps = convolution.Taps(4, 4, RULE.channels, RING, -(-RULE.inputs // 16) * 16 + 16)
    name = f"H{RULE.value_heads}/{RULE.key_heads} D{RULE.key_dim}"
    yield Specialization(
        name=f"delta mix {name}",
        kernel=delta._mix_kernel,
        types={
            "projected": PROJECTED,
            "rows": ROWS,
            "recent": RECENT,
            "rates": delta.Rates("*fp32", "*fp32"),
            "runs_ptr": "*i32",
            "mixed": MIXED,
            **types(i32="compensated runs"),
        },
        constants={"taps": taps, "heads": heads},
        num_warps=1,
    )
    yield Specialization(
        name=f"delta {name}",
        kernel=delta._recur_kernel,
        types={"mixed": MIXED, "matrices_ptr": "*fp32", "rows": ROWS, "runs_ptr": "*i32"},
        constants={"heads": heads, "BLOCK_V": delta.BLOCK_V},
        num_warps=1,
    )
    yield Specialization(
        name=f"delta finish {name}",
        kernel=delta._finish_kernel,
        types={
            "projected": PROJECTED,
            "rows": ROWS,
            "recent": RECENT,
            "mixed": MIXED,
            "x_ptr": "*fp16",
            "eps": "fp32",
            **types(i32="M given"),
            **dict.fromkeys(("gain_ptr", "sums_ptr"), "*fp32"),
        },
        constants={"taps": taps, "heads": heads},
        num_warps=1,
    )
