"""Specializations of the kernels of experts: Qwen3-30B-A3B's, 128 experts of 768 at 2048 channels, 8 for a token, and
gpt-oss-20b's, 32 experts of 2880 at 2880 channels, 4 for a token, with biases."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from models.spec import MLP_TYPES, MixtureSpec
from runtime.backends.triton.codes import Form, Matrix
from runtime.backends.triton.kernels import (
    compensate,
    expert_residuals,
    experts,
    gemm,
    gemv,
    grouping,
    residual_gemm,
    routing,
    select,
)
from runtime.backends.triton.sizes import BLOCK
from tests.bench.kernels.specialization import Specialization, Types

ABSENT = "constexpr"
"""The type of a tensor that isn't there."""
MATRIX = Matrix("*i32", "*i32", "*fp32", "*fp32", "i32", "i32", "i32")
"""Absent tensors are replaced by the output."""
PLACES = experts.Places("*i64", "i32")
MIXTURE = MixtureSpec(experts=128, chosen=8, width=768, normalized=True)
CORRECTED = MixtureSpec(
    experts=128, chosen=8, width=1408, normalized=True, scoring="sigmoid", corrected=True, shared=1, gated=False
)
"""GLM-4.5-Air's."""


BIASED = MixtureSpec(experts=32, chosen=4, width=2880, normalized=True, bias=True)
"""gpt-oss-20b's."""
BESIDE = MixtureSpec(experts=128, chosen=8, width=704, normalized=True, beside=True)
"""Gemma 4 26B-A4B's."""


def types(**names: str) -> dict[str, Types]:
    """Types of arguments, from the names of all that have one: `types(i32="M N")`."""
    return {name: kind for kind, all_names in names.items() for name in all_names.split()}


def form(bits: int, K: int) -> Form:
    """The form of an expert's matrix."""
    tail = K % BLOCK // 32
    return Form(GROUP_SIZE=128, BITS=bits, CODEBOOK=False, SPAN=128, EVEN_K=True, TAIL=tail)


def route() -> Iterator[Specialization]:
    """Tokens and prompts, counted and not: as they are; with scores, a correction and a shared expert; with biases; of
    the residual stream, through a norm."""
    for name, mixture, tile, counted in (
        ("route E128", MIXTURE, routing.ONE, False),
        ("route E128 normed", BESIDE, routing.ONE, False),
        ("route E128 normed prompt", BESIDE, routing.SEVERAL, False),
        ("route E128 counted", MIXTURE, routing.ONE, True),
        ("route E128 prompt", MIXTURE, routing.SEVERAL, False),
        ("route E128 prompt counted", MIXTURE, routing.SEVERAL, True),
        ("route E128 sigmoid", CORRECTED, routing.ONE, False),
        ("route E128 sigmoid prompt", CORRECTED, routing.SEVERAL, False),
        ("route E32 biased", BIASED, routing.ONE, False),
        ("route E32 biased prompt", BIASED, routing.SEVERAL, False),
    ):
        weight = routing.torch.empty(0)
        bias, correction = ("*fp32" if there else ABSENT for there in (mixture.bias, mixture.corrected))
        yield Specialization(
            name=name,
            kernel=routing._route_kernel,
            types={
                "x_ptr": "*fp32" if mixture.beside else "*fp16",
                "weights": routing.RouterWeights("*fp32", bias, correction, "fp32" if mixture.beside else ABSENT),
                **({"counts_ptr": "*i32"} if counted else {}),
                "routed": routing.Routed("*i32", "*fp32", "*fp32"),
                "counters_ptr": "*i32",
                "scale": "fp32",
                **types(i32="M C"),
            },
            constants={
                "form": routing.GpuRouter(mixture=mixture, weight=weight, bias=None, correction=None).form,
                "tile": tile,
                **({} if counted else {"counts_ptr": None}),
            },
            num_warps=routing.WARPS,
        )


def group() -> Iterator[Specialization]:
    """Blocks of 32 pairs."""
    for mixture in (MIXTURE, BIASED):
        yield Specialization(
            name=f"group E{mixture.experts}",
            kernel=grouping._group_kernel,
            types={"chosen_ptr": "*i32", "groups": grouping.Groups("*i32", "*i32"), **types(i32="pairs most experts")},
            constants={"BLOCK_E": mixture.experts, "BLOCK_M": experts.SMALL, "BLOCK_P": grouping.BLOCK_P},
            num_warps=grouping.WARPS,
        )


