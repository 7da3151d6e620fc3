"""The product of a low-bit matrix with one row: microseconds, GB/s of weights, percent of the bandwidth of reads.

Beside it, in the same rounds, torch's 4-bit kernel, gemlite's where it is installed, and half precision; then the same
product in other divisions. Weights are rotated past the second-level cache.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Mapping

import torch

from runtime.backends.triton.codes import weight_form
from runtime.backends.triton.kernels.gemv import LaunchConfig, capability, configure, gemv, resident, sm_count
from runtime.backends.triton.kernels.sums import piece_sums
from runtime.backends.triton.sizes import BLOCK, pieces
from runtime.backends.triton.workspace import Workspace
from tests.bench.gpu import peers
from tests.bench.gpu.bandwidth import read_gb_s
from tests.bench.gpu.clock import copies_past_cache, race
from tests.bench.gpu.matrices import activations, check_row, copies, random_weight
from tests.bench.gpu.peers import Peer
from tests.bench.gpu.report import Part
from tests.bench.gpu.sizes import Sizes


def measure(part: Part, sizes: Sizes, device: torch.device) -> None:
    """A row for each of a block's four matrices and each way to multiply with it."""
    limit = read_gb_s(sizes, device)
    part.add({"what": "read", "gb_s": limit})
    for bits in sizes.bits:
        _check(part, bits, sizes, device)
    for kind, shape in sizes.shapes.items():
        if part.late():
            part.add({"what": "left out for want of time", "kind": kind})
            continue
        contestants = {f"ours {bits} bits": ours(shape, bits, sizes, device) for bits in sizes.bits}
        contestants["float16"] = peers.half_precision(shape, 1, sizes, device)
        if device.type == "cuda":
            contestants["torch _weight_int4pack_mm"] = peers.torch_int4(shape, 1, sizes, device)
        _compare(part, kind, shape, contestants, sizes, device, limit)
    divisions(part, sizes, device)
    if device.type != "cuda" or importlib.util.find_spec("gemlite") is None:
        part.add({"what": "gemlite is not installed"})
        return
    for kind, shape in sizes.shapes.items():
        if part.late():
            part.add({"what": "left out for want of time: gemlite", "kind": kind})
            continue
        contestants = {"ours 4 bits": ours(shape, 4, sizes, device)}
        contestants["gemlite 4 bits"] = peers.gemlite_int4(shape, 1, sizes, device)
        _compare(part, kind, shape, contestants, sizes, device, limit)


def divisions(part: Part, sizes: Sizes, device: torch.device) -> None:
    """A row for each matrix: microseconds by parts along its input channels, and the parts that are chosen."""
    for bits, (kind, (N, K)) in itertools.product(sizes.bits, sizes.shapes.items()):
        if part.late():
            part.add({"what": "left out for want of time: divisions", "kind": kind, "bits": bits})
            continue
        form = weight_form(random_weight((N, K), bits, device))
        chosen = configure(N, K, sm_count(device), resident(1, form, capability(device))).split
        blocks = -(-K // BLOCK)
        splits = sorted({-(-blocks // each) for each in range(1, blocks + 1)} | {chosen, min(blocks, chosen + 2)})
        ways = {str(n): ours((N, K), bits, sizes, device, LaunchConfig(split=n)).launches for n in splits}
        times = race(ways, device, rounds=max(1, sizes.rounds // 4))
        row = {"what": "parts of a product", "kind": kind, "bits": bits, "chosen": chosen}
        part.add(row | {"us": {n: round(1e6 * one.p50, 2) for n, one in times.items()}})


def ours(
    shape: tuple[int, int], bits: int, sizes: Sizes, device: torch.device, config: LaunchConfig | None = None
) -> Peer:
    """This program's kernel."""
    N, K = shape
    weight = random_weight(shape, bits, device)
    x, out, workspace = activations(1, K, device)[0], torch.empty(N, device=device), Workspace(device)
    sums = torch.empty(1, pieces(K), device=device)
    piece_sums(x[None], sums)  # in a model, the kernel that makes x leaves them
    weights = copies(weight, copies_past_cache(weight.nbytes, sizes.rotated_bytes))
    return Peer([lambda w=w: gemv(x, w, out, workspace, config, sums=sums[0]) for w in weights], weight.nbytes)


def _check(part: Part, bits: int, sizes: Sizes, device: torch.device) -> None:
    N, K = sizes.spec.linear_shape("o")
    weight, x = random_weight((N, K), bits, device), activations(1, K, device)
    out = torch.full((1, N), float("nan"), device=device)
    gemv(x[0], weight, out[0], Workspace(device))
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
