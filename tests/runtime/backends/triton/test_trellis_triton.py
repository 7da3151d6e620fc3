"""Trellises on the GPU: rotated activations, and products with their words, against `models.trellis`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from models import trellis
from models.packed import PackedLinear
from models.quantize import quantize
from models.recipe import Recipe
from models.spec import LAYER_TYPES
from models.store import Store, StoredModel
from runtime.backends.decoder import DecoderOptions
from runtime.backends.triton.experts import HostRecords, stack
from runtime.backends.triton.kernels.activations import rotate
from runtime.backends.triton.kernels.experts import few, many
from runtime.backends.triton.kernels.gemm import gemm
from runtime.backends.triton.kernels.gemv import LaunchConfig, few_rows
from runtime.backends.triton.layout import repack
from runtime.backends.triton.residual import ordinary, page_locked
from runtime.backends.triton.sizes import EXPERT_WORDS, linear_bytes, record_sizes
from runtime.backends.triton.workspace import Workspace
from tests.close import Tolerance, assert_close
from tests.models.conftest import TEXT, write_checkpoint
from tests.runtime.backends.trellises import mixture, random_trellis
from tests.runtime.backends.triton.decoding import LOGITS, assert_same, both, step, text
from tests.runtime.backends.triton.operands import EXACT, activations, choice, grouped, poisoned
from tests.runtime.backends.triton.test_mixture_triton import NEAR

ROTATED = Tolerance(spread=4e-3, why="results up to eight times their root mean square are rounded to halves, 2^-11")


def rotated(x: torch.Tensor) -> torch.Tensor:
    """x float16 [M, K], as products read it: float16 [M, width]."""
    out = torch.full((len(x), trellis.padded_width(x.shape[1])), torch.nan, dtype=torch.float16, device=x.device)
    rotate(x, out)
    return out


def expected(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """The product of rotated activations, in the order of words, with the levels and scales, and the bias: float64."""
    width = trellis.padded_width(packed.shape[1])
    levels = trellis.levels(packed.bits)[trellis.states(trellis.unpack(packed.codes, packed.bits), packed.bits)]
    weight = levels.astype(np.float64) * packed.scales
    out = x.cpu().double()[:, order(width)] @ torch.from_numpy(weight).T
    return out if packed.bias is None else out + torch.from_numpy(packed.bias)


def order(width: int) -> torch.Tensor:
    """Where rotated channels lie, int64 [width], as the layout's description says."""
    found = np.empty(width, np.int64)
    for start in range(0, width, 512):
        pieces = min(512, width - start) // 32
        for lane in range(16):
            for half in range(2):
                column = 16 * (lane // 2 % 2) + 4 * (lane // 4) + 2 * (lane % 2) + half
                first = start + pieces * (2 * lane + half)
                found[first : first + pieces] = start + 32 * np.arange(pieces) + column
    return torch.from_numpy(found)


@pytest.mark.parametrize("K", [32, 64, 172, 512, 1120, 1536])
def test_rotated_activations(K: int, device: str) -> None:
    x = activations(3, K, device, K)
    reference = torch.from_numpy(trellis.rotate(x.cpu().float().numpy()))
    assert_close(rotated(x)[:, order(reference.shape[1])].float(), reference, ROTATED)


def test_rotated_numbers_beyond_half_precision_become_its_end(device: str) -> None:
    """Numbers with the signs of a column of the rotation, and such that are no numbers."""
    x = torch.from_numpy(60000 * np.sign(trellis.rotation(64)[:, [5, 7]].T)).to(device, torch.float16)
    x[1, 3] = torch.inf
    found = rotated(x)[:, order(64)].float().cpu()
    assert found[0].max() == 65504
    assert not torch.isfinite(found[1]).any()


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(
    ("M", "N", "K", "split"), [(1, 70, 1536, 3), (1, 33, 1120, 2), (1, 64, 160, 1), (2, 70, 1088, 2), (33, 70, 1000, 0)]
)
def test_products_are_the_exact_ones(bits: int, M: int, N: int, K: int, split: int, device: str) -> None:
    """Whole blocks and tails of every length; a product of many rows, too, has levels that are not rounded."""
    packed = random_trellis(N, K, bits, seed=N + K, bias=M == 1)
    weight, x = repack(packed, device), rotated(activations(M, K, device, K))
    assert weight.nbytes == linear_bytes((N, K), bits, 0, bias=M == 1, trellis=True)
    out = poisoned(M, N, device=device)
    if split:
        few_rows(x, weight, out, Workspace(device), LaunchConfig(split=split))
    else:
        gemm(x, weight, out)
    assert_close(out, expected(x, packed), EXACT)


@pytest.mark.parametrize("rows", ["few", "many"])
def test_products_of_experts_are_the_exact_ones(rows: str, device: str) -> None:
    """On the device and in main memory; records are as large as planned."""
    count, N, K, M, each, bits = 3, 33, 608, 4, 2, 3
    stored = [random_trellis(N, K, bits, seed=expert, bias=True) for expert in range(count)]
    host = HostRecords(ordinary if device == "cpu" else page_locked)
    weight = stack(stored, torch.device(device), repack, resident=(1,), host=host)
    assert weight.sizes == record_sizes((N, K), bits, 0, trellis=True)
    exact = linear_bytes((N, K), bits, 0, bias=False, trellis=True)
    assert exact <= weight.sizes.nbytes < exact + 2 * 4 * EXPERT_WORDS
    chosen, x = choice(M, each, count, device), rotated(activations(M, K, device, 1))
    out = poisoned(M * each, N, device=device)
    if rows == "few":
        few(x, x, weight, chosen, out, Workspace(device), split=2)
    else:
        many(x, weight, grouped(chosen, count, 32), out, each=each, block_m=32)
    pairs = zip(x.repeat_interleave(each, 0), chosen.flatten().tolist(), strict=True)
    assert_close(out, torch.cat([expected(row[None], stored[expert]) for row, expert in pairs]), EXACT)


@pytest.mark.parametrize(
    ("bits", "k_chunk", "hidden"),
    [(3.5, 64, 64), *(pytest.param(*other, marks=pytest.mark.slow) for other in ((2, 0, 256), (3, 64, 0)))],
)
def test_the_decoder_answers_as_the_reference_does(
    tmp_path: Path, bits: float, k_chunk: int, hidden: int, device: str
) -> None:
    """Prompts of few and many rows and a decoded token, with biases; compensation reads what is not rotated.

    Heads of 64 channels are rotated where they are merged, of 16 behind. 0: a mixture.
    """
    sizes = {"hidden": hidden, "intermediate": 160, "layers": 1 if hidden > 64 else 2}
    folder = tmp_path / "checkpoint"
    folder = write_checkpoint(folder, family="qwen2", **sizes) if hidden else mixture(folder)
    info = quantize(folder, Store(tmp_path / "store"), Recipe(method="trellis", bits=bits), calibration=TEXT)
    options = DecoderOptions(
        context=64, max_rows=32, k_chunk=k_chunk, n_tb=dict.fromkeys(LAYER_TYPES, 1), prompt_k_chunk=k_chunk,
        select="static",
    )  # fmt: skip
    ours, theirs = both(StoredModel.open_folder(info.path), options, device)
    ours.buffers.alone = None  # a token's products are compensated in one launch, whose program waits for no other
    steps = [step(text(20), 0, prefill=True), step([7, 8], 20, prefill=True), step([17], 22)]
    assert_same(ours, theirs, steps, LOGITS if hidden else NEAR)
    ours.close()
