"""Specializations of the Triton kernels that real models launch: a table of what to compile ahead of time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from models.spec import MLP_TYPES, DeltaSpec, MixtureSpec
from runtime.backends.triton.kernels import (
    activations,
    attention,
    cache,
    compensate,
    delta_chunks,
    expert_cache,
    experts,
    gate,
    gemm,
    gemv,
    norm,
    recurrent,
    residual_gemm,
    rope,
    routing,
    select,
    w4a8,
)
from runtime.backends.triton.kernels.attention import Room, options
from runtime.backends.triton.kernels.cache import LayerTensors, Record, Rows, page_layout, record_layout
from runtime.backends.triton.kernels.codes import Form, Matrix
from runtime.backends.triton.sizes import BLOCK, PIECE
from runtime.kv.kinds import KINDS, PARTS, KVKind
from runtime.kv.states import RING
from tests.runtime.backends.triton.ahead.specialization import Specialization, Types

_ABSENT = "constexpr"
"""The type of a tensor that isn't there."""
_SOURCE = select.Source("*fp16", _ABSENT, _ABSENT, _ABSENT)
_RECORD = Record("*u8", "*fp16", "*i16")
_PROJECTED = activations.Projected("*fp32", "*fp32")
_SPACED = activations.Spaced(_PROJECTED, "i32")
_TYPES: Mapping[str, Types] = {
    **dict.fromkeys(("x_ptr", "embeddings_ptr", "q_ptr", "a_ptr", "b_ptr", "k_window", "v_window"), "*fp16"),
    **dict.fromkeys(("out_ptr", "sums_ptr", "left_ptr", "parts_ptr", "h_ptr", "y_ptr", "dec_ptr"), "*fp32"),
    **dict.fromkeys(("factors_ptr", "shares_ptr", "gain_ptr", "matrices_ptr", "residual_ptr", "start_ptr"), "*fp32"),
    **dict.fromkeys(
        ("counters_ptr", "index_ptr", "chosen_ptr", "places_ptr", "channels_ptr", "counts_ptr", "moves_ptr"), "*i32"
    ),
    **dict.fromkeys(("codes_ptr", "copied_ptr", "staged_ptr", "runs_ptr"), "*i32"),
    **dict.fromkeys(("scale", "eps", "alike"), "fp32"),
    **dict.fromkeys(("k_records", "v_records"), _RECORD),
    "matrix": Matrix("*i32", "*i32", "*fp16", "*fp32", "i32", "i32", "i32"),
    "source": _SOURCE,
    "chosen": select.Chosen("*i32", "*fp32", "*i32"),
    "search": select.Search("i32", "fp32", "fp32", "fp32"),
    "residual": compensate.Residual("*i32", "*fp16"),
    "output": compensate.Output("*fp32", _ABSENT),
    "tokens": activations.TokenOperands("*i8", "*fp32", "*i32"),
    "layer": LayerTensors(_RECORD, _RECORD, "*fp16", "*fp16", "*i32", "*i32"),
    "rows": Rows("*i32", "*i32"),
    "projected": _PROJECTED,
    "recent": recurrent.Recent("*fp32", "*fp32", _ABSENT),
    "rates": recurrent.Rates("*fp32", "*fp32", _ABSENT),
    "mixed": delta_chunks.Mixed("*fp32", "*fp32", "*fp32"),
    "parts": delta_chunks.Parts("*bf16", "*bf16"),
    "places": experts.Places("*i64", "i32"),
    "groups": experts.Groups("*i32", "*i32"),
    "routed": routing.Routed("*i32", "*fp32", "*fp32"),
    "cached": expert_cache.Cached("*i32", "*i32", "*i32", "*i32"),
    **dict.fromkeys(("gate_up", "down"), expert_cache.Records("*i32", "*i64", "i32")),
}
"""Types of arguments by their names, which are those of all kernels; of all others i32."""
_ROTATED: Mapping[str, Types] = {"left_ptr": "*fp16"}
"""Of kernels that leave rotated activations, instead of sums."""
_ROUNDED = {"enable_fp_fusion": False}
"""Compiler options of kernels whose numbers are to be those of the reference, bit for bit."""
_LLAMA = {"H": 32, "H_kv": 8, "D": 128}
"""Heads of Llama-3-8B."""
_QWEN35 = {"H": 16, "H_kv": 4, "D": 256}
"""Heads of Qwen3.5 4B."""
_PADDED = {"H": 32, "H_kv": 32, "D": 96}
"""Heads whose width is no power of two."""
_GEMMA = {"H": 16, "H_kv": 8, "D": 256}
"""Of Gemma 2 9B."""
_OSS = {"H": 64, "H_kv": 8, "D": 64}
"""Of gpt-oss-20b."""
_LFM3 = {"H": 16, "H_kv": 4, "D": 128}
"""Heads of LFM3 1.7B."""
_LAGUNA = {"H": 48, "H_kv": 8, "D": 128}
"""Of Laguna XS.2's blocks without a window."""
_WIDE = {"H": 32, "H_kv": 4, "D": 512}
"""Of Gemma 4 31B's blocks without a window."""
_LATENTS = {"H": 16, "H_kv": 1, "D": 576, "dim": 512}
"""Of DeepSeek-V2-Lite."""
_FLASH = {**_LATENTS, "H": 20}
"""Of GLM-4.7-Flash."""
_RULE = DeltaSpec(key_heads=16, value_heads=32, key_dim=128, value_dim=128)
"""Qwen3.5 4B's."""
_MAMBA = DeltaSpec(key_heads=1, value_heads=48, key_dim=128, value_dim=64, mamba=True)
"""Granite 4 h-tiny's."""
_BESIDE_ATTENTION = DeltaSpec(key_heads=1, value_heads=24, key_dim=128, value_dim=64, mamba=True, normed=False)
"""Falcon-H1 0.5B's."""
_MIXTURE = MixtureSpec(experts=128, chosen=8, width=768, normalized=True)
"""Qwen3-30B-A3B's, at 2048 channels."""
_CORRECTED = MixtureSpec(
    experts=128, chosen=8, width=1408, normalized=True, scoring="sigmoid", corrected=True, shared=1, gated=False
)
"""GLM-4.5-Air's."""
_BIASED = MixtureSpec(experts=32, chosen=4, width=2880, normalized=True, bias=True)
"""gpt-oss-20b's, at 2880 channels."""
_BESIDE = MixtureSpec(experts=128, chosen=8, width=704, normalized=True, parallel_mlp=True)
"""Gemma 4 26B-A4B's."""


