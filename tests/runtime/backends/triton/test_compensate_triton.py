"""The GPU's compensation against the plain reference, and its variants against one another, bit by bit.

Tolerance: sums of float32 products differ only in the order of addition, so they are held to 1e-5 of the largest
magnitude, as on the CPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl

from models.packed import PackedLinear
from models.spec import LAYER_TYPES
from runtime.backends.decoder import DecoderOptions
from runtime.backends.operations import channels as budget
from runtime.backends.operations import compensation as plain
from runtime.backends.triton.decoder import TritonDecoder
from runtime.backends.triton.kernels import compensate as kernels
from runtime.backends.triton.kernels.activations import piece_sums, rotate
from runtime.backends.triton.kernels.compensate import LaunchConfig, Output, compensate
from runtime.backends.triton.kernels.gemv import LaunchConfig as GemvConfig
from runtime.backends.triton.kernels.gemv import few_rows, prepare
from runtime.backends.triton.kernels.select import Selection, make_selection, select
from runtime.backends.triton.layout import repack
from runtime.backends.triton.residual import GpuResidual, residuals_to_device
from runtime.backends.triton.workspace import Workspace
from tests.close import assert_close
from tests.runtime.backends.contract.operands import activations
from tests.runtime.backends.trellises import random_trellis
from tests.runtime.backends.triton.decoding import assert_replayed, step
from tests.runtime.backends.triton.operands import poisoned
from tests.runtime.conftest import make_model, make_spec, pack_linear

BITS = [2, 4, 8, 16]


class Layer:
    """A quantized layer with residuals on the device, and what the reference says about it."""

    def __init__(self, packed: PackedLinear, device: str, k_chunk: int, mode: Any = "approx") -> None:
        self.packed, self.device, self.k_chunk = packed, device, k_chunk
        self.N, self.K = packed.shape
        self.workspace = Workspace(device)
        assert packed.residual is not None
        self.residual: GpuResidual = residuals_to_device([packed.residual], packed.shape, device)
        self.selection: Selection = make_selection(packed, k_chunk=k_chunk, mode=mode, device=device)

    def expected(self, x: torch.Tensor, base: torch.Tensor | None = None) -> torch.Tensor:
        assert self.packed.residual is not None
        assert self.packed.rank_maximum is not None
        edges = budget.buckets(self.packed.rank_maximum, self.selection.k)
        channels = plain.approximate(x.float(), self.k_chunk, edges)
        start = torch.zeros(x.shape[0], self.N) if base is None else base
        return plain.compensate(start, x.float(), channels, plain.dequantize_residual(self.packed.residual, self.N))

    def run(self, x: torch.Tensor, *, n_tb: int = 1, fused: bool = False, **more: Any) -> torch.Tensor:
        """The output, written over poison; counters are checked to be zero afterwards."""
        out, base = poisoned(x.shape[0], self.N, device=self.device), more.pop("base", None)
        output = Output(out, None if base is None else base.to(self.device))
        config = LaunchConfig(
            n_tb=n_tb, fused=fused, copied=more.pop("copied", None), product=more.pop("product", None)
        )
        compensate(x.to(self.device), self.selection, self.residual, output, config, self.workspace, **more)
        assert self.workspace.counters(2).tolist() == [0, 0]
        return out.cpu()


@pytest.fixture
def layer(device: str) -> Any:
    """Builds a `Layer` of random weights."""

    def build(N: int, K: int, *, bits: int = 4, k_chunk: int = 16, mode: Any = "approx") -> Layer:
        weight = np.random.default_rng(N + K).standard_normal((N, K)).astype(np.float32)
        return Layer(pack_linear(weight, bits=3, residual_bits=bits), device, k_chunk, mode)

    return build


def halves(rows: int, K: int, seed: int = 0) -> torch.Tensor:
    """Activations [rows, K] as kernels take them."""
    return activations(rows, K, seed).half()


@pytest.mark.parametrize("bits", BITS)
def test_the_numbers_do_not_depend_on_the_programs(layer: Any, bits: int) -> None:
    one = layer(5 * 1024 // bits + 3, 96, bits=bits, k_chunk=200)  # six lines of two tiles
    x = halves(1, 96)
    expected = one.run(x, fused=True)
    assert_close(expected, one.expected(x), "sums")
    for n_tb in (1, 4, 5, 8):
        assert torch.equal(one.run(x, n_tb=n_tb), expected), n_tb


@pytest.mark.parametrize(
    ("kind", "bits", "residual_bits", "mode"),
    [
        ("uniform", 3, 4, "approx"),
        ("uniform", 4, 16, "random"),
        ("trellis", 3, 4, "exact"),
        ("uniform", 4, 8, "static"),
    ],
)
def test_one_launch_multiplies_and_compensates(
    device: str, kind: str, bits: int, residual_bits: int, mode: Any
) -> None:
    """The bits of two launches, of a product in one part and in two, with a last block that is not full."""
    N, K = 300, 1100
    weight = np.random.default_rng(5).standard_normal((N, K)).astype(np.float32)
    one = Layer(pack_linear(weight, bits=bits, residual_bits=residual_bits), device, 30, mode)
    main, x, read = Workspace(device), halves(1, K), halves(1, K).to(device)
    sums, positions = torch.empty(1, 35, device=device), torch.tensor([3], dtype=torch.int32, device=device)
    piece_sums(read, sums)
    matrix = repack(one.packed if kind == "uniform" else random_trellis(N, K, bits, seed=6), device)
    if matrix.trellis:
        read = torch.empty(1, matrix.width, dtype=torch.float16, device=device)
        rotate(x.to(device), read)
    expected = one.run(x, positions=positions)
    for split in (1, 2):
        alone, out = torch.empty(1, N, device=device), poisoned(1, N, device=device)
        few_rows(read, matrix, alone, main, GemvConfig(split=split), sums=sums)
        ready = prepare(read, matrix, out, main, GemvConfig(split=split), sums=sums)
        assert torch.equal(one.run(x, fused=True, product=ready, positions=positions), expected)
        assert torch.equal(out, alone)
        assert not main.counters(5).any()


def test_a_token_has_the_same_logits_whether_its_products_are_compensated_in_one_launch(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, found, launches = make_model(make_spec(), bits=4), [], []
    launch = kernels._launch
    monkeypatch.setattr(kernels, "_launch", lambda *of: (launches.append(of[3].product is not None), launch(*of)))
    for alone in (None, "programs run in turn"):
        decoder = TritonDecoder(
            model, DecoderOptions(context=8, max_rows=1, k_chunk=64, n_tb=dict.fromkeys(LAYER_TYPES, 1)), device
        )
        decoder.buffers.alone = alone
        found.append([decoder.forward(step([token], at)) for at, token in enumerate((5, 9))])
    assert launches == [True] * (2 * len(decoder.model.linears))
    for one, two in zip(*found, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("fused", [True, False])
def test_the_base_is_added_and_may_be_the_output(layer: Any, device: str, fused: bool) -> None:
    one = layer(300, 96, k_chunk=100)
    x, base = halves(1, 96), torch.randn(1, 300, generator=torch.Generator().manual_seed(1))
    found, out = one.run(x, base=base, fused=fused), base.to(device, copy=True)
    assert_close(found, one.expected(x, base), "sums")
    config = LaunchConfig(n_tb=1 if fused else 2, fused=fused)
    compensate(x.to(device), one.selection, one.residual, Output(out, out), config, one.workspace)
    assert torch.equal(out.cpu(), found)


@pytest.mark.parametrize("mode", ["approx", "random", "static"])
def test_rows_that_share_what_they_fetch_have_the_bits_of_each_alone(
    layer: Any, device: str, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two chunks, the second of which is narrow; a channel is copied once, however many rows chose it."""
    one = layer(300, 1100, mode=mode, k_chunk=40)
    rows, positions = 4, torch.tensor([3, 4, 9, 5], dtype=torch.int32, device=device)
    x = halves(rows, 1100)
    x[1] = x[0]
    listed: list[list[int]] = []
    copy = kernels._copy_kernel

    class Watched:
        def __getitem__(self, grid: Any) -> Any:
            def launch(codes: Any, channels: Any, counts: Any, *rest: Any, **options: Any) -> Any:
                room = channels.numel() // 2
                parts = [channels[c * room :][: int(counts[c])] for c in range(2)]
                listed.append(torch.cat(parts).tolist())
                return copy[grid](codes, channels, counts, *rest, **options)

            return launch

    monkeypatch.setattr(kernels, "_copy_kernel", Watched())
    copied = torch.full((2 * 4 * 40 * one.residual.codes.shape[1],), -1, dtype=torch.int32, device=device)
    found = one.run(x, n_tb=2, positions=positions, copied=copied)
    for row in range(rows):
        alone = one.run(x[row : row + 1], positions=positions[row : row + 1], copied=copied)
        assert torch.equal(found[row : row + 1], alone)
    chosen = torch.zeros(rows, one.selection.k, dtype=torch.int32, device=device)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    select(x.to(device), one.selection, chosen, chosen.float(), flag, positions=positions)
    assert listed == [sorted(set(chosen.flatten().tolist()))]
    assert len(listed[0]) < chosen.numel()


