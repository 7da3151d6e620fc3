"""Specializations of the Triton kernels that real models launch: a table of what to compile ahead of time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

from runtime.backends.triton.codes import Form, Matrix
from runtime.backends.triton.kernels import (
    compensate,
    gate,
    gemm,
    gemv,
    low_rank,
    norm,
    residual_gemm,
    rope,
    select,
    sums,
    tokens,
    union,
    w4a8,
)
from runtime.backends.triton.kernels.attention import kernel as attention
from runtime.backends.triton.kernels.attention.configs import Room, options
from runtime.backends.triton.kernels.cache import kernel as cache
from runtime.backends.triton.kernels.cache.pages import LayerTensors, Record, Rows, page_layout, record_layout
from runtime.backends.triton.sizes import BLOCK
from runtime.kv.kinds import KINDS, PARTS, KVKind
from tests.bench.kernels import expert_specializations, state_specializations
from tests.bench.kernels.specialization import Specialization, Types

_ABSENT = "constexpr"
"""The type of a tensor that isn't there."""
_MATRIX = Matrix("*i32", "*i32", "*fp16", "*fp32", "i32", "i32", "i32")
_SOURCE = select.Source("*fp16", _ABSENT, _ABSENT, _ABSENT)
_CHOSEN = select.Chosen("*i32", "*fp32", "*i32")
_SEARCH = select.Search("i32", "fp32", "fp32", "fp32")
_TOKENS = tokens.Operands("*i8", "*fp32", "*i32")
_RECORD = Record("*u8", "*fp16", "*i16")
_LAYER = LayerTensors(_RECORD, _RECORD, "*fp16", "*fp16", "*i32", "*i32")
_ROWS = Rows("*i32", "*i32")
_PROJECTED = rope.Projected("*fp32", "*fp32")
_SPACED = rope.Spaced(_PROJECTED, "i32")
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
_WIDE = {"H": 32, "H_kv": 4, "D": 512}
"""Of Gemma 4 31B's blocks without a window."""


def _types(**names: str) -> dict[str, Types]:
    """Types of arguments, from the names of all that have one: `_types(i32="M N")`."""
    return {name: kind for kind, all_names in names.items() for name in all_names.split()}


def _form(bits: int, *, codebook: bool = False, group_size: int = 128, tail: int = 0) -> Form:
    """The form of models' matrices: whole pieces; by default groups of 128 and whole blocks."""
    return Form(GROUP_SIZE=group_size, BITS=bits, CODEBOOK=codebook, SPAN=group_size, EVEN_K=True, TAIL=tail)


def _gemv() -> Iterator[Specialization]:
    """Groups of 128 at 3 and 4 bits, 576 and 2880 channels, a codebook, and a few tokens at once."""
    for name, form, M in (
        ("gemv b4", _form(4), 1),
        ("gemv b3", _form(3), 1),
        ("gemv b3 K576", _form(3, group_size=64, tail=2), 1),
        ("gemv b4 K2880", _form(4, tail=10), 1),
        ("gemv b3 K2880", _form(3, tail=10), 1),
        ("gemv b3 codebook", _form(3, codebook=True), 1),
        ("gemv b4 rows", _form(4), 8),
        ("gemv b3 rows", _form(3), 8),
    ):
        types = {"x_ptr": "*fp16", "matrix": _MATRIX, "counters_ptr": "*i32", **_types(i32="biased M split")}
        types |= dict.fromkeys(("out_ptr", "parts_ptr", *(() if form.CODEBOOK else ("sums_ptr",))), "*fp32")
        yield Specialization(
            name=name,
            kernel=gemv._gemv_kernel,
            types=types,
            constants={"form": form, "tile": gemv.tile_of(M, form)} | ({"sums_ptr": None} if form.CODEBOOK else {}),
            num_warps=gemv.WARPS,
            num_stages=1,
            weights=BLOCK * 64 // gemv.WARPS,
            options_of=partial(gemv.options, M, form),
        )