def _one(
    name: str,
    kernel: Any,
    constants: Mapping[str, Any],
    num_warps: int = 4,
    *,
    types: Mapping[str, Types] | None = None,
    **how: Any,
) -> Specialization:
    """A specialization; its arguments have the types of their names, except those of `types`."""
    own = {arg: _TYPES.get(arg, "i32") for arg in kernel.arg_names if arg not in constants} | dict(types or {})
    return Specialization(name=name, kernel=kernel, types=own, constants=constants, num_warps=num_warps, **how)


def _form(bits: int, kind: str = "uniform", *, group_size: int = 128, tail: int = 0) -> Form:
    """The form of models' matrices: whole pieces; by default groups of 128 and whole blocks."""
    return Form(GROUP_SIZE=group_size, BITS=bits, KIND=kind, SPAN=group_size, EVEN_K=True, TAIL=tail)


def _gemv() -> Iterator[Specialization]:
    """Groups of 128 at 3 and 4 bits, 576 and 2880 channels, a codebook, trellises, and a few tokens at once."""
    for name, form, M in (
        ("gemv b4", _form(4), 1),
        ("gemv b3", _form(3), 1),
        ("gemv b3 K576", _form(3, group_size=64, tail=2), 1),
        ("gemv b4 K2880", _form(4, tail=10), 1),
        ("gemv b3 K2880", _form(3, tail=10), 1),
        ("gemv b3 codebook", _form(3, "codebook"), 1),
        *((f"gemv b{bits} trellis", _form(bits, "trellis"), 1) for bits in (2, 3, 4)),
        ("gemv b3 trellis K2880", _form(3, "trellis", tail=10), 1),
        *((f"gemv b{bits} trellis rows", _form(bits, "trellis"), 8) for bits in (2, 3, 4)),
        ("gemv b4 rows", _form(4), 8),
        ("gemv b3 rows", _form(3), 8),
        ("gemv b4 rows16", _form(4), 16),
        ("gemv b3 rows16", _form(3), 16),
        ("gemv b3 trellis rows16", _form(3, "trellis"), 16),
        ("gemv b4 minimums", _form(4, "minimums", group_size=32, tail=2), 1),
        ("gemv b4 minimums rows", _form(4, "minimums", group_size=32, tail=2), 8),
    ):
        constants = {"form": form, "tile": gemv.tile_of(M, form)} | (
            {} if form.KIND in ("uniform", "minimums") else {"sums_ptr": None}
        )
        yield _few_rows(name, gemv._gemv_kernel, constants, M)


def _few_rows(
    name: str, kernel: Any, constants: Mapping[str, Any], M: int, types: Mapping[str, Types] | None = None
) -> Specialization:
    """A product of a few tokens, memory-bound."""
    weights, of_card = BLOCK * 64 // gemv.WARPS, partial(gemv.options, M, constants["form"])
    return _one(
        name, kernel, constants, gemv.WARPS, types=types, num_stages=1, weights=weights, options_of=of_card
    )  # fmt: skip


