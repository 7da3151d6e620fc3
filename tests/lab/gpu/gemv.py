"""The product of a low-bit matrix with one row: microseconds, GB/s of weights, percent of the bandwidth of reads.

Beside it, in the same rounds, torch's 4-bit kernel and half precision. Weights are rotated past the second-level cache.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from runtime.backends.triton.kernels.activations import piece_sums
from runtime.backends.triton.kernels.gemv import few_rows
from runtime.backends.triton.sizes import pieces
from runtime.backends.triton.workspace import Workspace
from tests.lab.gpu.bandwidth import read_gb_s
from tests.lab.gpu.clock import copies_past_cache, race
from tests.lab.gpu.layers import Peer, activations, check_row, copies, half_precision, random_weight, torch_int4
from tests.lab.gpu.record import Part
from tests.lab.gpu.sizes import Sizes


def measure(part: Part, sizes: Sizes, device: torch.device) -> None:
    """A row for each of a block's four matrices and each way to multiply with it."""
    limit = read_gb_s(sizes, device)
    part.add({"what": "read", "gb_s": limit})
    for bits in sizes.bits:
        _check(part, bits, sizes, device)
    for kind, shape in sizes.shapes.items():
        if not part.begin({"kind": kind}):
            continue
        contestants = {f"ours {bits} bits": ours(shape, bits, sizes, device) for bits in sizes.bits}
        contestants["float16"] = half_precision(shape, 1, sizes, device)
        if device.type == "cuda":
            contestants["torch _weight_int4pack_mm"] = torch_int4(shape, 1, sizes, device)
        _compare(part, kind, shape, contestants, sizes, device, limit)


def ours(shape: tuple[int, int], bits: int, sizes: Sizes, device: torch.device) -> Peer:
    """This program's kernel."""
    N, K = shape
    weight = random_weight(shape, bits, device)
    x, out, workspace = activations(1, K, device), torch.empty(1, N, device=device), Workspace(device)
    sums = torch.empty(1, pieces(K), device=device)
    piece_sums(x, sums)  # in a model, the kernel that makes x leaves them
    weights = copies(weight, copies_past_cache(weight.nbytes, sizes.rotated_bytes))
    return Peer([lambda w=w: few_rows(x, w, out, workspace, sums=sums) for w in weights], weight.nbytes)


def _check(part: Part, bits: int, sizes: Sizes, device: torch.device) -> None:
    N, K = sizes.spec.linear_shape("o")
    weight, x = random_weight((N, K), bits, device), activations(1, K, device)
    out = torch.full((1, N), float("nan"), device=device)
    few_rows(x, weight, out, Workspace(device))
    part.add(check_row(weight, x, out))


def _compare(
    part: Part,
    kind: str,
    shape: tuple[int, int],
    contestants: Mapping[str, Peer],
    sizes: Sizes,
    device: torch.device,
    limit: float,
) -> None:
    launches = {name: peer.launches for name, peer in contestants.items()}
    for name, times in race(launches, device, rounds=sizes.rounds).items():
        gb_s = contestants[name].nbytes / times.p50 / 1e9
        row = {"what": name, "kind": kind, "N": shape[0], "K": shape[1], **times.microseconds()}
        row |= {"weight_bytes": contestants[name].nbytes, "gb_s": round(gb_s, 1)}
        part.add(row | {"percent_of_reads": round(100 * gb_s / limit, 1) if limit else None})
