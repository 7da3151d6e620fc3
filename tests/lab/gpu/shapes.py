"""Tokens at the widths of real models: heads of 128 channels, 4096 input channels, 3 and 4 bits, W4A8; steps of 2 to 16
rows of one sequence and of several; prompts compensated together; the approximate selection; and blocks of families
with experts, states, windows and sinks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from models.packed import Weights
from runtime.backends.operations import compensation as oracle
from runtime.backends.operations.channels import buckets
from runtime.backends.triton.kernels.select import make_selection, select
from tests.lab.gpu.record import Part, Row
from tests.lab.gpu.sizes import Sizes
from tests.lab.gpu.tokens import Case, compared
from tests.lab.models import RandomModel, random_linear


def measure(part: Part, sizes: Sizes, device: torch.device) -> None:
    """A row for each case, and one for each width of a selection."""
    for K in sizes.selected:
        part.add({"what": "approximate selection"} | selected(K, sizes.k_chunk, device))
    for name, model, case in cases(sizes):
        if not part.begin({"case": name}):
            continue
        part.add({"case": name} | compared(model, case, device))


def cases(sizes: Sizes) -> Iterator[tuple[str, Weights, Case]]:
    """What is compared, by its name."""
    rows, slots, spec = sizes.rows, sizes.slots, sizes.wide
    one = Case(prompt=sizes.wide_prompt, decoded=sizes.wide_decoded)
    for bits in (4, 3):
        model = RandomModel(spec, bits, head_residuals=False)
        yield f"{bits} bits, drafts of one answer", model, replace(one, rows=rows)
        yield f"{bits} bits, {slots} answers", model, replace(one, rows=rows, slots=slots)
        yield f"{bits} bits, all residuals of the prompt", model, replace(one, prompt_k_chunk=1024)
    yield "some residuals of the prompt", model, replace(one, prompt_k_chunk=64)
    yield "approximate selection", model, replace(one, rows=rows[:1], select="approx")
    yield "W4A8", RandomModel(spec, 4, w4a8=True), replace(one, rows=rows, slots=slots, k_chunk=0)
    for title, blocks in sizes.compared.items():
        yield (
            f"blocks of {title}",
            RandomModel(blocks, 4, head_residuals=False),
            replace(one, rows=rows, slots=slots, prompt_k_chunk=64),
        )


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
