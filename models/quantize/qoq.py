"""QoQ's steps for a block before it is rounded, in the paper's order; each leaves what the full model computes.

1. The residual stream was rotated before (`models.quantize.rotated`), norms folded into what reads it.
2. The MLP's channels are sorted by the largest magnitude of their activations, so that channels of similar salience
   share a group of `down`. Channels of the stream cannot be sorted block by block, for all blocks share them, and after
   the rotation they are alike; those of `o` belong to heads, which groups hold as a whole or cut the same way.
3. SmoothAttention (`models.quantize.scales`).
4. The inputs of `o` and `down` are divided by λ = max|X|^α / max|W|^(1 - α), which the weights are multiplied with. α
   is searched near 0, where λ evens out the weights; no smoothing competes.
5. Clipping. Of most matrices the quantizer searches it by the layer's output error; of q and k it is searched here, a
   ratio for each head, by what reaches the block's output through `o`.

Source: QServe §3.2, App. B.2 (Figs. 14 to 16, B.2.4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from models import per_token
from models.oracle import Oracle
from models.quantize.lowered import fast_products
from models.quantize.scales import SMALLEST_SHARE, sample, smooth_attention
from models.quantize.streams import OBSERVED, Batches, Streams
from models.quantize.working import WorkingBlock, scalable, sources
from models.quantizers import progressive
from models.quantizers.groups import FloatArray
from models.quantizers.progressive import Rounding
from models.recipe import Recipe

STRENGTHS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
"""Values of α that are tried."""
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)
"""Clip ratios of q and k that are tried."""
_TOKENS = 512
"""Activations by which a smoothing is judged."""

Watch = Callable[[], None]


def prepare(working: WorkingBlock, streams: Streams, recipe: Recipe, watch: Watch) -> FloatArray | None:
    """Do a recipe's steps to a block.

    Returns:
        Clip ratios of the rows of `qkv`, float32 [N], NaN for v; None where nothing is clipped.
    """
    batches = streams.calibration[::OBSERVED]
    mlp = working.layer not in working.spec.bare
    if recipe.reorder and mlp:
        magnitude = _inputs(working, batches)["down"].abs().amax(0)
        working.reorder(np.argsort(-magnitude.numpy(), kind="stable"))
        watch()
    attends = working.spec.mixer(working.layer) == "attention"
    if recipe.smooth_attention and attends:
        smooth_attention(working, streams.largest_keys(working, working.layer, watch))
    if recipe.smooth_outputs:
        seen = _inputs(working, batches)
        for kind in ("o", *(("down",) if mlp and scalable(working.spec, "down") else ())):
            working.scale_inputs(kind, smoothing(working, kind, seen[kind], recipe))
            watch()
    return clip_heads(working, batches, recipe, watch) if recipe.clip and attends else None


def _inputs(working: WorkingBlock, batches: Batches) -> dict[str, torch.Tensor]:
    """Activations float32 [T, K] before each linear layer of a block, by its kind."""
    found: dict[str, list[torch.Tensor]] = {}
    oracle = Oracle(
        working,
        resident=False,
        observe=lambda name, x: found.setdefault(name.rpartition(".")[2], []).append(x.flatten(0, -2)),
    )
    with fast_products(working.spec):
        for x in batches:
            oracle.block(working.layer, x)
    return {kind: torch.cat(parts) for kind, parts in found.items()}


def smoothing(working: WorkingBlock, kind: str, x: torch.Tensor, recipe: Recipe) -> FloatArray:
    """Divisors for the inputs of `o` or `down` that make the layer's output error least.

    Args:
        working: The block.
        kind: `o` or `down`.
        x: float32 [T, K], inputs.
        recipe: How the layer will be rounded.

    Returns:
        float32 [K], positive; ones where nothing is better. Inputs that come from one channel of v have the same.
    """
    weight = working.linear(f"layers.{working.layer}.{kind}")[0]
    rows, width = weight.shape
    seen = x[:: max(1, len(x) // _TOKENS)]
    part = weight[torch.from_numpy(sample(rows, width))]
    exact = seen @ part.T
    tied = sources(working.spec, f"layers.{working.layer}.{kind}")
    best, least = np.ones(width, np.float32), np.inf
    for scales in _candidates(x.abs().amax(0).numpy(), weight.abs().amax(0).numpy(), tied):
        factors = torch.from_numpy(scales)
        low = _rounded((part * factors).numpy(), recipe, None)
        loss = float((per_token.rounded(seen / factors) @ low.T - exact).square().sum())
        if loss < least:
            best, least = scales, loss
    return best


def _candidates(inputs: FloatArray, weights: FloatArray, tied: npt.NDArray[np.intp]) -> Iterator[FloatArray]:
    """The λ to try, none first, float32 [K] each, the largest times the smallest being 1."""
    yield np.ones(len(inputs), np.float32)
    evened = []
    for values in (inputs, weights):
        most = np.zeros(tied.max(initial=0) + 1)
        np.maximum.at(most, tied, values)
        shared = most[tied]
        evened.append(np.maximum(shared, SMALLEST_SHARE * (shared.mean() or 1.0)))
    for strength in STRENGTHS:
        scales = evened[0] ** strength / evened[1] ** (1 - strength)
        yield (scales / np.sqrt(scales.max() * scales.min())).astype(np.float32)


def _rounded(weight: FloatArray, recipe: Recipe, clips: FloatArray | None) -> torch.Tensor:
    """Ŵ of some rows, with ranges cut as `clips` says or not at all."""
    how = Rounding(two_levels=recipe.progressive, clip=False, clips=clips)
    found = progressive.quantize(weight, recipe.group_of(weight.shape[1]), None, how)
    return torch.from_numpy(found.dequantize())


def clip_heads(working: WorkingBlock, batches: Batches, recipe: Recipe, watch: Watch) -> FloatArray:
    """Clip ratios of q and k, one for each head, by the error of the block's output; the rows of v have none.

    Args:
        working: The block.
        batches: float32 [B, S, C], inputs of the block.
        recipe: How the matrix will be rounded.
        watch: Called after each ratio; may raise to stop.

    Returns:
        float32 [N], NaN for the rows of v.
    """
    spec = working.spec
    weight, _ = working.linear(f"layers.{working.layer}.qkv")
    clips = np.full(len(weight), np.nan, np.float32)
    through = _products(working)
    exact = _attended(working, batches, weight)
    for heads, begin in ((spec.num_heads, 0), (spec.num_kv_heads, spec.q_width)):
        own, losses = slice(begin, begin + heads * spec.head_dim), []
        for ratio in CLIPS:
            low = weight.clone()
            cut = np.full(own.stop - own.start, ratio, np.float32)
            low[own] = _rounded(weight[own].numpy(), recipe, cut)
            losses.append(_loss(_attended(working, batches, low), exact, through).reshape(heads, -1).sum(1))
            watch()
        best = torch.stack(losses).argmin(0).tolist()
        clips[own] = np.repeat([CLIPS[index] for index in best], spec.head_dim)
    return clips


def _products(working: WorkingBlock) -> torch.Tensor:
    """OᵀO of each query head's part of `o`, float32 [H, D, D]."""
    spec = working.spec
    weight, _ = working.linear(f"layers.{working.layer}.o")
    parts = weight.reshape(len(weight), spec.num_heads, spec.head_dim).transpose(0, 1)  # [H, C, D]
    return parts.mT @ parts