def _gemm() -> Iterator[Specialization]:
    """Prompts with groups of 128 at 3 and 4 bits, 576 and 2880 channels, a codebook; Hopper's taller tiles."""
    for name, form, block_m in (
        ("gemm b4", _form(4), gemm.BLOCK_M),
        ("gemm b3", _form(3), gemm.BLOCK_M),
        ("gemm b3 K576", _form(3, group_size=64, tail=2), gemm.BLOCK_M),
        ("gemm b4 K2880", _form(4, tail=10), gemm.BLOCK_M),
        ("gemm b3 codebook", _form(3, codebook=True), gemm.BLOCK_M),
        ("gemm b4 tall", _form(4), gemm.TALL),
        ("gemm b3 tall", _form(3), gemm.TALL),
    ):
        yield Specialization(
            name=name,
            kernel=gemm._gemm_kernel,
            types={"x_ptr": "*fp16", "matrix": _MATRIX, "out_ptr": "*fp32", **_types(i32="biased M")},
            constants={"form": form, "tile": gemm.Tile(gemm.DOT, block_m, gemm.BLOCK_N, gemm.WARPS)},
            num_warps=gemm.WARPS,
            num_stages=gemm.STAGES,
            weights=BLOCK * gemm.BLOCK_N // gemm.WARPS,
            only=gemm.HOPPER if block_m == gemm.TALL else None,
        )


def _w4a8() -> Iterator[Specialization]:
    """Groups of 128 and none, few and many rows."""
    for name, group_size in (("g128", 128), ("per channel", 0)):
        for block_m in (w4a8.FEW, w4a8.MANY):
            matrix = w4a8.Matrix("*u8", "*fp16", "*i16", "*fp32", "i32", "i32")
            yield Specialization(
                name=f"gemm w4a8 {name} M{block_m}",
                kernel=w4a8._gemm_w4a8_kernel,
                types={
                    "x": _TOKENS,
                    "matrix": matrix,
                    "out_ptr": "*fp32",
                    **dict.fromkeys(("parts_ptr", "counters_ptr"), "*i32"),
                    **_types(i32="biased M split"),
                },
                constants={"form": w4a8._form(group_size, block_m)},
                num_warps=w4a8.WARPS,
                num_stages=w4a8.STAGES,
                weights=2 * 64 * w4a8.BLOCK_N // w4a8.WARPS,
                options=_ROUNDED,
            )


def _select() -> Iterator[Specialization]:
    """All four selectors; widths and k are run-time numbers."""
    sources = {"static": _SOURCE._replace(table="*i32"), "random": _SOURCE._replace(positions="*i32")}
    for mode, number in select.MODES.items():
        yield Specialization(
            name=f"select-{mode}",
            kernel=select._select_kernel,
            types={
                "source": sources.get(mode, _SOURCE),
                "chosen": _CHOSEN,
                "search": _SEARCH,
                "stream": "i64" if mode == "random" else "i32",
                **_types(i32="k k_chunk"),
            },
            constants={"MODE": number},
            num_warps=select.NUM_WARPS,
        )


def _compensate() -> Iterator[Specialization]:
    """Fused at 4 and 2 bits, two launches at 4 and 16 bits; widths, k and n_tb are run-time numbers."""
    output = compensate.Output("*fp32", _ABSENT)
    for bits in (4, 2):
        yield Specialization(
            name=f"compensate-b{bits}-fused",
            kernel=compensate._compensate_kernel,
            types={
                "source": _SOURCE,
                "chosen": _CHOSEN,
                "search": _SEARCH,
                "residual": compensate.Residual("*i32", "*fp16"),
                "output": output,
                "counters_ptr": "*i32",
                **_types(i32="k k_chunk stream N lines"),
            },
            constants={"fetch": compensate.Fetch(MODE=select.MODES["approx"], BITS=bits)},
            num_warps=select.NUM_WARPS,
            cooperative=True,
            options=compensate.STOPS,
        )
    for bits in (4, 16):
        yield Specialization(
            name=f"compensate-b{bits}-fetch",
            kernel=compensate._fetch_kernel,
            types={
                "chosen": _CHOSEN._replace(flag=_ABSENT),
                "residual": compensate.Residual("*i32", _ABSENT if bits == 16 else "*fp16"),
                "output": output,
                **_types(i32="k N lines"),
            },
            constants={"fetch": compensate.Fetch(BITS=bits)},
            num_warps=select.NUM_WARPS,
        )


def _union() -> Iterator[Specialization]:
    """The list of channels, and the copy."""
    yield Specialization(
        name="union",
        kernel=union._union_kernel,
        types=dict.fromkeys(("chosen_ptr", "places_ptr", "channels_ptr", "counts_ptr"), "*i32")
        | _types(i32="M K k k_chunk room"),
        num_warps=union.WARPS,
    )
    yield Specialization(
        name="union copy",
        kernel=union._copy_kernel,
        types=dict.fromkeys(("codes_ptr", "channels_ptr", "counts_ptr", "copied_ptr"), "*i32")
        | _types(i32="room words"),
        constants={"BLOCK": union.WORDS, "DEPTH": union.DEPTH},
        num_warps=union.COPY_WARPS,
    )