def products() -> Iterator[Specialization]:
    """A few rows and prompts at 3 and 4 bits: both mixtures' `gate_up` and `down`, both sizes of blocks."""
    for bits in (4, 3):
        yield from (_few(bits, "gate_up", 2048), _few(bits, "down", 768))
        yield from (_many(bits, 2048, experts.SMALL), _many(bits, 768, experts.SMALL), _many(bits, 2048, experts.LARGE))
        yield from (_few(bits, kind, BIASED.width, biased=True) for kind in MLP_TYPES)
        yield from (_many(bits, BIASED.width, experts.SMALL, biased=True, shared=there) for there in (False, True))
        yield _many(bits, BIASED.width, experts.LARGE, biased=True, shared=True)
    yield Specialization(
        name="experts sum",
        kernel=experts._sum_kernel,
        types={"parts_ptr": "*fp32", "out_ptr": "*fp32", **types(i32="each N")},
        constants={"BLOCK": 512},
    )


def _few(bits: int, kind: str, K: int, *, biased: bool = False) -> Specialization:
    """The product of a few rows."""
    own, summed = form(bits, K), kind == "down"
    return Specialization(
        name=f"experts b{bits} {f'K{K} biased ' if biased else ''}{kind}",
        kernel=experts._few_kernel,
        types={
            "x_ptr": "*fp16",
            "matrix": MATRIX._replace(bias="*fp32" if biased else ABSENT),
            "places": PLACES,
            "choice": experts.Choice("*i32", "i32", "*fp32" if summed else ABSENT),
            "counters_ptr": "*i32",
            **types(**{"*fp32": "sums_ptr out_ptr parts_ptr", "i32": "split"}),
        },
        constants={"SUMMED": summed, "form": own, "tile": gemv.tile_of(1, own)},
        num_warps=gemv.WARPS,
        num_stages=1,
        weights=BLOCK * 64 // gemv.WARPS,
        options_of=partial(gemv.options, 1, own),
    )


def _many(bits: int, K: int, block_m: int, *, biased: bool = False, shared: bool = False) -> Specialization:
    """The product of a prompt's rows; `shared`: biases are multiplied by shares, as those of `down` are."""
    return Specialization(
        name=f"experts b{bits} K{K} M{block_m}{' biased' if biased else ''}{' shares' if shared else ''}",
        kernel=experts._many_kernel,
        types={
            "x_ptr": "*fp16",
            "matrix": MATRIX._replace(bias="*fp32" if biased else ABSENT),
            "places": PLACES,
            "groups": grouping.Groups("*i32", "*i32"),
            "out_ptr": "*fp32",
            **({"shares_ptr": "*fp32"} if shared else {}),
            **types(i32="each most"),
        },
        constants={
            "form": form(bits, K),
            "tile": gemm.Tile(gemm.DOT, block_m, gemm.BLOCK_N, gemm.WARPS),
            **({} if shared else {"shares_ptr": None}),
        },
        num_warps=gemm.WARPS,
        num_stages=gemm.STAGES,
        weights=BLOCK * gemm.BLOCK_N // gemm.WARPS,
    )


def residuals() -> Iterator[Specialization]:
    """A few rows' fetches for gate_up and down at 4 bits, down's at 16; a prompt's product of some and of all."""
    for bits, summed in ((4, False), (4, True), (16, True)):
        yield Specialization(
            name=f"expert residuals b{bits} {'down' if summed else 'gate_up'}",
            kernel=expert_residuals._fetch_experts_kernel,
            types={
                "salient": select.Chosen("*i32", "*fp32", ABSENT),
                "choice": experts.Choice("*i32", "i32", ABSENT),
                "residual": compensate.Residual("*i32", ABSENT if bits == 16 else "*fp16"),
                "output": compensate.Output("*fp32", ABSENT),
                **types(i32="k N K lines"),
            },
            constants={"SUMMED": summed, "fetch": compensate.Fetch(BITS=bits)},
            num_warps=select.NUM_WARPS,
        )
    for name, every in (("some", False), ("all", True)):
        yield Specialization(
            name=f"expert residuals b4 prompt {name}",
            kernel=expert_residuals._multiply_experts_kernel,
            types={
                "factors": residual_gemm.Factors("*fp16", ABSENT if every else "*i32", "*i32", "*fp16"),
                "groups": grouping.Groups("*i32", "*i32"),
                "out_ptr": "*fp32",
                **types(i32="N K k words each most"),
            },
            constants={"form": residual_gemm.Form(BITS=4, ALL=every, BLOCK_M=experts.SMALL)},
            num_warps=residual_gemm.WARPS,
            num_stages=residual_gemm.STAGES,
        )
