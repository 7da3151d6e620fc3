"""Tokens at the widths of real models: heads of 128 channels, 4096 input channels, 3 and 4 bits, W4A8; steps of 2 to 16
rows of one sequence and of several; prompts compensated together; the approximate selection; and blocks of families
with experts, states, windows and sinks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from models.packed import PackedLinear
from models.packing import packed_width
from models.spec import ModelSpec
from models.weights import Weights
from runtime.backends.operations import select as oracle
from runtime.backends.operations.channels import buckets
from runtime.backends.triton.kernels.select import make_selection, select
from tests.bench.first_light.sizes import Amount
from tests.bench.first_light.tokens import Case, compared
from tests.bench.gpu.matrices import RandomModel, block_shapes, random_linear
from tests.bench.gpu.report import Part, Row


def measure(part: Part, amount: Amount, device: torch.device) -> None:
    """A row for each case, and one for each width of a selection."""
    for K in amount.selected:
        part.add({"what": "approximate selection"} | selected(K, amount.k_chunk, device))
    for name, model, case in cases(amount):
        if part.late():
            part.add({"what": "left out for want of time", "case": name})
            continue
        part.begin({"case": name})
        part.add({"case": name} | compared(model, case, device))


def cases(amount: Amount) -> Iterator[tuple[str, Weights, Case]]:
    """What is compared, by its name."""
    rows, slots, spec = amount.rows, amount.slots, amount.wide
    one = Case(prompt=amount.wide_prompt, decoded=amount.wide_decoded)
    for bits in (4, 3):
        model = RandomModel.of(spec, bits)
        yield f"{bits} bits, drafts of one answer", model, replace(one, rows=rows)
        yield f"{bits} bits, {slots} answers", model, replace(one, rows=rows, slots=slots)
        yield f"{bits} bits, all residuals of the prompt", model, replace(one, prompt_k_chunk=1024)
    yield "some residuals of the prompt", model, replace(one, prompt_k_chunk=64)
    yield "approximate selection", model, replace(one, rows=rows[:1], select="approx")
    yield "W4A8", whole_model(spec), replace(one, rows=rows, slots=slots, k_chunk=0)
    for title, blocks in amount.families.items():
        yield f"blocks of {title}", RandomModel.of(blocks, 4), replace(one, rows=rows, slots=slots, prompt_k_chunk=64)


def selected(K: int, k_chunk: int, device: torch.device) -> Row:
    """Whether channels of random activations are those of the oracle."""
    packed = random_linear("selected", (32, K), 4)
    assert packed.rank_maximum is not None
    selection = make_selection(packed, k_chunk=k_chunk, device=device)
    x = torch.randn(16, K, generator=torch.Generator().manual_seed(K)).half()
    indices = torch.full((16, selection.k), -1, dtype=torch.int32, device=device)
    values, flag = torch.zeros(16, selection.k, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    select(x.to(device), selection, indices, values, flag)
    wanted = oracle.approximate(x.float(), k_chunk, buckets(packed.rank_maximum, selection.k))
    wrong = int((indices.cpu() != wanted).sum())
    return {"K": K, "k_chunk": k_chunk, "channels": indices.numel(), "wrong": wrong, "correct": wrong == 0}


def whole_model(spec: ModelSpec) -> RandomModel:
    """A model of W4A8 matrices in groups of 128."""
    made = {shape: _whole("block", shape) for shape in block_shapes(spec)}
    return RandomModel(spec, made, _whole("head", spec.linear_shape("head")))


def _whole(name: str, shape: tuple[int, int]) -> PackedLinear:
    """A random W4A8 matrix whose product with activations of variance 1 has about variance 1."""
    (N, K), rng = shape, np.random.default_rng(shape)
    groups = -(-K // 128)
    return PackedLinear(
        name=name,
        shape=shape,
        bits=4,
        group_size=128,
        codes=np.frombuffer(rng.bytes(4 * N * packed_width(K, 4)), np.int32).reshape(N, -1),
        scales=np.full((N, 1), 1 / (60 * K**0.5), np.float16),
        zeros=rng.integers(6, 10, (N, groups), dtype=np.uint8),
        bias=None,
        residual=None,
        rank_maximum=None,
        mean_square=None,
        group_scales=rng.integers(8, 17, (N, groups), dtype=np.uint8),
        per_token=True,
    )
