"""Specializations of the kernels of layers with a state: LFM2 1.2B's convolutions and Qwen3.5 4B's delta rules."""

from __future__ import annotations

from collections.abc import Iterator

from models.spec import DeltaSpec
from runtime.backends.triton.kernels import convolution
from runtime.backends.triton.kernels.cache.pages import Rows
from runtime.backends.triton.kernels.delta import chunks, kernel
from runtime.backends.triton.kernels.delta.heads import Mixed, heads_of
from runtime.backends.triton.kernels.rope import Projected
from runtime.kv.states import RING
from tests.bench.kernels.expert_specializations import ABSENT, types
from tests.bench.kernels.specialization import Specialization

RULE = DeltaSpec(key_heads=16, value_heads=32, key_dim=128, value_dim=128)
CHANNELS, TAPS = 2048, 3
"""Of a convolution alone."""
PROJECTED, ROWS = Projected("*fp32", "*fp32"), Rows("*i32", "*i32")
RECENT = convolution.Recent("*fp32", "*fp32", ABSENT)
MIXED, PARTS = Mixed("*fp32", "*fp32", "*fp32"), chunks.Parts("*bf16", "*bf16")


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
    """What the delta rule reads of tokens, the rule itself by rows and by chunks, and what becomes of its outputs."""
    heads = heads_of(RULE, RULE.value_dim)
    taps = convolution.Taps(4, 4, RULE.channels, RING, -(-RULE.inputs // 16) * 16 + 16)
    name = f"H{RULE.value_heads}/{RULE.key_heads} D{RULE.key_dim}"
    yield Specialization(
        name=f"delta mix {name}",
        kernel=kernel._mix_kernel,
        types={
            "projected": PROJECTED,
            "rows": ROWS,
            "recent": RECENT,
            "rates": kernel.Rates("*fp32", "*fp32"),
            "runs_ptr": "*i32",
            "mixed": MIXED,
            **types(i32="compensated runs"),
        },
        constants={"taps": taps, "heads": heads},
        num_warps=1,
    )
    yield Specialization(
        name=f"delta {name}",
        kernel=kernel._recur_kernel,
        types={"mixed": MIXED, "matrices_ptr": "*fp32", "rows": ROWS, "runs_ptr": "*i32"},
        constants={"heads": heads, "BLOCK_V": kernel.BLOCK_V},
        num_warps=1,
    )
    yield Specialization(
        name=f"delta relate {name}",
        kernel=chunks._relate_kernel,
        types={"mixed": MIXED, "parts": PARTS, "runs_ptr": "*i32"},
        constants={"heads": heads, "CAST": False},
        num_warps=chunks.RELATE_WARPS,
        num_stages=1,
    )
    for large, stages in (("", chunks.FEW_STAGES), (" large card", chunks.STAGES)):
        yield Specialization(
            name=f"delta chunk {name}{large}",
            kernel=chunks._chunk_kernel,
            types={"mixed": MIXED, "parts": PARTS, "matrices_ptr": "*fp32", "rows": ROWS, "runs_ptr": "*i32"},
            constants={"heads": heads, "BLOCK_V": chunks.BLOCK_V, "CAST": False},
            num_warps=1,
            num_stages=stages,
        )
    yield Specialization(
        name=f"delta finish {name}",
        kernel=kernel._finish_kernel,
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
