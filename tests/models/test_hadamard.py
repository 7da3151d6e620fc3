"""Hadamard rotations: orthogonal, even, and there for every width."""

from __future__ import annotations

import pytest
import torch

from models.hadamard import paley_matrix, rotation
from tests.close import assert_close


@pytest.mark.parametrize("order", [12, 20, 24, 28, 36, 44, 60, 76])
def test_paleys_matrices_are_hadamards(order: int) -> None:
    matrix = paley_matrix(order)
    assert set(matrix.unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(matrix @ matrix.T, order * torch.eye(order))


@pytest.mark.parametrize("order", [1, 2, 6, 30, 92, 172])
def test_orders_that_paley_lacks(order: int) -> None:
    with pytest.raises(ValueError, match=f"no Hadamard matrix of order {order}"):
        paley_matrix(order)


@pytest.mark.parametrize("width", [1, 2, 3, 64, 92, 96, 288, 576, 896, 1536, 2048])
def test_rotations_are_orthogonal(width: int) -> None:
    found = rotation(width)
    assert found.width == width
    matrix = found(torch.eye(width))
    assert_close(matrix @ matrix.T, torch.eye(width), "sums")
    x = torch.randn(3, 5, width, generator=torch.Generator().manual_seed(0))
    assert_close(found(x), x @ matrix, "sums")
    assert_close(found.outputs(x[0].T.contiguous()), matrix.T @ x[0].T, "sums")


@pytest.mark.parametrize(
    ("width", "blocks", "paley"),
    [(576, 1, 36), (1536, 1, 12), (3584, 1, 28), (11008, 1, 5504), (4096, 1, 1), (92, 23, 1)],
)
def test_a_rotation_mixes_all_channels_where_there_is_a_construction(width: int, blocks: int, paley: int) -> None:
    found = rotation(width)
    assert (found.blocks, found.paley) == (blocks, paley)
    one = torch.zeros(1, width)
    one[0, 0] = 1
    spread = found(one)
    assert_close(spread[spread != 0].abs(), (width / blocks) ** -0.5, "sums")
    assert int((spread != 0).sum()) == width // blocks


def test_no_channels_cannot_be_rotated() -> None:
    with pytest.raises(ValueError, match="1 channel at least"):
        rotation(0)