def _residual_gemm() -> Iterator[Specialization]:
    """The fetch, and the product at 4 bits of some channels and of all."""
    yield Specialization(
        name="residual_gemm fetch",
        kernel=residual_gemm._stage_kernel,
        types=dict.fromkeys(("codes_ptr", "channels_ptr", "staged_ptr"), "*i32") | _types(i32="k words"),
        constants={"BLOCK": residual_gemm._WORDS, "DEPTH": residual_gemm._DEPTH},
        num_warps=residual_gemm._FETCH_WARPS,
    )
    for name, every in (("residual_gemm b4", False), ("residual_gemm b4 all", True)):
        factors = residual_gemm.Factors("*fp16", _ABSENT if every else "*i32", "*i32", "*fp16")
        yield Specialization(
            name=name,
            kernel=residual_gemm._multiply_kernel,
            types={"factors": factors, "out_ptr": "*fp32", **_types(i32="M N K k words")},
            constants={"form": residual_gemm.Form(BITS=4, ALL=every)},
            num_warps=residual_gemm.WARPS,
            num_stages=residual_gemm.STAGES,
        )


def _sums() -> Iterator[Specialization]:
    yield Specialization(
        name="sums",
        kernel=sums._sums_kernel,
        types={"x_ptr": "*fp16", "sums_ptr": "*fp32", "K": "i32"},
        constants={"BLOCK_K": sums.BLOCK_K},
    )


def _round() -> Iterator[Specialization]:
    """Attention's output of 4096 channels."""
    shape, warps = tokens.rounding_shape(4096, 128)
    yield Specialization(
        name="tokens K4096",
        kernel=tokens._round_kernel,
        types={"x_ptr": "*fp16", "tokens": _TOKENS},
        constants={"K": 4096, "shape": shape},
        num_warps=warps,
        options=_ROUNDED,
    )


def _norm() -> Iterator[Specialization]:
    """Norms of 2880, 4096 and 5120 channels, padded to 4096 and 8192; also rounded to INT8, and on both sides; of 2816
    channels with experts beside an MLP."""
    types: dict[str, object] = dict.fromkeys(("h_ptr", "y_ptr", "dec_ptr"), "*fp32") | {"index_ptr": "*i32"}
    types |= {"table_ptr": "*fp16", "x_ptr": "*fp16", "given": "i32"}
    before = norm.RowNorms("*fp32", "fp32", _ABSENT, "fp32", _ABSENT, _ABSENT)
    both = before._replace(added="*fp32")
    block, warps = norm._shape(5120)
    yield Specialization(
        name="add_norm C5120 both",
        kernel=norm._add_norm_kernel,
        types={**types, "norms": both, "sums_ptr": "*fp32"},
        constants={"C": 5120, "BLOCK_C": block},
        num_warps=warps,
    )
    block, warps = norm._shape(2816)
    beside = norm.Beside("*fp32", "*fp32", "*fp32", "*fp32")
    yield Specialization(
        name="add_norm C2816 beside",
        kernel=norm._add_norm_kernel,
        types={**types, "norms": both._replace(beside=beside, scale="*fp32"), "sums_ptr": "*fp32"},
        constants={"C": 2816, "BLOCK_C": block},
        num_warps=warps,
    )
    types["norms"] = before
    for channels, of_int8 in ((2880, False), (4096, True), (5120, True)):
        block, warps = norm._shape(channels)
        yield Specialization(
            name=f"add_norm C{channels}",
            kernel=norm._add_norm_kernel,
            types={**types, "sums_ptr": "*fp32"},
            constants={"C": channels, "BLOCK_C": block},
            num_warps=warps,
        )
        if not of_int8:
            continue
        shape, warps = tokens.rounding_shape(channels, 128)
        yield Specialization(
            name=f"add_norm C{channels} int8",
            kernel=norm._add_norm_round_kernel,
            types={**types, "tokens": _TOKENS},
            constants={"C": channels, "shape": shape},
            num_warps=warps,
            options=_ROUNDED,
        )


