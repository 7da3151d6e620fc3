"""The protocol by which a decoder reads a model's weights; `models.store.StoredModel` implements it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from models.keys import KeyStatistics
from models.packed import PackedLinear
from models.spec import ModelSpec


class Weights(Protocol):
    """The weights of one model, by the names of `models.architecture`."""

    @property
    def spec(self) -> ModelSpec:
        """The architecture."""
        ...

    def linear(self, name: str) -> PackedLinear:
        """A linear layer of `ModelSpec.linear_names`, packed."""
        ...

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        """A norm's weight, float32 [C] or [D], or a router's, float32 [E, C]."""
        ...

    def key_statistics(self, layer: int) -> KeyStatistics | None:
        """Statistics of a block's keys and queries; None where there are none."""
        ...

    def embedding(self) -> npt.NDArray[np.float16]:
        """The embedding table. float16 [V, C]."""
        ...

    def token_table(self) -> npt.NDArray[np.float16]:
        """Embeddings of the blocks' own, side by side. float16 [V, blocks * P]."""
        ...

    def expert_tokens(self, layer: int) -> npt.NDArray[np.int32]:
        """Calibration tokens that went to each expert of a block. int32 [held]."""
        ...

    def release(self) -> None:
        """Free the memory of what was read, as far as it can be read again; arrays stay valid."""
        ...