def _gemm() -> Iterator[Specialization]:
    """Prompts with groups of 128 at 3 and 4 bits, 576 and 2880 channels; a codebook; trellises; Hopper's tiles."""
    for name, form, block_m in (
        ("gemm b4", _form(4), gemm.BLOCK_M),
        ("gemm b3", _form(3), gemm.BLOCK_M),
        ("gemm b3 K576", _form(3, group_size=64, tail=2), gemm.BLOCK_M),
        ("gemm b4 K2880", _form(4, tail=10), gemm.BLOCK_M),
        ("gemm b3 codebook", _form(3, "codebook"), gemm.BLOCK_M),
        ("gemm b3 trellis", _form(3, "trellis"), gemm.BLOCK_M),
        ("gemm b3 trellis K2880", _form(3, "trellis", tail=10), gemm.BLOCK_M),
        ("gemm b4 minimums", _form(4, "minimums", group_size=32, tail=2), gemm.BLOCK_M),
        ("gemm b4 tall", _form(4), gemm.TALL),
        ("gemm b3 tall", _form(3), gemm.TALL),
        ("gemm b3 trellis tall", _form(3, "trellis"), gemm.TALL),
    ):
        only = gemm.HOPPER if block_m == gemm.TALL else None
        yield _many_rows(name, gemm._gemm_kernel, {"form": form}, block_m, only=only)
    for block_m in (gemm.ROWS, gemm.BLOCK_M):
        sizes = {"BLOCK_M": block_m, "BLOCK_N": gemm.BLOCK_N, "GROUP_SIZE": PIECE}
        types: dict[str, Types] = {"codes_ptr": "*i8", "scales_ptr": "*fp16", "bias_ptr": "*fp32", "out_ptr": "*fp32"}
        yield _one(f"gemm b8 M{block_m}", gemm._bytes_kernel, sizes, gemm.WARPS, types=types)


def _many_rows(
    name: str, kernel: Any, constants: Mapping[str, Any], block_m: int, **how: Any
) -> Specialization:  # fmt: skip
    """A product of a prompt's rows, compute-bound."""
    dot = min(gemm.DOT, constants["form"].SPAN)
    constants = {**constants, "tile": gemm.Tile(dot, block_m, gemm.BLOCK_N, gemm.WARPS)}
    weights = BLOCK * gemm.BLOCK_N // gemm.WARPS
    return _one(name, kernel, constants, gemm.WARPS, num_stages=gemm.STAGES, weights=weights, **how)


def _w4a8() -> Iterator[Specialization]:
    """Groups of 128 and none, few and many rows."""
    for (name, group_size), block_m in itertools.product((("g128", 128), ("per channel", 0)), (w4a8.FEW, w4a8.MANY)):
        yield _one(
            f"gemm w4a8 {name} M{block_m}",
            w4a8._gemm_w4a8_kernel,
            {"form": w4a8._form(group_size, block_m)},
            w4a8.WARPS,
            types={
                "x": _TYPES["tokens"],
                "matrix": w4a8.Matrix("*u8", "*fp16", "*i16", "*fp32", "i32", "i32"),
                "parts_ptr": "*i32",
            },
            num_stages=w4a8.STAGES,
            weights=2 * 64 * w4a8.BLOCK_N // w4a8.WARPS,
            options=_ROUNDED,
        )


def _select() -> Iterator[Specialization]:
    """All four selectors; widths and k are run-time numbers."""
    sources = {"static": _SOURCE._replace(table="*i32"), "random": _SOURCE._replace(positions="*i32")}
    for mode, number in select.MODES.items():
        types = {"source": sources.get(mode, _SOURCE), "stream": "i64" if mode == "random" else "i32"}
        yield _one(f"select-{mode}", select._select_kernel, {"MODE": number}, select.NUM_WARPS, types=types)


def _residual(bits: int) -> Types:
    return compensate.Residual("*i32", _ABSENT if bits == 16 else "*fp16")


def _row(bits: int) -> Types:
    of = _TYPES["source"], _TYPES["chosen"], _TYPES["search"], _residual(bits), _TYPES["output"]
    return compensate.Row(*of, "*i32")


