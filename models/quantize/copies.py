"""Losses of low-bit layer types, measured on copies of the model that are computed while it is quantized.

Beside the untouched model there is one copy for every type of a block's linear layers and every `K_CHUNK`. In a copy
the layers of its type are low-bit, with so many salient channels compensated, and everything else is in full precision.
How far its next-token distribution is from the untouched model's (KL divergence) is what the type loses. Added up, such
losses predict the loss of the whole low-bit model within a few percent, even if types are compensated differently, so
the tuner can weigh them against time (`docs/decisions/tuner.md` has the measurement).

The head comes last, so its losses need no copies: the untouched model's states meet its low-bit weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
import torch

from models import carried
from models.checkpoint import Checkpoint
from models.losses import TypeLosses
from models.oracle import Oracle
from models.packed import PackedLinear, rows_of
from models.packing import RUN
from models.quantize.allocation import Divergence
from models.quantize.lowered import LoweredLinear, fast_products
from models.quantize.streams import Batches, normed
from models.spec import LAYER_TYPES

K_CHUNKS = (0, 4, 32, 256)
"""The k_chunk at which losses are measured. Between 4 and 256 losses fall about linearly with the logarithm of k_chunk;
the first few channels recover most of the loss."""
TOKENS = 256
"""Maximum number of calibration tokens that the copies see."""
LENGTH = 32
"""Tokens per sequence; many short sequences cover more kinds of text than a few long ones."""
STATES_BYTES = 128 << 20
"""Maximum bytes for the hidden states of all copies; wide models use fewer tokens."""
_PIECE = 1 << 23
"""Number of the head's weights processed at a time."""
_DECIMALS = 7


