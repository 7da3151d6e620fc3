"""The cause of rotation's cost: 4-bit rounding errors of layers with folded norms, rotated or not.

A rotation of the residual stream needs the norms' weights in the matrices that follow. Norms suppress the stream's
largest channels. Folded, that is done by small weights, which share a group with large ones and have their rounding
errors, while the activations that they meet are large again; a rotation spreads both and changes nothing about it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

import numpy as np
import torch

from models.checkpoint import Checkpoint
from models.hadamard import rotation
from models.oracle import Oracle
from tests.bench.reporting.cases import Case

NORMS = {"qkv": "input_norm", "gate_up": "post_norm"}
"""The layers behind norms, and the norm before each."""
BLOCKS = (1, 8, 15, 22, 28)
APART = 64
"""Channels of the stream that the last way leaves alone."""
_LAST_WAY = f"{APART} largest channels of the stream apart and not folded, the rest folded, random orthogonal"
_TOKENS, _ROWS, _GROUP, _LARGEST = 160, 384, 128, 4
FACTS = ("correlation", "stream", "behind")
"""Of norms: see `_suppressed`."""
Errors = Mapping[str, float]
"""By the way a layer is prepared: squared error of its outputs, relative to the outputs."""


def rounded(weight: torch.Tensor, group: int = _GROUP) -> torch.Tensor:
    """A matrix rounded to the nearest of 16 numbers in each group of a row's channels."""
    parts = []
    for part in weight.split(group, dim=1):
        low, high = part.amin(1, keepdim=True).clamp(max=0), part.amax(1, keepdim=True).clamp(min=0)
        step = ((high - low) / 15).clamp(min=1e-9)
        zero = torch.round(-low / step)
        parts.append((torch.clamp(torch.round(part / step) + zero, 0, 15) - zero) * step)
    return torch.cat(parts, dim=1)


def error(weight: torch.Tensor, x: torch.Tensor) -> float:
    """Squared error of x @ weight.T, relative to it, when the weight is rounded."""
    exact = x @ weight.T
    return float((x @ rounded(weight).T - exact).square().sum() / exact.square().sum())


def errors_of(weight: torch.Tensor, norm: torch.Tensor, x: torch.Tensor) -> Errors:
    """What rounding loses by the way a layer is prepared; all compute the same before it.

    Args:
        weight: float32 [N, K].
        norm: float32 [K], weights of the norm before it.
        x: float32 [S, K], the layer's inputs, the norm's weights in them.
    """
    K, folded, stream = len(norm), weight * norm, x / norm
    turn, generator = rotation(K), torch.Generator().manual_seed(0)
    random = torch.linalg.qr(torch.randn(K, K, generator=generator))[0]
    order = stream.square().mean(0).argsort(descending=True)
    apart, rest = order[:APART], order[APART:]
    part = torch.linalg.qr(torch.randn(len(rest), len(rest), generator=generator))[0]
    parted = torch.cat((folded[:, rest] @ part, weight[:, apart]), 1)
    return {
        "as it is": error(weight, x),
        "norm folded": error(folded, stream),
        "norm folded, Hadamard": error(turn(folded), turn(stream)),
        "norm folded, random orthogonal": error(folded @ random, stream @ random),
        "not folded, Hadamard": error(turn(weight), turn(x)),
        _LAST_WAY: error(parted, torch.cat((stream[:, rest] @ part, x[:, apart]), 1)),
    }


def measured(case: Case) -> Iterator[tuple[str, Errors]]:
    """Each kind of layer behind a norm, with means over `BLOCKS`, and two facts about the norm."""
    checkpoint, seen = Checkpoint.open(case.folder), {}
    observed = Oracle(checkpoint, observe=lambda name, x: seen.update({name: x[0, 1:].float()}))
    observed.logits(torch.tensor([case.text(_TOKENS)]), rows=[-1])
    for kind, norm_name in NORMS.items():
        found: list[Errors] = []
        facts: list[tuple[float, float, float]] = []
        for block in BLOCKS:
            norm = checkpoint.vector(f"layers.{block}.{norm_name}").float()
            x = seen[f"layers.{block}.{kind}"]
            found.append(errors_of(checkpoint.linear(f"layers.{block}.{kind}")[0].float()[:_ROWS], norm, x))
            facts.append(_suppressed(norm, x))
        means = {way: fmean(own[way] for own in found) for way in found[0]}
        yield kind, {**means, **_named(facts)}


def _suppressed(norm: torch.Tensor, x: torch.Tensor) -> tuple[float, float, float]:
    """How the norm's weights go with the stream's channels, and the energy of the largest before and behind them."""
    stream, own = (x / norm).square().mean(0), x.square().mean(0)
    largest = stream.argsort(descending=True)[:_LARGEST]
    together = np.corrcoef(norm.abs().clamp(min=1e-6).log().numpy(), stream.log().numpy())[0, 1]
    return float(together), float(stream[largest].sum() / stream.sum()), float(own[largest].sum() / own.sum())


def _named(facts: Sequence[tuple[float, float, float]]) -> Errors:
    return {name: fmean(values) for name, values in zip(FACTS, zip(*facts, strict=True), strict=True)}