def _compensate() -> Iterator[Specialization]:
    """Fused at 4 and 2 bits, with products of one token too; two launches at 4 and 16 bits; a few rows' experts at
    `gate_up` and `down`; the union of rows' channels, and its copy. Widths, k and n_tb are run-time numbers."""
    for bits in (4, 2):
        yield _one(
            f"compensate-b{bits}-fused",
            compensate._compensate_kernel,
            {"fetch": compensate.Fetch(MODE=select.MODES["approx"], BITS=bits)},
            compensate.WARPS,
            types={"row": _row(bits)},
            cooperative=True,
            options=compensate.STOPS,
        )
    cases = (_form(4), 4), (_form(3), 4), (_form(4), 16), (_form(3, "trellis"), 4), (_form(4, "trellis"), 4)
    for form, bits in cases:
        constants = {"form": form, "tile": gemv.tile_of(1, form), "fetch": compensate.Fetch(BITS=bits)}
        sums, kind = (_ABSENT, " trellis") if form.KIND == "trellis" else ("*fp32", "")
        given = gemv.Operands("*fp16", sums, _TYPES["matrix"], _ABSENT, _ABSENT, _ABSENT)
        types = {"given": given, "results": gemv.Results("*fp32", "*fp32", "*i32"), "row": _row(bits)}
        of_card = partial(compensate.options, form)
        yield _one(
            f"compensated b{form.BITS}{kind} r{bits}",
            compensate._compensated_kernel,
            constants,
            gemv.WARPS,
            types=types,
            num_stages=1,
            weights=BLOCK * 64 // gemv.WARPS,
            options_of=of_card,
            options=compensate.STOPS,
        )
    chosen = select.Chosen("*i32", "*fp32", _ABSENT)
    for bits in (4, 16):
        types = {"chosen": chosen, "residual": _residual(bits)}
        constants = {"fetch": compensate.Fetch(BITS=bits)}
        yield _one(
            f"compensate-b{bits}-fetch", compensate._fetch_kernel, constants, compensate.WARPS, types=types
        )  # fmt: skip
    for bits, summed in ((4, False), (4, True), (16, True)):
        yield _one(
            f"expert residuals b{bits} {'down' if summed else 'gate_up'}",
            compensate._fetch_experts_kernel,
            {"SUMMED": summed, "fetch": compensate.Fetch(BITS=bits)},
            select.NUM_WARPS,
            types={
                "salient": chosen,
                "choice": experts.Choice("*i32", "i32", _ABSENT),
                "residual": _residual(bits),
            },
        )
    yield _one("union", compensate._union_kernel, {}, compensate.UNION_WARPS)
    yield _one("union copy", compensate._copy_kernel, _COPIED, compensate.COPY_WARPS)


_COPIED = {"BLOCK": compensate.COPY_WORDS, "DEPTH": compensate.COPY_DEPTH}


def _residual_gemm() -> Iterator[Specialization]:
    """The fetch, and the product at 4 bits of some channels and of all; the same of a prompt's experts."""
    yield _one("residual_gemm fetch", residual_gemm._stage_kernel, _COPIED, compensate.COPY_WARPS)
    for name, every in (("", False), (" all", True)):
        types = {"factors": residual_gemm.Factors("*fp16", _ABSENT if every else "*i32", "*i32", "*fp16")}
        form = residual_gemm.Form(BITS=4, ALL=every)
        how = {"num_warps": residual_gemm.WARPS, "types": types, "num_stages": residual_gemm.STAGES}
        yield _one(f"residual_gemm b4{name}", residual_gemm._multiply_kernel, {"form": form}, **how)
        yield _one(
            f"expert residuals b4 prompt{name or ' some'}",
            residual_gemm._multiply_experts_kernel,
            {"form": form._replace(BLOCK_M=experts.SMALL)},
            **how,
        )


def _activations() -> Iterator[Specialization]:
    """Sums of pieces; any input, rotated; attention's output of 4096 channels, rounded."""
    yield _one("sums", activations._left_kernel, {"BLOCK_K": activations.BLOCK_K})
    yield _one("rotate", activations._left_kernel, {"BLOCK_K": activations.BLOCK_K}, types=_ROTATED)
    shape, warps = activations.rounding_shape(4096, 128)
    yield _one("tokens K4096", activations._round_kernel, {"K": 4096, "shape": shape}, warps, options=_ROUNDED)


def _norm() -> Iterator[Specialization]:
    """Norms of 2880, 4096 and 5120 channels, padded to 4096 and 8192; also rotated, rounded to INT8, and on both sides;
    of 2816 channels with experts beside an MLP; of 8192 with an MLP beside attention; of 768 of a wider projection."""
    before = norm.RowNorms("*fp32", "fp32", _ABSENT, "fp32", _ABSENT, _ABSENT, _ABSENT)
    both = before._replace(added="*fp32")
    beside = both._replace(beside=norm.Beside("*fp32", "*fp32", "*fp32", "*fp32"), scale="*fp32")
    two = before._replace(beside=norm.Beside("*fp32", "*fp32", _ABSENT, _ABSENT))
    for C, norms, name in (
        (5120, both, " both"),
        (8192, two, " two"),
        (2816, beside, " beside"),
        (768, before._replace(apart="i32"), " apart"),
        *((C, before, "") for C in (2880, 4096, 5120)),
    ):
        block, warps = norm._shape(C)
        constants = {"C": C, "BLOCK_C": block}
        yield _one(f"add_norm C{C}{name}", norm._add_norm_kernel, constants, warps, types={"norms": norms})
        if C > 2816:
            types = {"norms": norms, **_ROTATED}
            yield _one(f"add_norm C{C}{name} rotated", norm._add_norm_kernel, constants, warps, types=types)
    for C, norms, name in ((4096, before, ""), (5120, before, ""), (8192, two, " two")):
        shape, warps = activations.rounding_shape(C, 128)
        how = {"types": {"norms": norms}, "options": _ROUNDED}
        yield _one(f"add_norm C{C}{name} int8", norm._add_norm_round_kernel, {"C": C, "shape": shape}, warps, **how)


