"""Activations of the GPU backend: buffers, whose addresses stay, and matrices in them with pending operations."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache

import torch
from triton.errors import TritonError

from models.spec import DeltaSpec, ModelSpec
from runtime.backends.triton import card
from runtime.backends.triton.gpu import first_line
from runtime.backends.triton.kernels.activations import Tokens
from runtime.backends.triton.kernels.delta_chunks import Mixed
from runtime.backends.triton.kernels.experts import Groups, most_blocks
from runtime.backends.triton.kernels.routing import Routed
from runtime.backends.triton.model import GpuModel
from runtime.backends.triton.sizes import (
    CHUNK,
    HALF_BUFFERS,
    PIECE,
    RUN,
    SUMMED_ROWS,
    buffer_sizes,
    chunk_numbers,
    pieces,
    routing_sizes,
    token_width,
)
from runtime.backends.triton.workspace import Workspace


@cache
def refused_cooperation(device: torch.device) -> str | None:
    """Why programs cannot wait for each other on a device; None if they can."""
    try:
        return None if card.launch(device, cooperative=True) else "a tiny cooperative kernel gave a wrong result"
    except (TritonError, RuntimeError) as error:
        return first_line(error)


class Buffers:
    """Activations of the widest step, the step's inputs on the device, and auxiliary buffers of kernels.

    A linear layer's output is mostly read by the next kernel, so layers share one buffer, and another one where two
    outputs are read together (`runtime.backends.triton.sizes.is_kept`). Compensations, which run
    concurrently with products, have a buffer of their own for a few rows. Logits of more than one row, which only
    evaluation requests, may allocate memory that is released after the step.

    Args:
        model: The model.
        rows: Most rows of a step (M).
    """

    def __init__(self, model: GpuModel, rows: int) -> None:
        spec, device = model.spec, model.device
        sizes = buffer_sizes(spec, rows, model.token_group, trellis=model.trellis)
        self._token_group, self._trellis = model.token_group, model.trellis
        kinds = {"tokens": torch.int8, "token_sums": torch.int32, **dict.fromkeys(HALF_BUFFERS, torch.float16)}
        self._flat = {
            field.name: torch.zeros(getattr(sizes, field.name), dtype=kinds.get(field.name), device=device)
            for field in fields(sizes)
            if field.name != "scratch"
        }
        """By their names in `BufferSizes`."""
        self.embeddings = self._flat["embeddings"].view(rows, -1)
        """float16 [rows, C], the tokens' rows of the embedding table."""
        self.own_tokens = self._flat["own_tokens"].view(rows, -1)
        """float16 [rows, blocks * P], the tokens' embeddings of the blocks' own; another input of a step."""
        self.inputs = torch.zeros((3, rows), dtype=torch.int32, device=device)
        """int32 [3, rows], a step's other inputs, which are the next three."""
        self.slots: torch.Tensor = self.inputs[0]
        self.positions: torch.Tensor = self.inputs[1]
        self.logit_rows: torch.Tensor = self.inputs[2]
        self.status = torch.zeros(2, dtype=torch.int32, device=device)
        """int32 [2], inputs of the next two."""
        self.flag = self.status[:1]
        """int32 [1], 1 once compensation found NaN or infinity."""
        self.total = self.status[1:].view(torch.float32)
        """float32 [1], the sum of a step's logits: NaN or infinity if any of them is."""
        self.main, self.side = Workspace(device, sizes.scratch), Workspace(device)
        """Workspaces of the two streams."""
        self.routing = RoutingBuffers(spec, rows, device) if spec.mixture is not None else None
        """Of a mixture; None if the model has none."""
        self.alone: str | None = refused_cooperation(device) if device.type == "cuda" else "programs run in turn"
        """Why a row's compensation takes two launches; None if one, whose programs wait for each other."""

    def _view(self, name: str, rows: int, width: int) -> torch.Tensor:
        return self._flat[name][: rows * width].view(rows, width)

    def stream(self, M: int, C: int) -> torch.Tensor:
        """float32 [M, C], the residual stream."""
        return self._view("stream", M, C)

    def input(self, M: int, K: int) -> torch.Tensor:
        """float16 [M, K], the input of a linear layer."""
        return self._view("inputs", M, K)

    def left(self, M: int, K: int, *, each: int = 1) -> torch.Tensor | Tokens | None:
        """What products read of such an input, beside it or instead of it, until the next one is written.

        Returns:
            The rows rotated, float16 [M * each, width], where a row may have inputs of `each` expert; or INT8 tokens
            [M, K]; or the sums of the pieces of few rows, float32 [M * each, ceil(K / 32)]. None: nothing.
        """
        if self._trellis:
            return self._view("rotated", M * each, PIECE * pieces(K))
        group = self._token_group
        if group is None:
            return self._view("sums", M * each, pieces(K)) if M <= SUMMED_ROWS else None
        width = token_width(K, group)
        groups = width // group if group else 1
        codes, sums = self._view("tokens", M, width), self._view("token_sums", M, groups)
        return Tokens(codes, self._flat["token_scales"][:M], sums, group)

    def left_by_heads(self, M: int, K: int, D: int) -> torch.Tensor | None:
        """The same of what is written head by head, of D channels; None where heads don't divide it, or of tokens."""
        left = self.left(M, K)
        return None if isinstance(left, Tokens) or D % (RUN if self._trellis else PIECE) else left

    def queries(self, M: int, width: int) -> torch.Tensor:
        return self._view("queries", M, width)

    def mixed(self, M: int, spec: DeltaSpec) -> Mixed:
        """What a delta rule reads, for M rows. How rows depend on others of their chunk is in the main scratch."""
        width, numbers = spec.inputs, chunk_numbers(spec)
        chunks = self.main.scratch(M * numbers).view(M, spec.value_heads, 2, CHUNK)
        return Mixed(self._flat["waiting"].view(-1, width), self._view("mixed", M, width), chunks)

    def embedded(self, M: int, C: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """float16 [M, C], the tokens' embeddings, valid until a step ends, and what is left of them, but tokens."""
        of = self.left_by_heads(M, C, RUN)
        name = "embedded_rotated" if self._trellis else "embedded_sums"
        return self._view("embedded", M, C), None if of is None else self._view(name, *of.shape)

    def output(self, M: int, N: int, *, kept: bool = False) -> torch.Tensor:
        """float32 [M, N], the output of a linear layer, valid until the next one, `kept` or not, is requested."""
        if kept:
            return self._view("kept", M, N)
        if self._flat["output"].numel() < M * N:
            return torch.empty(M, N, device=self.inputs.device)
        return self._view("output", M, N)

    def compensation(self, M: int, N: int, *, kept: bool = False) -> torch.Tensor | None:
        """float32 [M, N], the compensation of an output; None if there are so many rows that it is added in place.

        The side stream writes it after all earlier launches, including the last reader of its old contents.
        """
        name = "kept_compensation" if kept else "compensation"
        return None if self._flat[name].numel() < M * N else self._view(name, M, N)


class RoutingBuffers:
    """Where the rows of a step find their experts, and the sum of what these give."""

    def __init__(self, spec: ModelSpec, rows: int, device: torch.device) -> None:
        assert spec.mixture is not None
        sizes = routing_sizes(spec, rows)
        self._mixture, self._width = spec.mixture, spec.hidden_size
        self._chosen = torch.zeros(sizes.pairs, dtype=torch.int32, device=device)
        self._shares = torch.zeros(sizes.pairs, device=device)
        self._logits = torch.zeros(sizes.logits, device=device)
        self._order = torch.zeros(sizes.order, dtype=torch.int32, device=device)
        self._blocks = torch.zeros(sizes.blocks, dtype=torch.int32, device=device)
        self._mixed = torch.zeros(sizes.mixed, device=device)

    def routed(self, M: int) -> Routed:
        """Output of the router for M rows."""
        read, scores = self._mixture.experts_per_token, self._mixture.scores
        chosen, shares = (buffer[: M * read].view(M, read) for buffer in (self._chosen, self._shares))
        return Routed(chosen, shares, self._logits[: M * scores].view(M, scores))

    def groups(self, M: int, block_m: int) -> Groups:
        """The pairs of M rows, in blocks of `block_m`."""
        pairs = M * self._mixture.experts_per_token
        most = most_blocks(pairs, self._mixture.num_experts, block_m)
        return Groups(self._order[:pairs], self._blocks[: 3 * most].view(3, most))

    def mixed(self, M: int) -> torch.Tensor:
        """float32 [M, C], the sums of a prompt's rows."""
        return self._mixed[: M * self._width].view(M, self._width)


@dataclass(frozen=True, slots=True)
class Value:
    """A [rows, width] matrix of activations."""

    tensor: torch.Tensor
    """The residual stream (float32), the input of a linear layer (float16), or its output (float32)."""
    dec: torch.Tensor | None = None  # Compensation still to be added
    left: torch.Tensor | Tokens | None = None  # What products read of an input, if its kernel left it (`Buffers.left`)
