"""Kernel specializations that a model's first steps make Triton look up, counted without a card.

Counted in a process of its own, because kernels that were decorated for the interpreter have no specializations.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from models.architecture import step_graph
from models.recipe import Recipe
from models.spec import ModelSpec
from runtime.backends.decoder import DecoderOptions, compensation_of
from runtime.backends.triton import model as placing
from runtime.backends.triton.decoder import TritonDecoder
from runtime.backends.triton.forward import Pass
from runtime.backends.triton.kernels import gemv
from runtime.backends.triton.warmup import steps_of
from runtime.kv.kinds import KVKind
from tests.runtime.backends.triton.counting import META
from tests.runtime.backends.triton.shapes import MODELS, Shapes, residuals, without_numbers

Case = tuple[str | int, ...]
SIDE = SimpleNamespace(wait_stream=lambda _: None)
"""The stream of compensation."""


@dataclass
class Variants:
    """Specializations by kernel: the key of each, as Triton's own cache has it."""

    found: dict[str, set[str]] = field(default_factory=dict)
    launches: int = 0
    """Launches of the step that came last."""

    @property
    def counts(self) -> dict[str, int]:
        return {kernel: len(keys) for kernel, keys in sorted(self.found.items())}

    def note(self, kernel: JITFunction[Any], *arguments: Any, **options: Any) -> None:
        backend = make_backend(GPUTarget("cuda", 89, 32))
        options.pop("grid", None)
        bound = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialization, rest = bound(*arguments, **options)
        self.launches += 1
        self.found.setdefault(kernel.fn.__name__, set()).add(f"{specialization} {sorted(rest.items())}")


@dataclass(frozen=True)
class Counts:
    """What a load compiles and a token launches."""

    variants: dict[str, int]
    """Specializations of each kernel."""
    launches: int
    """Triton kernels of one decoded token."""

    @property
    def total(self) -> int:
        return sum(self.variants.values())


@contextmanager
def counted() -> Iterator[Variants]:
    """Launches are noted down and do nothing; models are placed without numbers."""
    variants = Variants()

    def launcher(kernel: JITFunction[Any], _grid: Any) -> Any:
        return lambda *arguments, **options: variants.note(kernel, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "__getitem__", launcher)
        patch.setattr(placing, "repack", without_numbers)
        patch.setattr(placing, "load_residuals", residuals)
        patch.setattr(torch.cuda, "stream", lambda _: nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda: SIDE)
        patch.setattr(gemv, "sm_count", lambda _: 128)
        yield variants


def of_a_load(spec: ModelSpec, recipe: Recipe, kv: KVKind, *, prompt: int = 0, rows: int = 1) -> Variants:
    """What the first steps of a load with compensation compile; the last decodes a token, or checks several rows."""
    with counted() as variants:
        options = DecoderOptions(context=min(8192, spec.max_context), k_chunk=16, kv=kv, prompt_k_chunk=prompt)
        decoder = TritonDecoder(Shapes(spec, recipe), options, META)
        decoder.buffers.alone = None
        for step in steps_of(decoder):
            if int(step.positions[0]) == 0:
                decoder.cache.clear(0)
            decoder.cache.begin(step.slots, step.positions, flush=step.flush)
            variants.launches = 0
            run = Pass(
                decoder.model, decoder.buffers, M=step.tokens.size, R=step.logit_rows.size,
                way=compensation_of(step, options), draft=step.draft, side=SIDE,
            )  # fmt: skip
            run.finish(run.run(step_graph(spec)))
        if rows > 1:
            variants.launches = 0
            run = Pass(decoder.model, decoder.buffers, M=rows, R=rows, way="rows", draft=False, side=SIDE)
            run.finish(run.run(step_graph(spec)))
        return variants


def counted_apart(cases: Sequence[Case]) -> dict[Case, Counts]:
    """By case: a model of `MODELS`, a kind of cache, prompt_k_chunk and maybe rows. Counted in a process of its own."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    words = [":".join(map(str, case)) for case in cases]
    command = [sys.executable, "-m", __spec__.name, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(cases, (Counts(**found) for found in json.loads(done.stdout)), strict=True))


def main(cases: list[str]) -> None:
    """Print variants by case, `MODEL:KIND` each."""
    answer = []
    for case in cases:
        name, kv, prompt, rows = f"{case}:1".split(":")[:4]
        found = of_a_load(*MODELS[name], kv, prompt=int(prompt), rows=int(rows))
        answer.append({"variants": found.counts, "launches": found.launches})
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