def _gate() -> Iterator[Specialization]:
    """Llama-3-8B's MLP, with compensation; AFM-4.5B's and Apertus 8B's, which have no gate; gpt-oss-20b's and Nemotron
    3 Nano's experts; Gemma 4 E2B's embeddings of the blocks' own."""
    slopes = gate.Slopes("*fp32", "*fp32")
    for I, kind in ((14336, "silu"), (14336, "gelu_tanh"), (18432, "relu2"), (21504, "xielu")):
        name = f"gate I{I}" + ("" if kind == "silu" else f" {kind.removesuffix('_tanh')}")
        constants = {"WIDTH": I, "BLOCK_I": gate.BLOCK_I, "KIND": kind, "LIMIT": 0.0, "factors_ptr": None}
        types: dict[str, Types] = {"slopes": slopes if kind == "xielu" else _ABSENT}
        yield _one(name, gate._gate_kernel, constants, types=types)
        yield _one(f"{name} rotated", gate._gate_kernel, constants, types={**types, **_ROTATED})
        if kind == "gelu_tanh":
            continue
        shape, warps = activations.rounding_shape(I, 128)
        constants = {"WIDTH": I, "shape": shape, "KIND": kind, "LIMIT": 0.0}
        yield _one(f"{name} int8", gate._gate_round_kernel, constants, warps, types=types, options=_ROUNDED)
    for I, kind, limit in ((2880, "clamped_silu", 7.0), (1856, "relu2", 0.0)):
        constants = {"WIDTH": I, "BLOCK_I": gate.BLOCK_I, "KIND": kind, "LIMIT": limit}
        name = f"gate I{I} {kind.removesuffix('_silu')}"
        yield _one(name, gate._gate_kernel, constants, types={"slopes": _ABSENT})
    own = gate.OwnTokens("*fp16", "i32", "*fp32", "fp32")
    types = {"gates": _PROJECTED, "context": _PROJECTED, "tokens": own}
    constants = {"WIDTH": 256, "BLOCK_I": 256, "KIND": "gelu_tanh", "LIMIT": 0.0}
    yield _one("gate P256", gate._token_gate_kernel, constants, gate.token_warps(256), types=types)
    types |= _ROTATED
    yield _one("gate P256 rotated", gate._token_gate_kernel, constants, gate.token_warps(256), types=types)


def _heads() -> Iterator[Specialization]:
    """Llama-3-8B's heads, Qwen3-8B's with norms, heads of 96 channels of which 72 rotate, norms of all heads together
    and of turned heads, gpt-oss-20b's heads, Qwen3.5 4B's, Gemma 4's with norms of values, LFM3 1.7B's,
    DeepSeek-V2-Lite's with norms of latents, and these alone; all with compensation."""
    cases: tuple[tuple[KVKind, dict[str, int], int, str], ...] = (
        ("fp16", _LLAMA, 64, ""),
        ("fp16", _LLAMA, 64, " norm"),
        ("fp16", _PADDED, 36, ""),
        ("int8", _LLAMA, 64, " norm"),
        ("int4", _LLAMA, 64, " norm"),
        ("int4", _LLAMA, 64, " norm of all"),
        ("int4", _LLAMA, 64, " norm of turned"),
        ("int4", _OSS, 32, ""),
        ("gear2", _PADDED, 36, ""),
        ("hierarchical", _LLAMA, 64, ""),
        ("int4", _QWEN35, 32, " norm"),
        ("fp16", _WIDE, 64, " norm of values"),
        ("int4", _WIDE, 64, " norm of values"),
        ("int4", _LFM3, 64, " norm, gates of heads"),
        *((kv, _LATENTS, 32, " latents") for kv in ("fp16", "int8", "int4")),
        ("int4", {**_LATENTS, "H": 0}, 32, " latents"),
    )
    for kv, sizes, half, normed in cases:
        weight, turned = ("*fp32" if there else _ABSENT for there in ("norm" in normed, KINDS[kv].turned))
        eps = "fp32" if normed in (" norm of values", " latents") else _ABSENT
        growth = "*fp32" if normed == " norm of turned" else _ABSENT
        shape = rope._shape(sizes["H"], sizes["H_kv"], sizes["D"], half)
        if "gates" in normed:
            shape = shape._replace(RUN=sizes["H"])
        yield _one(
            f"heads {kv} {_heads_name(**sizes)} r{2 * half}{normed}",
            rope._heads_kernel,
            {
                "shape": shape._replace(WIDE=normed == " norm of all", LAST=normed == " norm of turned"),
                "layout": page_layout(KINDS[kv], sizes["D"], window=KINDS[kv].window_capacity(128)),
            },
            1,
            types={
                "projected": _SPACED,
                "norms": rope.HeadNorms(weight, weight, "fp32", eps, "i32" if normed == " latents" else _ABSENT),
                "rope": rope.Rope("*fp32", "*fp32", growth),
                "basis": rope.Basis(turned, turned),
            },
        )