def _gate() -> Iterator[Specialization]:
    """Llama-3-8B's MLP, with compensation; gpt-oss-20b's experts; Gemma 4 E2B's embeddings of the blocks' own."""
    types = {"y_ptr": "*fp32", "dec_ptr": "*fp32", "x_ptr": "*fp16", "given": "i32"}
    for name, gelu in (("gate I14336", False), ("gate I14336 gelu", True)):
        yield Specialization(
            name=name,
            kernel=gate._gate_kernel,
            types={**types, "sums_ptr": "*fp32"},
            constants={"WIDTH": 14336, "BLOCK_I": gate.BLOCK_I, "GELU": gelu, "LIMIT": 0.0, "factors_ptr": None},
        )
    yield Specialization(
        name="gate I2880 clamped",
        kernel=gate._gate_kernel,
        types={**types, "sums_ptr": "*fp32", "factors_ptr": "*fp32"},
        constants={"WIDTH": 2880, "BLOCK_I": gate.BLOCK_I, "GELU": False, "LIMIT": 7.0},
    )
    yield Specialization(
        name="gate P256",
        kernel=gate._token_gate_kernel,
        types={
            **dict.fromkeys(("gates", "context"), _PROJECTED),
            "tokens": gate.OwnTokens("*fp16", "i32", "*fp32", "fp32"),
            "x_ptr": "*fp16",
            "sums_ptr": "*fp32",
            "given": "i32",
        },
        constants={"WIDTH": 256, "BLOCK_I": 256, "GELU": True, "LIMIT": 0.0},
        num_warps=gate.token_warps(256),
    )
    shape, warps = tokens.rounding_shape(14336, 128)
    yield Specialization(
        name="gate I14336 int8",
        kernel=gate._gate_round_kernel,
        types={**types, "tokens": _TOKENS},
        constants={"WIDTH": 14336, "shape": shape, "GELU": False, "LIMIT": 0.0},
        num_warps=warps,
        options=_ROUNDED,
    )


def _heads() -> Iterator[Specialization]:
    """Llama-3-8B's heads, Qwen3-8B's with norms, heads of 96 channels of which 72 rotate, norms of all heads together
    and of turned heads, gpt-oss-20b's heads, Qwen3.5 4B's, Gemma 4's with norms of values; all with compensation."""
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
    )
    for kv, sizes, half, normed in cases:
        weight, turned = ("*fp32" if there else _ABSENT for there in (normed, KINDS[kv].turned))
        growth = "*fp32" if normed == " norm of turned" else _ABSENT
        shape = rope._shape(*sizes.values(), half)
        yield Specialization(
            name=f"heads {kv} {_heads_name(**sizes)} r{2 * half}{normed}",
            kernel=rope._heads_kernel,
            types={
                "projected": _SPACED,
                "norms": rope.HeadNorms(weight, weight, "fp32", "fp32" if normed == " norm of values" else _ABSENT),
                "rope": rope.Rope("*fp32", "*fp32", growth),
                "basis": rope.Basis(turned, turned),
                "rows": _ROWS,
                "layer": _LAYER,
                "q_ptr": "*fp16",
                **_types(i32="compensated stride per_slot"),
            },
            constants={
                "shape": shape._replace(WIDE=normed == " norm of all", LAST=normed == " norm of turned"),
                "layout": page_layout(KINDS[kv], sizes["D"], window=KINDS[kv].window_capacity(128)),
            },
            num_warps=1,
        )


def _heads_name(H: int, H_kv: int, D: int) -> str:
    return f"H{H}/{H_kv} D{D}"


