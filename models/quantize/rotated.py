"""A checkpoint with a rotated residual stream: the same function, without outlier channels in the stream.

The stream x becomes x Q with an orthogonal Q. Layers that write to it (embedding table, `o`, `down`, with their biases)
are multiplied by Q. Layers that read from it (`qkv`, `gate_up`, the head) are multiplied by its transpose, after the
weights of the norms in between, which act on single channels, are folded into them. The root mean square in a norm is
the same for x Q.

Q is a Hadamard matrix, whose entries of equal magnitude spread outlier channels: of order n it has entries ±1 and
orthogonal rows. Sylvester's construction doubles any of them; Paley's two give order q + 1 for a prime q = 3 modulo 4,
and 2 (q + 1) for q = 1 modulo 4. A width 2^a · m with odd m is taken as a product of the smallest Paley order 2^b · m
with Sylvester's 2^(a - b): 576 = 16 · 36, 1536 = 128 · 12, 896 = 32 · 28, 3584 = 128 · 28, 5120 = 256 · 20, 11008 = 2 ·
5504. If there is none, as for 92 = 4 · 23 (whose matrix is known, but not by Paley's constructions), m blocks of 2^a
are rotated separately.

Source: QServe App. B.2.1, Fig. 14 (scaled Hadamard matrix); Paley 1933.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch

from models.checkpoint import Checkpoint
from models.errors import QuantizationError
from models.quantize.working import NORM_BEFORE


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """An orthogonal matrix Q = I ⊗ (S ⊗ P) / √n, of blocks that are products of Sylvester's and Paley's matrices."""

    blocks: int
    sylvester: int
    """Order of S, a power of two."""
    paley: int
    """Order of P."""

    @property
    def width(self) -> int:
        return self.blocks * self.sylvester * self.paley

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product x Q, float32 [..., width], of x [..., width]."""
        y = x.to(torch.float32).reshape(-1, self.sylvester, self.paley)
        if self.paley > 1:
            y = y @ paley_matrix(self.paley)
        step = 1
        while step < self.sylvester:  # Sylvester's matrix is symmetric: sums and differences, level by level
            pairs = y.reshape(len(y), -1, 2, step, self.paley)
            y = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), dim=2)
            step *= 2
        rotated: torch.Tensor = y.reshape(x.shape) * (self.sylvester * self.paley) ** -0.5
        return rotated

    def outputs(self, weight: torch.Tensor) -> torch.Tensor:
        """The product Qᵀ W, float32 [width, K], of a weight [width, K] whose outputs are to be rotated."""
        return self(weight.T).T.contiguous()


def rotation(width: int) -> Rotation:
    """The rotation for a number of channels.

    Raises:
        ValueError: the number is below 1.
    """
    if width < 1:
        raise ValueError(f"a rotation has 1 channel at least, not {width}")
    odd = width // (width & -width)
    for sylvester in _powers(width // odd):
        order = width // sylvester
        if _prime_of(order):
            return Rotation(blocks=1, sylvester=sylvester, paley=order)
    blocks = 1 if odd == 1 else odd
    return Rotation(blocks=blocks, sylvester=width // odd, paley=1)


def _powers(largest: int) -> list[int]:
    return [largest >> shift for shift in range(largest.bit_length())]


def _prime_of(order: int) -> int:
    """The prime q from which one of Paley's constructions makes a matrix of this order; 0 if there is none."""
    for prime, residue in ((order - 1, 3), (order // 2 - 1, 1)):
        if order % 4 == 0 and order & (order - 1) and prime % 4 == residue and _is_prime(prime):
            return prime
    return 0


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


@cache
def paley_matrix(order: int) -> torch.Tensor:
    """Paley's Hadamard matrix of an order, float32 [order, order] of ±1.

    Raises:
        ValueError: Paley's constructions have none of this order.
    """
    q = _prime_of(order)
    if not q:
        raise ValueError(f"Paley has no Hadamard matrix of order {order}")
    squares = {x * x % q for x in range(1, q)}
    character = torch.tensor([0, *(1 if x in squares else -1 for x in range(1, q))], dtype=torch.float32)
    places = torch.arange(q)
    sign = 1 if q % 4 == 1 else -1
    conference = torch.zeros(q + 1, q + 1)
    conference[0, 1:], conference[1:, 0] = 1, sign
    conference[1:, 1:] = character[(places[:, None] - places) % q]
    if q % 4 == 3:
        return conference + torch.eye(q + 1)
    diagonal, others = torch.tensor([[1.0, -1.0], [-1.0, -1.0]]), torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    return torch.kron(conference, others) + torch.kron(torch.eye(q + 1), diagonal)


@dataclass(slots=True, kw_only=True)
class RotatedCheckpoint(Checkpoint):
    """The same model in another basis. Weights are float32, computed anew whenever they are asked for.

    Norms before linear layers have weights of one. Norms of queries and keys are untouched.
    """

    turn: Rotation = field(init=False)

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
        weight = Checkpoint.vector(self, name)
        return torch.ones_like(weight) if name == "norm" or name.endswith(("input_norm", "post_norm")) else weight

    def linear(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        plain, bias = Checkpoint.linear(self, name)
        owner, _, kind = name.rpartition(".")
        if kind == "head":
            return plain, bias
        weight = plain.to(torch.float32)
        if kind in ("o", "down"):
            return self.turn.outputs(weight), None if bias is None else self.turn(bias)
        return self.turn(weight * Checkpoint.vector(self, f"{owner}.{NORM_BEFORE[kind]}")), bias

    def head_rows(self, first: int, count: int) -> torch.Tensor:
        return self.turn(Checkpoint.head_rows(self, first, count).to(torch.float32) * Checkpoint.vector(self, "norm"))

    def embedding_rows(self, first: int, count: int) -> torch.Tensor:
        return self.turn(Checkpoint.embedding_rows(self, first, count))
