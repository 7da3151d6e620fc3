"""Entry point of the GPU backend. Implements `runtime.backends.Backend`."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from models.packed import Weights
from models.progress import ProgressCallback, ignore_progress
from models.recipe import INTEGERS
from models.spec import ModelSpec, expert_of
from runtime.backends import ONLY_CPU, Device, Footprint, ModelSizes, Presence
from runtime.backends.decoder import Decoder, DecoderOptions
from runtime.backends.triton import gpu
from runtime.backends.triton.gpu import first_line
from runtime.backends.triton.sizes import COPIED_BYTES, buffer_bytes, expert_bytes, weight_bytes
from runtime.errors import BackendError, Problem
from runtime.kv.kinds import KINDS, KVKind

if TYPE_CHECKING:
    from runtime.backends.triton.decoder import TritonDecoder
    from tuner.timer import Timer

_DRIVER_BYTES = 256 << 20
"""GPU memory that the driver takes in this process, for its context and what it keeps."""
_MODULE_BYTES = 128 << 20
"""GPU memory of kernels and graphs."""
_KEPT, _KEPT_EXPERTS = {"Q4_0", "Q4_1", "Q8_0", *INTEGERS}, {"Q4_0", *INTEGERS}
"""Types of `models.recipe.KEPT_BITS` that there are kernels for."""


class TritonBackend:
    """Triton kernels on an NVIDIA card."""

    name = "triton"
    label = "the GPU backend"
    kinds = tuple(KINDS)
    untuned: Problem | None = None
    step_rows = (512, 256, 128)
    prompt_levels = (1024, 512, 256, 128, 64, 32, 16)

    def probe(self) -> Presence:
        """First returns the cached memory of unloaded models."""
        if gpu.is_started():
            from runtime.backends.triton.card import return_cached

            try:
                return_cached()
            except RuntimeError as error:
                reason = f"the card stopped working in this process ({first_line(error)})"
                return Presence(usable=False, reason=reason, fix="restart the program")
        return gpu.probe()

    def footprint(self, spec: ModelSpec, sizes: ModelSizes, *, compensated: bool) -> Footprint:
        """See `runtime.backends.Backend.footprint`.

        Residuals stay in main memory, except two layers' for prompts (of experts, those of all in a block), and what
        several rows share of one.
        """
        if sizes.exact:
            raise BackendError(ONLY_CPU)
        _check(spec)
        for name, kind in ((sizes.recipe and sizes.recipe.types) or {}).items():
            if kind not in _KEPT or (expert_of(name) is not None and kind not in _KEPT_EXPERTS):
                of = "experts" if expert_of(name) is not None else "weights"
                raise BackendError(f"there are no GPU kernels for {of} as they are in {kind}")
        copied = Counter[str]()  # those of a block's experts together
        for name in spec.linear_names(experts=1):
            N, K = spec.linear_shape(name)
            copied[name] = N * K * spec.alike(name)
        total = copied.total()
        del copied["head"]
        largest = sizes.residual_bytes * max(copied.values(), default=0) // total
        staged = 2 * largest + min(largest, COPIED_BYTES)
        driver = gpu.kept_bytes() if gpu.is_started() else _DRIVER_BYTES
        weights, recipe = sizes.weight_bytes, sizes.recipe
        token_group = recipe.group_size if recipe is not None and recipe.per_token else None
        one, trellis = 0, recipe is not None and recipe.trellis
        if recipe is not None:
            weights, one = weight_bytes(spec, recipe, compensated=compensated), expert_bytes(spec, recipe)
        return Footprint(
            weight_bytes=weights,
            residual_bytes=sizes.residual_bytes if compensated else 0,
            overhead_bytes=_MODULE_BYTES + driver + (staged if compensated else 0),
            buffer_bytes=partial(buffer_bytes, spec, token_group=token_group, trellis=trellis),
            experts=spec.mixture.num_experts if spec.mixture is not None and one else 0,
            expert_bytes=one,
        )

    def prepare(
        self, model: Weights, kv: KVKind, *, compensated: bool, ahead: bool = False, progress: ProgressCallback
    ) -> None:
        """See `runtime.backends.Backend.prepare`.

        The kernels of a model are only known once it is loaded: see `open`.
        """

    def open(self, model: Weights, options: DecoderOptions, progress: ProgressCallback = ignore_progress) -> Decoder:
        _check(model.spec)
        try:
            from runtime.backends.triton.decoder import TritonDecoder
            from runtime.backends.triton.warmup import count_limited, warm_up
        except (ImportError, OSError) as error:
            raise BackendError(f"the GPU backend needs torch and Triton, which cannot be imported: {error}") from error
        decoder = TritonDecoder(model, options)
        try:
            if not options.measure_recall:  # recall is measured at every step
                warm_up(decoder, progress)
                count_limited(decoder)
        except BaseException:
            decoder.close()
            raise
        return decoder

    def device(self, options: DecoderOptions) -> Device:
        return gpu.device()

    def timer(self, decoder: TritonDecoder, *, seconds: float) -> Timer:
        from runtime.backends.triton.timer import CudaTimer

        return CudaTimer(decoder)

    def problems(self, decoder: TritonDecoder) -> tuple[Problem, ...]:
        return decoder.problems

    def link_gb_s(self) -> float | None:
        return gpu.link_gb_s()

    def memory_gb_s(self) -> float | None:
        return gpu.memory_gb_s()


def _check(spec: ModelSpec) -> None:
    if spec.altup is not None:
        raise BackendError(f"there are no GPU kernels for the streams (AltUp) of {spec.family} models")


BACKEND = TritonBackend()