def _attention() -> Iterator[Specialization]:
    """Decode of Llama-3-8B at 8192 positions over many kinds of cache, other shapes, drafts, verification, prefill;
    Gemma 2 9B's soft caps and windows; gpt-oss-20b's windows; Qwen3.5 4B's and LFM2 1.2B's heads; heads of 512 channels
    as Gemma 4 31B has over many kinds of cache."""
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
    ):
        for name in kinds:
            yield _attend(use, name, M, **sizes)
    for use, M in (("decode", 1), ("verify", 5), ("prefill", 128)):
        yield _attend(use, "int4", M, **_GEMMA, cap=50.0)
        yield _attend(use, "int4", M, **_OSS, sliding=True)
        yield _attend(use, "int4", M, **_QWEN35)
        yield _attend(use, "int4", M, **{**_LLAMA, "D": 64})
    for H, H_kv, D, sinks, gates in (
        (32, 8, 128, _ABSENT, _ABSENT),
        (16, 8, 256, _ABSENT, _ABSENT),
        (16, 4, 256, _ABSENT, _SPACED),
        (32, 4, 512, _ABSENT, _ABSENT),
        (64, 8, 64, "*fp32", _ABSENT),
        (16, 8, 8, _ABSENT, _ABSENT),
    ):
        more = f"{'' if sinks == _ABSENT else ' sinks'}{'' if gates == _ABSENT else ' gates'}"
        yield Specialization(
            name=f"attend merge {_heads_name(H, H_kv, D)}{more}",
            kernel=attention._merge_kernel,
            types={
                "merged": attention.Merged("*fp32", "*i32", "*fp16", "*fp32"),
                "sinks_ptr": sinks,
                "gates": gates,
                **_types(i32="given M splits rows"),
            },
            constants={"H": H, "D": D, "BLOCK_S": attention._MERGED},
            num_warps=attention._MERGE_WARPS,
        )


def _attend(
    use: str, name: str, M: int, H: int, H_kv: int, D: int, *, cap: float | None = None, sliding: bool = False
) -> Specialization:
    """One specialization of the attention kernel; those with a cap have a window, too."""
    kind, draft = KINDS[name], use == "draft"
    config = attention._config(kind, M, H, H_kv, D, 8192, draft=draft, room=Room())
    special = " cap" if cap is not None else " window" if sliding else ""
    return Specialization(
        name=f"attend {name} {use} {_heads_name(H, H_kv, D)}{special}",
        kernel=attention._attend_kernel,
        types={
            "step": attention.Step("*fp16", _ROWS, "*fp32", "*i32"),
            "layer": _LAYER,
            "scale": "fp32",
            **_types(i32="M splits stride per_slot window"),
        },
        constants={
            "tile": attention._tile(H, H_kv, config, sliding=sliding or cap is not None, cap=cap),
            "layout": page_layout(kind, D, window=kind.window_capacity(128), draft=draft),
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        options_of=partial(options, config),
    )


def _flush() -> Iterator[Specialization]:
    """The kinds of cache with a window, with heads of 128 and of 512 channels."""
    for kind, D in itertools.product((KINDS[name] for name in ("int4", "hierarchical", "kivi2")), (128, 512)):
        keys, values = (cache._cut(kind, record_layout(kind, part, D)) for part in PARTS)
        yield Specialization(
            name=f"flush {kind.name} D{D}",
            kernel=cache._flush_kernel,
            types={
                **dict.fromkeys(("k_window", "v_window"), "*fp16"),
                **dict.fromkeys(("k_records", "v_records"), _RECORD),
                "number": "i32",
            },
            constants={"WINDOW": kind.window_capacity(128), "SINKS": kind.sinks, "keys": keys, "values": values},
            num_warps=cache._WARPS,
        )


def _low_rank() -> Iterator[Specialization]:
    """Pages of 128 tokens, heads of 128 and of 96 channels."""
    for D in (128, 96):
        shape, warps = low_rank._shape(128, D, 4)
        yield Specialization(
            name=f"low_rank D{D}",
            kernel=low_rank._low_rank_kernel,
            types={
                **dict.fromkeys(("residual_ptr", "start_ptr"), "*fp32"),
                **dict.fromkeys(("a_ptr", "b_ptr"), "*fp16"),
                "rounds": "i32",
                "alike": "fp32",
            },
            constants={"shape": shape},
            num_warps=warps,
        )


_OPERATIONS: tuple[Callable[[], Iterator[Specialization]], ...] = (
    *(_attention, _flush, _compensate, _gate, _gemm, _gemv, _low_rank),
    *(_norm, _heads, _select, _sums, _residual_gemm, _round, _union, _w4a8),
    *(expert_specializations.route, expert_specializations.group, expert_specializations.products),
    *(expert_specializations.residuals, state_specializations.convolve, state_specializations.recur),
)


def specializations() -> dict[str, Specialization]:
    """Every specialization of every kernel by its name, which no two of them share."""
    found = [one for operation in _OPERATIONS for one in operation()]
    by_name = {one.name: one for one in found}
    if len(by_name) < len(found):
        twice = next(name for name in by_name if sum(one.name == name for one in found) > 1)
        raise ValueError(f"two kernel specializations are called {twice!r}; give each its own name")
    return by_name