def _heads_name(H: int, H_kv: int, D: int, **_: int) -> str:
    return f"H{H}/{H_kv} D{D}"


def _attention() -> Iterator[Specialization]:
    """Decode of Llama-3-8B at 8192 positions over many kinds of cache, other shapes, drafts, verification, prefill;
    Gemma 2 9B's soft caps and windows; gpt-oss-20b's windows; heads of Qwen3.5 4B, Laguna XS.2 and LFM2 1.2B; those of
    512 channels that Gemma 4 31B has, and latents, whose rows are read one by one, over many kinds of cache."""
    for use, M, sizes, kinds in (
        ("decode", 1, _LLAMA, ("fp16", "int8", "int4", "hierarchical", "kivi2", "gear4", "gear2")),
        ("decode", 1, _PADDED, ("fp16",)),
        ("draft", 1, _LLAMA, ("hierarchical",)),
        ("verify", 5, _LLAMA, ("int8", "int4", "hierarchical", "gear4")),
        ("prefill", 128, _LLAMA, ("fp16", "int8", "int4", "hierarchical", "gear2")),
        ("prefill", 128, {**_LLAMA, "D": 64}, ("fp16",)),
        ("decode", 1, _WIDE, ("fp16", "int8", "int4", "hierarchical", "gear4", "gear2")),
        ("verify", 5, _WIDE, ("int8", "hierarchical")),
        ("prefill", 128, _WIDE, ("fp16", "int8", "int4", "hierarchical")),
        ("decode", 1, _LATENTS, ("fp16", "int8", "int4", "hierarchical", "kivi2", "gear4", "gear2")),
        ("draft", 1, _LATENTS, ("hierarchical",)),
        ("decode", 1, _FLASH, ("int4",)),
    ):
        for name in kinds:
            yield _attend(use, name, M, **sizes)
    for use, M in (("decode", 1), ("verify", 5), ("prefill", 128)):
        yield _attend(use, "int4", M, **_GEMMA, cap=50.0)
        yield _attend(use, "int4", M, **_OSS, sliding=True)
        yield _attend(use, "int4", M, **_QWEN35)
        yield _attend(use, "int4", M, **_LAGUNA)
        yield _attend(use, "int4", M, **{**_LLAMA, "D": 64})
    for H, H_kv, D, more in (
        (32, 8, 128, ""),
        (16, 8, 256, ""),
        (16, 4, 256, " gates"),
        (32, 4, 512, ""),
        (16, 1, 512, ""),
        (64, 8, 64, " sinks"),
        (16, 8, 8, ""),
        *((H, H_kv, D, " rotated") for H, H_kv, D in ((32, 8, 128), (16, 8, 256), (32, 4, 512), (9, 3, 64))),
        (16, 4, 256, " gates rotated"),
        (16, 4, 128, " gates of heads"),
        (64, 8, 128, " soft gates of heads"),
        (64, 8, 128, " soft gates of heads rotated"),
    ):
        yield _one(
            f"attend merge {_heads_name(H, H_kv, D)}{more}",
            attention._merge_kernel,
            {"H": H, "D": D, "BLOCK_S": attention._MERGED, "EACH": D if "heads" in more else 1, "SOFT": "soft" in more},
            attention._MERGE_WARPS,
            types={
                "merged": attention.Merged("*fp32", "*i32", "*fp16", "*fp16" if "rotated" in more else "*fp32"),
                "sinks_ptr": "*fp32" if more == " sinks" else _ABSENT,
                "gates": _SPACED if "gates" in more else _ABSENT,
                "rows": "i32",
            },
        )


