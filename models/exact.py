"""The source's own weights beside a stored model that was made of them, for answers that are the source's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from models.checkpoint import Checkpoint
from models.errors import CheckpointError
from models.packed import Weights

_ROWS = 1024
"""Rows of the embedding table that are compared."""


class ExactSource:
    """A stored model's source.

    Raises:
        CheckpointError: the model computes with other numbers beside its matrices than the source.
        ModelError: the checkpoint is damaged or not supported.
    """

    def __init__(self, path: Path, model: Weights) -> None:
        self._checkpoint = Checkpoint.open(path)
        spec = model.spec
        beside = [name for layer in range(spec.num_layers) for name in spec.block_vectors(layer)]
        same = all(_equal(model.vector(name), self._checkpoint.vector(name)) for name in (*beside, "norm"))
        for name in spec.linear_names():
            bias, own = model.linear(name).bias, self._checkpoint.bias(name)
            same = same and (bias is None or (own is not None and _equal(bias, own)))
        same = same and _equal(model.embedding()[:_ROWS], self._checkpoint.embedding()[:_ROWS].to(torch.float16))
        if not same:
            raise CheckpointError(
                f"norms, biases or embeddings of the low-bit model are not those of {path}, because its method moved "
                "scales into them: make one without that, such as `quantize --method trellis`"
            )

    def matrix(self, name: str) -> npt.NDArray[Any]:
        """See `models.packed.SourceWeights`."""
        weight, _ = self._checkpoint.linear(name)
        if weight.dtype == torch.bfloat16:
            bits: npt.NDArray[Any] = weight.contiguous().view(torch.int16).numpy().view(np.uint16)
            return bits
        found: npt.NDArray[Any] = weight.contiguous().numpy()
        return found


def _equal(stored: npt.NDArray[Any], own: torch.Tensor) -> bool:
    return np.array_equal(np.asarray(stored).ravel(), own.numpy().ravel())
