"""The product of a low-bit matrix with many rows, as prefill needs it, beside half precision: TFLOP/s."""

from __future__ import annotations

import torch

from runtime.backends.triton.kernels.gemm import gemm
from runtime.backends.triton.workspace import Workspace
from tests.lab.gpu.clock import copies_past_cache, race
from tests.lab.gpu.layers import Peer, activations, check_row, copies, half_precision, random_weight, torch_int4
from tests.lab.gpu.record import Part
from tests.lab.gpu.sizes import Sizes


def measure(part: Part, sizes: Sizes, device: torch.device) -> None:
    """A row for each matrix, number of rows and way to multiply."""
    for bits in sizes.bits:
        for rows in sizes.prefill_rows:
            N, K = sizes.spec.linear_shape("o")
            weight, x = random_weight((N, K), bits, device), activations(rows, K, device)
            out = torch.full((rows, N), float("nan"), device=device)
            gemm(x, weight, out, Workspace(device))
            part.add(check_row(weight, x, out))
    for rows in sorted(sizes.prefill_rows, key=lambda rows: abs(rows - 128)):
        for kind, shape in sizes.shapes.items():
            if not part.begin({"kind": kind, "M": rows}):
                continue
            contestants = {f"ours {bits} bits": _ours(shape, bits, rows, sizes, device) for bits in sizes.bits}
            contestants["float16"] = half_precision(shape, rows, sizes, device)
            if device.type == "cuda":
                contestants["torch _weight_int4pack_mm"] = torch_int4(shape, rows, sizes, device)
            launches = {name: peer.launches for name, peer in contestants.items()}
            operations = 2 * rows * shape[0] * shape[1]
            for name, times in race(launches, device, rounds=max(1, sizes.rounds // 4)).items():
                row = {"what": name, "kind": kind, "M": rows, "N": shape[0], "K": shape[1], **times.microseconds()}
                part.add(row | {"tflop_s": round(operations / times.p50 / 1e12, 2)})


def _ours(shape: tuple[int, int], bits: int, rows: int, sizes: Sizes, device: torch.device) -> Peer:
    N, K = shape
    weight = random_weight(shape, bits, device)
    x, out, workspace = activations(rows, K, device), torch.empty(rows, N, device=device), Workspace(device)
    weights = copies(weight, copies_past_cache(weight.nbytes, sizes.rotated_bytes))
    return Peer([lambda w=w: gemm(x, w, out, workspace) for w in weights], weight.nbytes)