def _attend(
    use: str, name: str, M: int, H: int, H_kv: int, D: int, *, dim: int = 0, cap: float = 0.0, sliding: bool = False
) -> Specialization:
    """One specialization of the attention kernel; those with a cap have a window, too."""
    kind, draft, dim = KINDS[name], use == "draft", dim or D
    config = attention._config(kind, M, H, H_kv, (D, dim), 8192, draft=draft, room=Room())
    special = " cap" if cap else " window" if sliding else ""
    return _one(
        f"attend {name} {use} {_heads_name(H, H_kv, D)}{special}",
        attention._attend_kernel,
        {
            "tile": attention._tile(H, H_kv, config, dim, sliding=sliding or cap > 0, cap=cap or None),
            "layout": page_layout(kind, D, window=kind.window_capacity(128), draft=draft),
        },
        config.num_warps,
        types={"step": attention.Step("*fp16", _TYPES["rows"], "*fp32", "*i32")},
        num_stages=config.num_stages,
        options_of=partial(options, config),
    )


def _cache() -> Iterator[Specialization]:
    """Flushes of kinds with a window, with heads of 128, 512 and 576 channels; GEAR's factors of pages of 128 tokens
    and heads of 128 and of 96 channels."""
    for kind, D in itertools.product((KINDS[name] for name in ("int4", "hierarchical", "kivi2")), (128, 512, 576)):
        keys, values = (cache._cut(kind, record_layout(kind, part, D)) for part in PARTS)
        constants = {"WINDOW": kind.window_capacity(128), "SINKS": kind.sinks, "keys": keys, "values": values}
        yield _one(f"flush {kind.name} D{D}", cache._flush_kernel, constants, cache._WARPS)
    for D in (128, 96):
        shape, warps = cache._factor_shape(128, D, 4)
        yield _one(f"low_rank D{D}", cache._low_rank_kernel, {"shape": shape}, warps)


def _route() -> Iterator[Specialization]:
    """Tokens and prompts: as they are; with scores, a correction and a shared expert; with biases; of the residual
    stream, through a norm."""
    for name, mixture in (
        ("E128", _MIXTURE),
        ("E128 normed", _BESIDE),
        ("E128 sigmoid", _CORRECTED),
        ("E32 biased", _BIASED),
    ):
        router = routing.GpuRouter(mixture=mixture, weight=routing.torch.empty(0), bias=None, correction=None)
        bias, correction = ("*fp32" if there else _ABSENT for there in (mixture.bias, mixture.corrected))
        eps = "fp32" if mixture.parallel_mlp else _ABSENT
        types = {"weights": routing.RouterWeights("*fp32", bias, correction, eps)}
        types["x_ptr"] = "*fp32" if mixture.parallel_mlp else "*fp16"
        for use, tile in (("", routing.ONE), (" prompt", routing.SEVERAL)):
            constants = {"form": router.form, "tile": tile}
            yield _one(f"route {name}{use}", routing._route_kernel, constants, routing.WARPS, types=types)


def _experts() -> Iterator[Specialization]:
    """Groups of 32 pairs; a cache of some; a few rows and prompts at 3 and 4 bits: both mixtures' `gate_up` and `down`,
    both sizes of blocks."""
    for mixture in (_MIXTURE, _BIASED):
        constants = {"BLOCK_E": mixture.experts, "BLOCK_P": expert_cache.BLOCK_P}
        yield _one(f"admit E{mixture.experts}", expert_cache._admit_kernel, constants, 1)
        constants = {"BLOCK_E": mixture.experts, "BLOCK_M": experts.SMALL, "BLOCK_P": experts.BLOCK_P}
        yield _one(f"group E{mixture.experts}", experts._group_kernel, constants, experts.GROUP_WARPS)
    for bits in (4, 3):
        yield from (_few(bits, "gate_up", 2048), _few(bits, "down", 768))
        yield from (_many(bits, 2048, experts.SMALL), _many(bits, 768, experts.SMALL), _many(bits, 2048, experts.LARGE))
        yield from (_few(bits, kind, _BIASED.width, biased=True) for kind in MLP_TYPES)
        yield from (_many(bits, _BIASED.width, experts.SMALL, biased=True, shared=there) for there in (False, True))
        yield _many(bits, _BIASED.width, experts.LARGE, biased=True, shared=True)
    yield from (_few(3, kind, K, "trellis") for kind, K in (("gate_up", 2048), ("down", 768)))
    yield from (_many(3, 2048, block_m, "trellis") for block_m in (experts.SMALL, experts.LARGE))
    constants = {"BLOCK": expert_cache.BLOCK}
    yield _one("experts exchange", expert_cache._exchange_kernel, constants, expert_cache.WARPS)
    yield _one("experts sum", experts._sum_kernel, {"BLOCK": 512})


def _matrices(biased: bool) -> Types:
    """Of experts; absent tensors are replaced by the output."""
    return Matrix("*i32", "*i32", "*fp32", "*fp32" if biased else _ABSENT, "i32", "i32", "i32")