def test_rows_fetch_for_themselves_where_copies_have_no_room(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = layer(300, 96, k_chunk=100)
    x = halves(2, 96)
    expected = one.run(x, n_tb=2)
    monkeypatch.delattr(kernels, "_copy_kernel")
    assert torch.equal(one.run(x, n_tb=2, copied=torch.zeros(10, dtype=torch.int32)), expected)


@pytest.mark.parametrize("mode", ["exact", "static", "random"])
def test_the_other_selectors_in_both_variants(layer: Any, device: str, mode: Any) -> None:
    one = layer(40, 1100, mode=mode)
    x = halves(1, 1100)
    positions = torch.tensor([5], dtype=torch.int32, device=device)
    channels = {
        "exact": plain.exact(x.float(), 16),
        "static": torch.from_numpy(budget.static_channels(one.packed.mean_square, 16)).long()[None],
        "random": torch.from_numpy(budget.random_channels(1100, 16, seed=0, layer=0, position=5)).long()[None],
    }[mode]
    expected = plain.compensate(
        torch.zeros(1, 40), x.float(), channels, plain.dequantize_residual(one.packed.residual, 40)
    )
    found = one.run(x, fused=True, positions=positions)
    assert_close(found, expected, "sums")
    assert torch.equal(found, one.run(x, n_tb=2, positions=positions))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_activations_set_the_flag(layer: Any, device: str, fused: bool, bad: float) -> None:
    one = layer(40, 1100)
    x = halves(1, 1100)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    one.run(x, fused=fused, flag=flag)
    assert int(flag) == 0
    x[0, 1099] = bad
    one.run(x, fused=fused, flag=flag)
    assert int(flag) == 1


def test_one_workspace_serves_layers_of_all_sizes(layer: Any) -> None:
    """What a larger layer left in the buffer of channels is not read by a smaller one, nor the other way round."""
    layers = [layer(40, 1100, k_chunk=200), layer(300, 96, k_chunk=20), layer(40, 2500, k_chunk=30)]
    alone = [one.run(halves(1, one.K), fused=True) for one in layers]
    shared = Workspace(layers[0].device)
    for _ in range(2):
        for one, expected in zip(layers, alone, strict=True):
            one.workspace = shared
            assert torch.equal(one.run(halves(1, one.K), fused=True), expected)
    assert shared.nbytes < 3 * 8 * 300 + 1024


def test_operands_that_do_not_fit_are_refused(layer: Any, device: str) -> None:
    one, other = layer(40, 96), layer(40, 64)
    x = halves(1, 96)
    for wrong, message in (
        ({"n_tb": 0}, "n_tb is 0"),
        ({"base": torch.zeros(1, 41)}, r"base must be contiguous float32 \[1, 40\]"),
        ({"base": torch.zeros(1, 40).half()}, "base must be"),
    ):
        with pytest.raises(ValueError, match=message):
            one.run(x, **wrong)
    with pytest.raises(ValueError, match="one launch compensates one row, not 2"):
        one.run(halves(2, 96), fused=True)
    out, config = Output(torch.zeros(2, 40, device=device)), LaunchConfig(n_tb=1, fused=True)
    with pytest.raises(ValueError, match="out must be"):
        compensate(x.to(device), one.selection, one.residual, out, config, one.workspace)
    one.residual = other.residual
    with pytest.raises(ValueError, match="over 96 channels, the residuals over 64"):
        one.run(x)


def test_the_interpreter_refuses_programs_that_would_wait_for_each_other(layer: Any, device: str) -> None:
    if device != "cpu":
        pytest.skip("a GPU runs them at the same time")
    with pytest.raises(ValueError, match="can't wait for each other"):
        layer(40, 96).run(halves(1, 96), fused=True, n_tb=2)


def viable(N: int, K: int) -> list[int]:
    """Numbers of programs none of which is idle in both phases (QDEC A.1)."""
    segments, chunks = -(-N // 256), -(-K // 1024)
    fetching = [n for n in range(1, segments + 1) if -(-segments // -(-segments // n)) == n]
    return sorted({*range(1, chunks + 1), *fetching})


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "K"), [(6144, 4096), (4096, 14336), (4000, 4000)])
@pytest.mark.parametrize("bits", BITS)
def test_fused_with_every_number_of_programs_on_a_gpu(cuda: str, layer: Any, N: int, K: int, bits: int) -> None:
    one = layer(N, K, bits=bits)
    x = halves(1, K)
    expected = one.run(x, n_tb=8)
    assert_close(expected, one.expected(x), "sums")
    assert one.residual.codes.is_pinned()
    for n_tb in viable(N, K):
        assert torch.equal(one.run(x, n_tb=n_tb, fused=True), expected), n_tb


def test_a_wait_for_a_program_that_never_comes_ends(layer: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters that were left wrong stop the launch with a message, where it would hang for ever."""
    if device == "cuda":
        pytest.skip("a stopped launch ends the process's use of the GPU")
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, debug=True))  # it takes no options of launches
    monkeypatch.setattr(kernels, "_LOOKS", tl.constexpr(3))
    one = layer(70, 1024)
    one.workspace.counters(2)[0] = -1
    with pytest.raises(Exception, match="thread blocks that never arrived"):
        one.run(halves(1, 1024), fused=True)


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["one launch", "compensation first", "product first"])
@pytest.mark.parametrize("n_tb", [1, 4, 8, 24])
def test_many_blocks_wait_for_each_other_beside_a_product(cuda: str, n_tb: int, order: Any) -> None:
    from tests.lab.gpu.graph import replayed
    from tests.lab.gpu.layers import CompensatedLayer

    layer = CompensatedLayer("gate_up", (28672, 4096), 4, 16, torch.device(cuda), inputs=4)
    assert replayed(layer, n_tb, order, 500)["correct"]


@pytest.mark.gpu
def test_a_decoder_with_many_blocks_replays_what_it_launches(cuda: str, small: Any) -> None:
    """Wide enough for many blocks: gate and up have 64 lines of residuals."""
    wide = {"hidden_size": 2048, "intermediate_size": 8192, "num_layers": 2, "num_heads": 16, "num_kv_heads": 4}
    model = small({**wide, "head_dim": 128, "vocab_size": 4096, "max_context": 1024}, bits=4, residual_bits=4)
    n_tb = {"qkv": 8, "o": 8, "gate_up": 24, "down": 8, "head": 8}
    options = DecoderOptions(context=1024, max_rows=8, k_chunk=32, n_tb=n_tb)
    captured, launched = (TritonDecoder(model, options, cuda) for _ in range(2))
    blocks = {linear.n_tb for linear in captured.model.linears.values()}
    assert max(blocks) >= 16
    assert min(blocks) > 1
    assert_replayed(captured, launched, (step([(7 * position) % 4096], position) for position in range(200)))
