"""Entry point of the reference backend. Implements `runtime.backends.Backend`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from models.packed import Weights
from models.progress import ProgressCallback, ignore_progress
from models.spec import ModelSpec
from runtime.backends import ONLY_CPU, Device, Footprint, ModelSizes, Presence
from runtime.backends.decoder import Decoder, DecoderOptions
from runtime.errors import BackendError, Problem
from runtime.kv.kinds import KINDS, KVKind

if TYPE_CHECKING:
    from tuner.timer import Timer

_FOR_CHECKING = "the reference backend is for checking numbers, not for speed, and is not tuned"


class ReferenceBackend:
    """Plain torch in float32, on any machine."""

    name = "reference"
    label = "the reference backend"
    kinds = tuple(KINDS)
    step_rows = (128,)
    prompt_levels = ()
    untuned = Problem(what=_FOR_CHECKING, fix="choose another backend, or a fixed k_chunk")

    def probe(self) -> Presence:
        return Presence(usable=True, reason="plain torch runs the model, slowly")

    def footprint(self, spec: ModelSpec, sizes: ModelSizes, *, compensated: bool) -> Footprint:
        """See `runtime.backends.Backend.footprint`. Weights, and residuals in use, are unpacked to float32."""
        if sizes.exact:
            raise BackendError(ONLY_CPU)
        values = sum(math.prod(spec.linear_shape(name)) for name in spec.linear_names())
        weights = 4 * values * (2 if compensated else 1) + 2 * spec.vocab_size * spec.hidden_size
        if sizes.mtp is not None:
            weights += 4 * sum(math.prod(sizes.mtp.linear_shape(name)) for name in sizes.mtp.block_linears(0))
        residuals = sizes.residual_bytes if compensated else 0
        return Footprint(weight_bytes=weights, residual_bytes=residuals, mtp=sizes.mtp)

    def prepare(
        self, model: Weights, kv: KVKind, *, compensated: bool, ahead: bool = False, progress: ProgressCallback
    ) -> None:
        """See `runtime.backends.Backend.prepare`. There is nothing to prepare."""

    def open(self, model: Weights, options: DecoderOptions, progress: ProgressCallback = ignore_progress) -> Decoder:
        try:
            from runtime.backends.reference.decoder import ReferenceDecoder
        except (ImportError, OSError) as error:
            raise BackendError(f"the reference backend needs torch, which cannot be imported: {error}") from error
        return ReferenceDecoder(model, options)

    def device(self, options: DecoderOptions) -> Device:
        raise BackendError(_FOR_CHECKING)

    def timer(self, decoder: Decoder, *, seconds: float) -> Timer:
        raise BackendError(_FOR_CHECKING)

    def problems(self, decoder: Decoder) -> tuple[Problem, ...]:
        return ()

    def link_gb_s(self) -> float | None:
        return None

    def memory_gb_s(self) -> float | None:
        return None


BACKEND = ReferenceBackend()
