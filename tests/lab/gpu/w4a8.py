"""W4A8 on INT8 tensor cores beside half precision and torch's 4-bit kernel: microseconds by rows, tokens/s by batch.

One row is also what our own 4-bit matrix-vector kernel does: which of the two a decoded token should take is decided
here. A batch's tokens a second are those of a model's matrices alone, without attention.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from models import per_token
from runtime.backends.operations import linear as reference
from runtime.backends.triton.kernels.activations import Tokens
from runtime.backends.triton.kernels.gemm import gemm
from runtime.backends.triton.kernels.w4a8 import W4A8Linear, gemm_w4a8, repack_w4a8
from runtime.backends.triton.workspace import Workspace
from tests.lab.gpu.clock import copies_past_cache, race
from tests.lab.gpu.layers import Peer, activations, copies, half_precision, random_weight, torch_int4
from tests.lab.gpu.record import Part
from tests.lab.gpu.sizes import Sizes
from tests.lab.models import random_w4a8

GROUP_SIZES = (128, 0)
"""With groups and without."""


def measure(part: Part, sizes: Sizes, device: torch.device) -> None:
    """A row for each number of rows, matrix and way to multiply, and then one for each batch and way."""
    for group_size in GROUP_SIZES:
        part.add(_check(group_size, sizes, device))
    for rows in sizes.batches:
        seconds: dict[str, float] = {}
        for kind, shape in sizes.shapes.items():
            if not part.begin({"kind": kind, "M": rows}):
                break
            contestants = _contestants(shape, rows, sizes, device)
            launches = {name: peer.launches for name, peer in contestants.items()}
            for name, times in race(launches, device, rounds=max(1, sizes.rounds // 4)).items():
                seconds[name] = seconds.get(name, 0.0) + times.p50
                row = {"what": name, "kind": kind, "M": rows, "N": shape[0], "K": shape[1], **times.microseconds()}
                row["gb_s"] = round(contestants[name].nbytes / times.p50 / 1e9, 1)
                part.add(row | {"tera_operations_s": round(2 * rows * shape[0] * shape[1] / times.p50 / 1e12, 2)})
        else:
            for name, block in seconds.items():
                each = rows / (block * sizes.spec.num_layers)
                part.add({"what": f"blocks, {name}", "batch": rows, "tokens_per_second": round(each, 1)})


def _contestants(shape: tuple[int, int], rows: int, sizes: Sizes, device: torch.device) -> dict[str, Peer]:
    """Ways to multiply a matrix with so many rows."""
    names = {0: "W4A8 per channel"}
    found = {names.get(size, f"W4A8 g{size}"): _ours(shape, rows, size, sizes, device) for size in GROUP_SIZES}
    found["W4A16"] = _weight_only(shape, rows, sizes, device)
    found["float16"] = half_precision(shape, rows, sizes, device)
    if device.type == "cuda":
        found["torch _weight_int4pack_mm"] = torch_int4(shape, rows, sizes, device)
    return found


def _ours(shape: tuple[int, int], rows: int, group_size: int, sizes: Sizes, device: torch.device) -> Peer:
    (N, K), weight = shape, _weight(shape, group_size, device)
    x, out = _tokens(rows, K, weight, device), torch.empty(rows, N, device=device)
    count = copies_past_cache(weight.nbytes, sizes.rotated_bytes)
    weights = [weight, *(_copied(weight) for _ in range(count - 1))]
    return Peer([lambda w=w: gemm_w4a8(x, w, out) for w in weights], weight.nbytes)


def _weight_only(shape: tuple[int, int], rows: int, sizes: Sizes, device: torch.device) -> Peer:
    """Our 4 bits with activations in half precision: by the matrix-vector kernel up to 16 rows."""
    (N, K), weight = shape, random_weight(shape, 4, device)
    x, out, workspace = activations(rows, K, device), torch.empty(rows, N, device=device), Workspace(device)
    weights = copies(weight, copies_past_cache(weight.nbytes, sizes.rotated_bytes))
    return Peer([lambda w=w: gemm(x, w, out, workspace) for w in weights], weight.nbytes)


@cache
def _weight(shape: tuple[int, int], group_size: int, device: torch.device) -> W4A8Linear:
    return repack_w4a8(random_w4a8("random", shape, group_size), device)


def _copied(weight: W4A8Linear) -> W4A8Linear:
    return replace(
        weight, codes=weight.codes.clone(), scales=weight.scales.clone(), groups=weight.groups.clone(), bias=None
    )


def _tokens(rows: int, K: int, weight: W4A8Linear, device: torch.device) -> Tokens:
    """Normally distributed activations, rounded."""
    codes, scales = per_token.quantize(torch.randn(rows, K))
    filled = torch.nn.functional.pad(codes, (0, weight.width - K))
    sums = filled.int().view(rows, -1, weight.group_size or weight.width).sum(2, dtype=torch.int32)
    return Tokens(filled.to(device), scales[:, 0].to(device), sums.to(device), weight.group_size)


def _check(group_size: int, sizes: Sizes, device: torch.device) -> dict[str, object]:
    """Whether a product has the bits of the integer reference."""
    shape = sizes.spec.linear_shape("o")
    packed, weight = random_w4a8("random", shape, group_size), _weight(shape, group_size, device)
    x, out = _tokens(5, shape[1], weight, device), torch.full((5, shape[0]), float("nan"), device=device)
    gemm_w4a8(x, weight, out)
    codes, scales = x.codes[:, : shape[1]].cpu(), x.scales[:, None].cpu()
    expected = reference.gemm_w4a8(codes, scales, reference.integer_weights(packed), packed)
    return {"what": "check", "group_size": group_size, "correct": torch.equal(out.cpu(), expected)}