def _attended(working: WorkingBlock, batches: Batches, weight: torch.Tensor) -> Sequence[torch.Tensor]:
    """What attention gives to `o`, float32 [B, S, K] for each batch, if `qkv` had another weight."""
    spec, prefix, found = working.spec, f"layers.{working.layer}", []
    _, bias = working.linear(f"{prefix}.qkv")

    def observe(name: str, x: torch.Tensor) -> None:
        if name == f"{prefix}.o":
            found.append(x)

    oracle = Oracle(working, resident=False, observe=observe)
    oracle.replace = {
        f"{prefix}.qkv": lambda x: torch.nn.functional.linear(x, weight, bias),
        f"{prefix}.gate_up": lambda x: x.new_zeros(*x.shape[:-1], spec.mlp_parts * spec.intermediate_size),
        f"{prefix}.down": lambda x: x.new_zeros(*x.shape[:-1], spec.hidden_size),
    }
    with fast_products(working.spec):
        for x in batches:
            oracle.block(working.layer, x)
    return found


def _loss(low: Sequence[torch.Tensor], exact: Sequence[torch.Tensor], through: torch.Tensor) -> torch.Tensor:
    """Squared error that each query head hands on through `o`, float32 [H]."""
    heads, dim, _ = through.shape
    total = torch.zeros(heads)
    for one, other in zip(low, exact, strict=True):
        error = (one - other).reshape(-1, heads, dim).transpose(0, 1)  # [H, T, D]
        total += ((error @ through) * error).sum((1, 2))
    return total
