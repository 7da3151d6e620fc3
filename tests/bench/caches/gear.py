"""GEAR's corrections on real keys and values: the error of each step, and of the power iteration beside the SVD."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from runtime.backends.operations.basis import to_basis
from runtime.backends.reference.decoder import bases_of
from runtime.kv.kinds import KINDS, LOW_RANK, PARTS, CacheKind, KVKind, Part, page_fields
from runtime.kv.oracle import correction
from runtime.kv.oracle.page import Stored, dequantize, quantize
from tests.bench.caches.full import PAGE, keys_and_values
from tests.bench.caches.laboratory import Laboratory
from tests.bench.reporting.results import digest

STEPS: dict[int, tuple[KVKind, KVKind, KVKind]] = {4: ("kcvt4", "gear-l4", "gear4"), 2: ("kivi2", "gear-l2", "gear2")}
"""The backbone, with its low-rank correction, and with outliers too, by bits."""
KINDS_SHOWN: tuple[KVKind, ...] = ("int8", "hierarchical", "int4", *STEPS[4], *STEPS[2])
"""Kinds whose errors are measured."""
TOKENS = 2048
"""Tokens whose keys and values are looked at."""
PAPER: dict[int, tuple[tuple[int, int], ...]] = {4: ((1024, 4), (20, 2)), 2: ((1024, 4), (64, 2))}
"""Tokens that the paper compresses together, and the rank of their correction, by bits: a prompt, and what comes after
it, a buffer at a time (GEAR §4.1; n = 1024 as in §3)."""
_OURS = (PAGE, LOW_RANK)


def measure(laboratory: Laboratory) -> None:
    """Measure what is missing for one model."""
    tokens = laboratory.tokens[:TOKENS]
    identity = {"source": laboratory.source, "text": digest(tokens), "kinds": KINDS_SHOWN}
    laboratory.notebook.known("gear", identity, laboratory.notebook.codes.storing, lambda: _errors(laboratory, tokens))


def pages(laboratory: Laboratory, tokens: list[int]) -> dict[Part, torch.Tensor]:
    """Keys and values of whole pages, in half precision: float32 [layers, pages, H_kv, 128, D].

    Keys stand in the basis of the kinds of few bits, which is where the steps of GEAR are taken.
    """
    length = laboratory.checkpoint.spec.max_context // PAGE * PAGE
    found: dict[Part, list[torch.Tensor]] = {part: [] for part in PARTS}
    for start in range(0, len(tokens) - PAGE + 1, length):
        held = keys_and_values(laboratory.checkpoint, tokens[start : start + length])
        for part in PARTS:
            whole = held[part][:, : held[part].shape[1] // PAGE * PAGE]
            found[part].append(whole.unflatten(1, (-1, PAGE)).transpose(2, 3))
    both = {part: torch.cat(each, 1) for part, each in found.items()}
    for layer, (reflection, mean) in enumerate(bases_of(KINDS[STEPS[4][0]], laboratory.low_bit())):
        keys = both["keys"][layer].transpose(1, 2)  # [pages, 128, H_kv, D]
        turned = to_basis(keys.flatten(0, 1), reflection) - mean
        both["keys"][layer] = turned.view(keys.shape).transpose(1, 2).half().float()
    return both


def _errors(laboratory: Laboratory, tokens: list[int]) -> dict[str, Any]:
    laboratory.notebook.tell(f"{laboratory.case.name}: errors of keys and values")
    held = pages(laboratory, tokens)
    D = laboratory.checkpoint.spec.head_dim
    errors = {name: {part: round(_error(name, part, held[part], D), 6) for part in PARTS} for name in KINDS_SHOWN}
    iteration = {
        str(bits): {part: _beside_svd(names[1], part, held[part], D) for part in PARTS} for bits, names in STEPS.items()
    }
    count = held["keys"].shape[1] * PAGE
    return {
        "model": laboratory.case.name,
        "head_dim": D,
        "tokens": count,
        "errors": errors,
        "parts": {
            str(bits): {part: _parts(names[2], part, held[part], D) for part in PARTS} for bits, names in STEPS.items()
        },
        "iteration": iteration,
        "paper": {str(bits): [_as_paper(bits, *one, held, D) for one in (*PAPER[bits], _OURS)] for bits in STEPS},
    }


def _as_paper(bits: int, tokens: int, rank: int, held: Mapping[Part, torch.Tensor], D: int) -> dict[str, Any]:
    """Errors where so many tokens share a correction of some rank, and what that takes, in percent of half precision.

    Pages [layers, pages, H_kv, 128, D] are taken apart or put together; tokens that fill no whole group are left out.
    """
    kind = replace(KINDS[STEPS[bits][2]], page=tokens, rank=rank)
    errors = {}
    for part, pages in held.items():
        whole = pages.transpose(1, 2).flatten(2, 3)  # [layers, H_kv, T, D]
        groups = whole[:, :, : whole.shape[2] // tokens * tokens].unflatten(2, (-1, tokens))
        errors[part] = round(_relative(kind, part, groups, D), 6)
    held_bytes = sum(field.nbytes for part in PARTS for field in page_fields(kind, part, D))
    return {"tokens": tokens, "rank": rank, **errors, "bytes": round(100 * held_bytes / (4 * tokens * D), 2)}


def _error(name: KVKind, part: Part, x: torch.Tensor, D: int) -> float:
    return _relative(KINDS[name], part, x, D)


def _relative(kind: CacheKind, part: Part, x: torch.Tensor, D: int) -> float:
    """Root mean square of what is lost over that of what was there."""
    return float((dequantize(kind, part, quantize(kind, part, x), D) - x).norm() / x.norm())


def _parts(name: KVKind, part: Part, x: torch.Tensor, D: int) -> list[float]:
    """Errors of one kind's own pages read as D^, as D^ + L and as D^ + L + S."""
    kind = KINDS[name]
    stored = quantize(kind, part, x)
    read = []
    for left_out in (("a", "b", "indices", "outliers"), ("indices", "outliers"), ()):
        some: Stored = {field: array for field, array in stored.items() if field not in left_out}
        read.append(round(float((dequantize(kind, part, some, D) - x).norm() / x.norm()), 6))
    return read


def _beside_svd(name: KVKind, part: Part, x: torch.Tensor, D: int) -> dict[str, float]:
    """What the low-rank correction leaves over what the best of its rank would: mean and worst of all heads' pages.

    Both are measured as the correction measures: of keys, what all channels have alike counts more.
    """
    kind = KINDS[name]
    stored = quantize(kind, part, x)
    backbone = {field: array for field, array in stored.items() if field not in ("a", "b")}
    residual = x - dequantize(kind, part, backbone, D)
    more = (1 + kind.alike(part)) ** 0.5 - 1
    left, residual = (
        y + more * y.mean(-1, keepdim=True) for y in (residual - correction.product(stored["a"], stored["b"]), residual)
    )
    left = left.flatten(-2).norm(dim=-1)
    best = torch.linalg.svdvals(residual)[..., min(kind.rank, D) :].norm(dim=-1)
    ratio = (left / best)[best > 0]
    return {"mean": round(float(ratio.mean()), 5), "worst": round(float(ratio.max()), 5)}
