"""A checkpoint with a rotated residual stream: the same function, without outlier channels in the stream.

The stream x becomes x Q with an orthogonal Q. Layers that write to it (embedding table, `o`, `down`, with their biases)
are multiplied by Q. Layers that read from it (`qkv`, `gate_up`, the head) are multiplied by its transpose, after the
weights of the norms in between, which act on single channels, are folded into them. The root mean square in a norm is
the same for x Q.

Source: QServe App. B.2.1, Fig. 14.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from models.checkpoint import Checkpoint
from models.errors import QuantizationError
from models.hadamard import Rotation, rotation
from models.quantize.working import NORM_BEFORE


@dataclass(slots=True, kw_only=True)
class RotatedCheckpoint(Checkpoint):
    """The same model in another basis. Weights are float32, computed anew whenever they are asked for.

    Norms before linear layers have weights of one. Norms of queries and keys are untouched.
    """

    turn: Rotation = field(init=False)
    """The rotation of the residual stream."""

    def __post_init__(self) -> None:
        self.turn = rotation(self.spec.hidden_size)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> RotatedCheckpoint:
        """The rotated form of a checkpoint.

        Raises:
            QuantizationError: it has norms behind attention and MLP, whose weights act on channels of the stream.
        """
        if checkpoint.spec.norm_after:
            raise QuantizationError(
                f"the residual stream of {checkpoint.spec.family} models cannot be rotated, because what is added to "
                "it passes a norm; leave the step out (--without rotate)"
            )
        return cls(files=checkpoint.files, spec=checkpoint.spec)

    def vector(self, name: str) -> torch.Tensor:
        """See `Checkpoint.vector`."""
        weight = Checkpoint.vector(self, name)
        return torch.ones_like(weight) if name == "norm" or name.endswith(("input_norm", "post_norm")) else weight

    def linear(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Checkpoint.linear`; float32."""
        plain, bias = Checkpoint.linear(self, name)
        weight = plain.to(torch.float32)
        owner, _, kind = name.rpartition(".")
        if kind in ("o", "down"):
            return self.turn.outputs(weight), None if bias is None else self.turn(bias)
        norm = Checkpoint.vector(self, f"{owner}.{NORM_BEFORE[kind]}" if owner else "norm")
        return self.turn(weight * norm), bias

    def embedding(self) -> torch.Tensor:
        """See `Checkpoint.embedding`; float32."""
        return self.turn(Checkpoint.embedding(self))