def _few(bits: int, kind: str, K: int, codes: str = "uniform", *, biased: bool = False) -> Specialization:
    """The product of a few rows."""
    form, summed = _form(bits, codes, tail=K % BLOCK // 32), kind == "down"
    choice = experts.Choice("*i32", "i32", "*fp32" if summed else _ABSENT)
    name = f"experts b{bits} {_of(codes)}{f'K{K} biased ' if biased else ''}{kind}"
    constants = {"SUMMED": summed, "form": form, "tile": gemv.tile_of(1, form)}
    return _few_rows(name, experts._few_kernel, constants, 1, {"matrix": _matrices(biased), "choice": choice})


def _of(codes: str) -> str:
    return "" if codes == "uniform" else f"{codes} "


def _many(
    bits: int, K: int, block_m: int, codes: str = "uniform", *, biased: bool = False, shared: bool = False
) -> Specialization:
    """The product of a prompt's rows; `shared`: biases are multiplied by shares, as those of `down` are."""
    name = f"experts b{bits} {_of(codes)}K{K} M{block_m}{' biased' if biased else ''}{' shares' if shared else ''}"
    constants = {"form": _form(bits, codes, tail=K % BLOCK // 32), **({} if shared else {"shares_ptr": None})}
    return _many_rows(name, experts._many_kernel, constants, block_m, types={"matrix": _matrices(biased)})


def _convolve() -> Iterator[Specialization]:
    """LFM2 1.2B's, without a bias and with one."""
    taps = recurrent.Taps(3, 4, 2048, RING, 2048 + 16)
    for name, bias in (("", _ABSENT), (" bias", "*fp32")):
        types = {"recent": recurrent.Recent("*fp32", "*fp32", bias)}
        constants = {"taps": taps, "BLOCK_C": recurrent.BLOCK_C}
        yield _one(f"convolution C2048{name}", recurrent._convolve_kernel, constants, types=types)
        types |= _ROTATED
        yield _one(f"convolution C2048{name} rotated", recurrent._convolve_kernel, constants, types=types)


def _delta_rule() -> Iterator[Specialization]:
    """What the delta rule reads of tokens, the rule itself by rows and by chunks, and what becomes of its outputs; the
    last without a norm, too."""
    for rule, bias, skip in ((_RULE, _ABSENT, _ABSENT), (_MAMBA, "*fp32", "*fp32")):
        types = {"recent": recurrent.Recent("*fp32", "*fp32", bias), "rates": recurrent.Rates("*fp32", "*fp32", skip)}
        yield from _rule(rule, types, skip)
    yield from (one for one in _rule(_BESIDE_ATTENTION, types, skip) if "finish" in one.name)


def _rule(rule: DeltaSpec, types: dict[str, Types], skip: str) -> Iterator[Specialization]:
    heads = delta_chunks.heads_of(rule, rule.value_dim)
    taps = recurrent.Taps(4, 4, rule.channels, RING, -(-rule.inputs // 16) * 16 + 16)
    name, both = f"H{rule.value_heads}/{rule.key_heads} D{rule.key_dim}", {"taps": taps, "heads": heads}
    yield _one(f"delta mix {name}", recurrent._mix_kernel, both, 1, types=types)
    constants: dict[str, Any] = {"heads": heads, "BLOCK_V": delta_chunks.BLOCK_V}
    rates = {"rates": types["rates"]}
    yield _one(f"delta {name}", recurrent._recur_kernel, constants, 1, types=rates)
    constants = {"heads": heads, "CAST": False}
    warps = delta_chunks.RELATE_WARPS
    yield _one(f"delta relate {name}", delta_chunks._relate_kernel, constants, warps, num_stages=1)
    constants = {**constants, "BLOCK_V": delta_chunks.BLOCK_V}
    for large, stages in (("", delta_chunks.FEW_STAGES), (" large card", delta_chunks.STAGES)):
        own = {"skip_ptr": skip}
        yield _one(f"delta chunk {name}{large}", delta_chunks._chunk_kernel, constants, 1, types=own, num_stages=stages)
    recent = {"recent": types["recent"], "gain_ptr": "*fp32" if rule.normed else _ABSENT}
    yield _one(f"delta finish {name}", recurrent._finish_kernel, both, 1, types=recent)
    yield _one(f"delta finish {name} rotated", recurrent._finish_kernel, both, 1, types={**recent, **_ROTATED})


_OPERATIONS: tuple[Callable[[], Iterator[Specialization]], ...] = (
    *(_attention, _cache, _compensate, _gate, _gemm, _gemv, _norm, _heads, _select, _activations, _residual_gemm),
    *(_w4a8, _route, _experts, _convolve, _delta_rule),
)


def specializations() -> dict[str, Specialization]:
    """Every specialization of every kernel by its name, which no two of them share."""
    found = [one for operation in _OPERATIONS for one in operation()]
    by_name = {one.name: one for one in found}
    assert len(by_name) == len(found), "two are called the same"
    return by_name
