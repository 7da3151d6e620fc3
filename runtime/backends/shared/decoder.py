"""Decoder of a model whose blocks are shared: each part runs on a backend of its own, one behind the other.

A step's rows cross the seam once, as the residual stream float32 [M, C]. Each part has the cache of its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np

from models.packed import Weights
from models.part import Part
from runtime.backends.decoder import Decoder, DecoderOptions, Float32Array, Step, check_step, checked_seam, sensitive
from runtime.backends.shared.cache import SharedCache
from runtime.compensation import k_chunk_within

Open = Callable[[Weights, DecoderOptions], Decoder]
"""Opens a part of a model on a backend."""
_NO_ROWS = np.zeros(0, np.int32)


class SharedDecoder:
    """Implements `runtime.backends.decoder.Decoder` with two others, each of some blocks of the model.

    Args:
        model: The stored model.
        options: `layers_on_device` is the number of blocks of the first part.
        front: Opens the first part.
        rear: Opens the second one, which has the head.

    Raises:
        RequestError: the model cannot be shared there, or a part's backend refuses an option.
        BackendError: a part's backend cannot run it.
        OutOfMemoryError: a part's backend does not have enough memory.
    """

    backend = "shared"

    def __init__(self, model: Weights, options: DecoderOptions, front: Open, rear: Open) -> None:
        self.spec = model.spec
        self.options = replace(options, sensitive_layers=sensitive(options.sensitive_layers, model.spec))
        seam, end = checked_seam(options.layers_on_device, model.spec), model.spec.num_layers
        self._ranges = ((0, seam), (seam, end))
        self.parts: tuple[Decoder, ...] = ()
        """The decoders of the two parts."""
        try:
            for opened, own in zip((front, rear), self._ranges, strict=True):
                self.parts += (opened(Part(model, *own), self._within(*own)),)
        except BaseException:
            self.close()
            raise
        self._front, self._rear = self.parts
        self.cache = SharedCache([part.cache for part in self.parts])
        self.kv_bytes = sum(part.kv_bytes for part in self.parts)
        self.weight_bytes = sum(part.weight_bytes for part in self.parts)

    @property
    def recall(self) -> float | None:
        """The mean of both parts', weighed by their blocks."""
        found = [(part.recall, part.spec.num_layers) for part in self.parts]
        known = [(recall, blocks) for recall, blocks in found if recall is not None]
        return sum(recall * blocks for recall, blocks in known) / sum(blocks for _, blocks in known) if known else None

    def forward(self, step: Step) -> Float32Array:
        return self._rear.forward(self._through_front(step))

    def hidden(self, step: Step) -> Float32Array:
        return self._rear.hidden(self._through_front(step))

    def set_k_chunk(self, k_chunk: Mapping[str, int] | int, n_tb: Mapping[str, int] | None = None) -> None:
        for part, own in zip(self.parts, self._ranges, strict=True):
            part.set_k_chunk(k_chunk_within(k_chunk, *own), n_tb)
        self.options = replace(self.options, k_chunk=k_chunk, n_tb=dict(n_tb or {}))

    def set_prompt_k_chunk(self, prompt_k_chunk: Mapping[str, int] | int) -> None:
        for part, own in zip(self.parts, self._ranges, strict=True):
            part.set_prompt_k_chunk(k_chunk_within(prompt_k_chunk, *own))
        self.options = replace(self.options, prompt_k_chunk=prompt_k_chunk)

    def set_draft_k_chunk(self, draft_k_chunk: Mapping[str, int] | int) -> None:
        for part, own in zip(self.parts, self._ranges, strict=True):
            part.set_draft_k_chunk(k_chunk_within(draft_k_chunk, *own))
        self.options = replace(self.options, draft_k_chunk=draft_k_chunk)

    def set_sensitive_layers(self, layers: Sequence[int]) -> None:
        self.options = replace(self.options, sensitive_layers=sensitive(layers, self.spec))
        for part, own in zip(self.parts, self._ranges, strict=True):
            part.set_sensitive_layers(self._within(*own).sensitive_layers)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Keep both parts ready between steps."""
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.session())
            yield

    def close(self) -> None:
        for part in self.parts:
            part.close()

    def _through_front(self, step: Step) -> Step:
        """Run the first part. Returns the step for the second, with the stream to go on from."""
        check_step(step, self.spec, self.options)
        return replace(step, stream=self._front.forward(replace(step, logit_rows=_NO_ROWS)))

    def _within(self, first: int, last: int) -> DecoderOptions:
        """The options of a part."""
        options = self.options
        return replace(
            options,
            k_chunk=k_chunk_within(options.k_chunk, first, last),
            prompt_k_chunk=k_chunk_within(options.prompt_k_chunk, first, last),
            draft_k_chunk=k_chunk_within(options.draft_k_chunk, first, last),
            sensitive_layers=tuple(layer - first for layer in options.sensitive_layers if first <= layer < last),
            layers_on_device=None,
            experts_on_device=None,
        )