def start(checkpoint: Checkpoint, windows: Batches) -> Batches:
    """Embed the text once for every copy.

    Args:
        checkpoint: The full-precision model.
        windows: int64 [B, S] token windows of the calibration text.

    Returns:
        float32 [1 + copies, S, C] for sequences from all over the text: the untouched model, then for each layer type
        of a block one copy for every `K_CHUNKS`. Nothing where there is no text.
    """
    sequences = [sequence for window in windows for sequence in window]
    if not sequences:
        return []
    copies = 1 + len(LAYER_TYPES) * len(K_CHUNKS)
    fitting = max(2, min(TOKENS, STATES_BYTES // (4 * copies * carried.carried_width(checkpoint.spec))))
    length = min(LENGTH, fitting, max(map(len, sequences)))
    complete = [sequence[:length] for sequence in sequences if len(sequence) >= length]
    wanted = min(len(complete), fitting // length)
    chosen = [complete[index * len(complete) // wanted] for index in range(wanted)]
    return [
        carried.begin(checkpoint.spec, tokens, checkpoint.embedded(tokens)).repeat(copies, 1, 1) for tokens in chosen
    ]


def advance(
    oracle: Oracle, layer: int, linears: Mapping[str, LoweredLinear], copies: Batches, watch: Callable[[], None]
) -> None:
    """Pass all copies through a block, in place."""
    if not copies:
        return
    untouched = torch.stack([states[0] for states in copies])  # [B, S, C]
    with fast_products(oracle.spec):
        _pass(oracle, layer, linears, copies, untouched, watch)


def _pass(
    oracle: Oracle,
    layer: int,
    linears: Mapping[str, LoweredLinear],
    copies: Batches,
    untouched: torch.Tensor,
    watch: Callable[[], None],
) -> None:
    """`advance`, with the untouched model's states [B, S, C] stacked."""
    for states, passed in zip(copies, oracle.block(layer, untouched), strict=True):
        states[0] = passed
    for index, kind in enumerate(LAYER_TYPES):
        watch()
        own = slice(1 + index * len(K_CHUNKS), 1 + (index + 1) * len(K_CHUNKS))
        own_names = [name for name in linears if name.endswith(f".{kind}")]
        oracle.replace = {name: partial(_compensated, linears[name], oracle=oracle) for name in own_names}
        stacked = torch.stack([states[own] for states in copies], 1)  # [K_CHUNKS, B, S, C]
        passed = oracle.block(layer, stacked.flatten(0, 1)).view_as(stacked)
        for states, part in zip(copies, passed.unbind(1), strict=True):
            states[own] = part
    oracle.replace = {}


def losses(
    checkpoint: Checkpoint, head: PackedLinear, norm: torch.Tensor, copies: Batches, watch: Callable[[float], None]
) -> TypeLosses:
    """The losses of the layer types, once the copies have passed the last block.

    Args:
        checkpoint: The full-precision model.
        head: The low-bit head.
        norm: The weight of the norm before it, as it is stored, float32 [C].
        copies: What `start` made and `advance` passed on; not empty.
        watch: Called with the share that is done; may raise to stop.
    """
    spec = checkpoint.spec
    states = torch.cat([own[..., : spec.hidden_size] for own in copies], 1)  # [1 + copies, T, C]
    inputs = normed(states, checkpoint.vector("norm"), spec.norm_eps)
    own = normed(states[0], norm, spec.norm_eps).expand(1 + len(K_CHUNKS), *states.shape[1:])
    blocks, outer = Divergence(inputs, spec.logit_cap), Divergence(own, spec.logit_cap)
    step = max(1, _PIECE // spec.hidden_size // RUN) * RUN
    for begin in range(0, spec.vocab_size, step):
        rows = slice(begin, min(begin + step, spec.vocab_size))
        piece = checkpoint.head_rows(begin, rows.stop - begin).to(torch.float32)
        with fast_products(spec):
            blocks.add(piece)
            lowered = LoweredLinear(rows_of(head, rows), torch.float32)
            outer.take(_head_logits(inputs[0] @ piece.T, own[0], lowered))
        watch(rows.stop / spec.vocab_size)
    found = np.concatenate((blocks.total(), outer.total())) / states.shape[1]
    found = np.nan_to_num(np.maximum(found, 0), nan=math.log(spec.vocab_size), posinf=math.log(spec.vocab_size))
    by_type = found.round(_DECIMALS).reshape(-1, len(K_CHUNKS)).tolist()
    return TypeLosses(
        k_chunk=K_CHUNKS,
        nats={kind: tuple(nats) for kind, nats in zip((*LAYER_TYPES, "head"), by_type, strict=True)},
        tokens=states.shape[1],
    )


def _head_logits(full: torch.Tensor, x: torch.Tensor, head: LoweredLinear) -> Iterator[torch.Tensor]:
    """Logits [T, n] of the untouched head, then of the low-bit one for each of `K_CHUNKS`."""
    yield full
    yield from _compensated(head, x.expand(len(K_CHUNKS), *x.shape))


def _compensated(lowered: LoweredLinear, x: torch.Tensor, *, oracle: Oracle | None = None) -> torch.Tensor:
    """A low-bit layer's output where each copy has as many channels compensated as its place in `K_CHUNKS` says.

    Args:
        lowered: The layer, with residuals.
        x: float32 [K_CHUNKS · B, S or T.., K]; of an expert's layer, [n, K].
        oracle: The model that it is a layer of; None for the head.

    Returns:
        The same with N for K.
    """
    y, rows = lowered.plain(x), None if oracle is None else oracle.rows
    if rows is None:
        for k_chunk, part, out in zip(K_CHUNKS, x.chunk(len(K_CHUNKS)), y.chunk(len(K_CHUNKS)), strict=True):
            if k_chunk:
                out += lowered.restored(part, k_chunk)
        return y
    copy = rows.places * len(K_CHUNKS) // (rows.batch * rows.length)
    for at, k_chunk in enumerate(K_CHUNKS):
        if k_chunk:
            y[copy == at] += lowered.restored(x[copy == at], k_chunk)
    lowered.release()
    return y
