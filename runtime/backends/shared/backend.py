"""Entry point of the backend that shares a model's blocks. Implements `runtime.backends.Backend`.

The first blocks and their cache are on a card, as many as fit; the processor runs the others and the head. It is for
models that do not fit the card, which would otherwise be idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from models.packed import Weights
from models.part import part_of, recipe_of, seams
from models.progress import ProgressCallback, ignore_progress
from models.recipe import Recipe
from models.spec import ModelSpec
from runtime.backends import Device, Footprint, ModelSizes, Presence, backend
from runtime.backends.decoder import Decoder, DecoderOptions
from runtime.errors import BackendError, Problem
from runtime.kv.kinds import KINDS, KVKind

if TYPE_CHECKING:
    from runtime.backends.shared.decoder import SharedDecoder
    from tuner.timer import Timer

FRONT, REAR = "triton", "cpu"
"""The backends of the parts."""


class SharedBackend:
    """A card with the processor."""

    name = "shared"
    label = "the GPU with the processor"
    kinds = tuple(KINDS)
    untuned: Problem | None = None

    @property
    def step_rows(self) -> Sequence[int]:
        return _both(backend(FRONT).step_rows, backend(REAR).step_rows)

    @property
    def prompt_levels(self) -> Sequence[int]:
        return _both(backend(FRONT).prompt_levels, backend(REAR).prompt_levels)

    def probe(self) -> Presence:
        """See `runtime.backends.Backend.probe`. The memory is the card's."""
        front, rear = backend(FRONT).probe(), backend(REAR).probe()
        return front if rear.usable or not front.usable else rear

    def footprint(self, spec: ModelSpec, sizes: ModelSizes, *, compensated: bool) -> Footprint:
        """See `runtime.backends.Backend.footprint`. That of the whole model, and those of parts."""
        whole = backend(FRONT).footprint(spec, sizes, compensated=compensated)
        if not seams(spec):
            raise BackendError("all its blocks read one cache, so they stay together")

        def parts(seam: int) -> tuple[Footprint, Footprint]:
            front, rear = (
                backend(name).footprint(part_of(spec, *own), _sizes_of(spec, sizes, *own), compensated=compensated)
                for name, own in ((FRONT, (0, seam)), (REAR, (seam, spec.num_layers)))
            )
            return front, rear

        return Footprint(
            weight_bytes=whole.weight_bytes, residual_bytes=whole.residual_bytes, seams=seams(spec), parts=parts
        )

    def prepare(
        self, model: Weights, kv: KVKind, *, compensated: bool, ahead: bool = False, progress: ProgressCallback
    ) -> None:
        for name in (FRONT, REAR):
            backend(name).prepare(model, kv, compensated=compensated, ahead=ahead, progress=progress)

    def open(self, model: Weights, options: DecoderOptions, progress: ProgressCallback = ignore_progress) -> Decoder:
        if options.layers_on_device is None:
            raise BackendError("how many blocks the GPU runs was not planned")
        from runtime.backends.shared.decoder import SharedDecoder

        front, rear = (partial(backend(name).open, progress=progress) for name in (FRONT, REAR))
        return SharedDecoder(model, options, front, rear)

    def device(self, options: DecoderOptions) -> Device:
        front, rear = (backend(name).device(options) for name in (FRONT, REAR))
        return Device(
            name=f"{front.name} with {rear.name}",
            capability=f"{front.capability}, {options.layers_on_device} blocks; {rear.capability}",
            driver=front.driver,
            sm_count=front.sm_count,
            shared_bytes=front.shared_bytes,
        )

    def timer(self, decoder: SharedDecoder, *, seconds: float) -> Timer:
        from runtime.backends.shared.timer import SharedTimer

        return SharedTimer([(part, backend(part.backend).timer(part, seconds=seconds)) for part in decoder.parts])

    def problems(self, decoder: SharedDecoder) -> tuple[Problem, ...]:
        return tuple(problem for part in decoder.parts for problem in backend(part.backend).problems(part))

    def link_gb_s(self) -> float | None:
        return backend(FRONT).link_gb_s()

    def memory_gb_s(self) -> float | None:
        """See `runtime.backends.Backend.memory_gb_s`. Most of a token's time goes to reading main memory."""
        return None


def _both(ours: Sequence[int], theirs: Sequence[int]) -> tuple[int, ...]:
    return tuple(number for number in ours if number in theirs)


def _sizes_of(spec: ModelSpec, sizes: ModelSizes, first: int, last: int) -> ModelSizes:
    """The sizes of some blocks, by the bits of their matrices; the head is with the last ones."""
    part, recipe = part_of(spec, first, last), sizes.recipe
    own = None if recipe is None else recipe_of(recipe, first, last)
    share = _bits(part, own) / _bits(spec, recipe)
    return ModelSizes(
        weight_bytes=round(sizes.weight_bytes * share),
        residual_bytes=round(sizes.residual_bytes * share),
        whole=sizes.whole,
        recipe=own,
    )


def _bits(spec: ModelSpec, recipe: Recipe | None) -> int:
    """Bits of a model's matrices; without a recipe, their weights."""
    total = 0
    for name in spec.linear_names(experts=1):
        N, K = spec.linear_shape(name)
        total += N * K * spec.alike(name) * (1 if recipe is None else recipe.layer_bits(name))
    return total


BACKEND = SharedBackend()
