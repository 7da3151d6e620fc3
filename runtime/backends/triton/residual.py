"""Residuals in page-locked host memory, which kernels read over PCIe without a copy.

Kernels can only read page-locked memory, of which there is not always enough. Layers whose residuals cannot be locked
run without compensation, which only costs quality, and one warning says how many layers are affected and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from models.packed import PackedLinear, PackedResidual
from models.packing import packed_width
from runtime.errors import BackendError, size
from tuner.detect import detect_memory

LINE_WORDS = 32
"""32-bit words of a line: 128 bytes, the largest read that a GPU issues on the bus."""
_WORD_BITS = 32
_MARGIN = 512 << 20
"""Bytes of free memory to leave to the rest of the system, which cannot reclaim locked pages."""
_BITS = (2, 4, 8, 16)
REMEDY = "To compensate all"
"""Beginning of the advice in a warning."""

Allocate = Callable[[int], torch.Tensor]
"""Bytes -> uint8 [bytes], in memory that kernels can read. Raises `PageLockError`."""


class PageLockError(BackendError):
    """The system refused page-locked memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuResidual:
    """Residuals of one linear layer, input-channel-major, in the kernels' layout."""

    bits: int
    """2, 4, 8 or 16."""
    shape: tuple[int, int]
    """(N, K) of the layer."""
    codes: torch.Tensor
    """int32 [K, lines * 32] in page-locked memory of the CPU: [K, N] in canonical packing (`models.packing`), two
    halves to a word at 16 bits, each row filled up with zeros to whole lines of 128 bytes."""
    scales: torch.Tensor | None
    """float16 [N] on the device; None at 16 bits."""

    @property
    def lines(self) -> int:
        """Lines of a row; at 4 bits, the segments of 256 outputs of QDEC's appendix A.1."""
        return self.codes.shape[1] // LINE_WORDS

    @property
    def nbytes(self) -> int:
        """Bytes of the codes in host memory."""
        return self.codes.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LockLimits:
    """Limits of page-locked memory on this machine."""

    available_bytes: int
    """Available memory."""
    memlock_bytes: int | None
    """The process's limit of locked memory (RLIMIT_MEMLOCK), None if it has none.

    The user is told it when locking fails, but it is not decisive: NVIDIA's driver locks pages on its own account, and
    with the usual limit of 8 MiB locks gigabytes all the same.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedResiduals:
    """The residuals of a model that could be loaded."""

    layers: Mapping[str, GpuResidual]
    """By name of the linear layer; missing layers run without compensation."""
    warning: str | None
    """Which are missing, why, and advice; None if none are."""

    @property
    def nbytes(self) -> int:
        """Bytes of page-locked memory in use."""
        return sum(residual.nbytes for residual in self.layers.values())


def lock_limits() -> LockLimits:
    """The current limits of this process; locked memory counts against its control group too."""
    limit = None
    try:
        import resource
    except ImportError:  # a system without such limits
        pass
    else:
        soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        limit = None if soft == resource.RLIM_INFINITY else soft
    return LockLimits(available_bytes=detect_memory().available_bytes, memlock_bytes=limit)


def row_lines(N: int, bits: int) -> int:
    """Lines of 128 bytes per input channel, for N outputs."""
    return -(-N * bits // (_WORD_BITS * LINE_WORDS))


def locked_bytes(shape: tuple[int, int], bits: int) -> int:
    """Bytes locked for a layer's residuals: torch allocates page-locked memory in powers of two."""
    N, K = shape
    return 1 << max(0, K * row_lines(N, bits) * LINE_WORDS * 4 - 1).bit_length()


def fitting(sizes: Mapping[str, int], limits: LockLimits) -> tuple[str, ...]:
    """Number of layers, from the first on, whose residuals fit together in the free memory.

    Args:
        sizes: Bytes of each layer's residuals, in the model's order.
        limits: The limits.
    """
    room = limits.available_bytes - _MARGIN
    kept = []
    for name, nbytes in sizes.items():
        room -= nbytes
        if room < 0:
            break
        kept.append(name)
    return tuple(kept)


def page_locked(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] of page-locked memory.

    Raises:
        PageLockError: the driver or the system refused.
    """
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:  # torch has no narrower type for what the driver answers
        raise PageLockError(f"{size(nbytes)} could not be page-locked: {str(error).splitlines()[0]}") from error


def ordinary(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] of ordinary memory, for Triton's interpreter."""
    return torch.empty(nbytes, dtype=torch.uint8)


def residual_to_device(
    packed: PackedResidual, shape: tuple[int, int], device: torch.device | str, *, allocate: Allocate | None = None
) -> GpuResidual:
    """Load one layer's residuals: codes into page-locked memory, scales onto the device.

    Args:
        packed: The stored residuals.
        shape: (N, K) of the layer.
        device: The kernels' device; with `cpu`, under the interpreter, codes are in ordinary memory.
        allocate: Allocator of host memory; None: the device's default.

    Raises:
        PageLockError: there is no page-locked memory for them.
        ValueError: the codes do not match the layer.
    """
    N, K = shape
    bits = packed.bits
    if bits not in _BITS:
        raise ValueError(f"residuals have 2, 4, 8 or 16 bits, not {bits}")
    stored = np.ascontiguousarray(packed.codes)
    kind, width = (np.dtype(np.float16), N) if bits == 16 else (np.dtype(np.int32), packed_width(N, bits))
    if stored.dtype != kind or stored.shape != (K, width):
        raise ValueError(f"{stored.dtype} {list(stored.shape)} are not the {bits}-bit residuals of a layer {[N, K]}")
    if bits == 16:
        stored = np.pad(stored, ((0, 0), (0, N % 2))).view(np.int32)
    lines = row_lines(N, bits)
    if allocate is None:
        allocate = ordinary if torch.device(device).type == "cpu" else page_locked
    codes = allocate(K * lines * LINE_WORDS * 4).view(torch.int32).view(K, lines * LINE_WORDS)
    target = codes.numpy()
    target[:, : stored.shape[1]] = stored
    target[:, stored.shape[1] :] = 0
    scales = None
    if bits != 16:
        if packed.scales is None or packed.scales.shape != (N,):
            raise ValueError(f"{bits}-bit residuals need a scale for each of the {N} outputs")
        scales = torch.from_numpy(np.array(packed.scales, dtype=np.float16)).to(device)
    return GpuResidual(bits=bits, shape=shape, codes=codes, scales=scales)


def load_residuals(
    linears: Iterable[PackedLinear],
    device: torch.device | str,
    *,
    limits: LockLimits | None = None,
    allocate: Allocate | None = None,
) -> LoadedResiduals:
    """Load the residuals of a model's layers, as far as memory allows.

    Layers without residuals are skipped. After a failure no further layers are tried: each would take from the little
    memory that is left.

    Args:
        linears: The layers to compensate, in the model's order.
        device: The kernels' device.
        limits: The limits; looked up if None.
        allocate: See `residual_to_device`.
    """
    wanted = {packed.name: packed for packed in linears if packed.residual is not None}
    sizes = {
        name: locked_bytes(packed.shape, packed.residual.bits)
        for name, packed in wanted.items()
        if packed.residual is not None
    }
    limits = limits if limits is not None else lock_limits()
    placed: dict[str, GpuResidual] = {}
    reason = f"only {size(max(0, limits.available_bytes))} of memory are free"
    for name in fitting(sizes, limits):
        residual = wanted[name].residual
        assert residual is not None
        try:
            placed[name] = residual_to_device(residual, wanted[name].shape, device, allocate=allocate)
        except PageLockError as error:
            reason = str(error)
            break
    missing = [name for name in wanted if name not in placed]
    return LoadedResiduals(layers=placed, warning=_warning(missing, sizes, limits, reason) if missing else None)


def _warning(missing: list[str], sizes: Mapping[str, int], limits: LockLimits, reason: str) -> str:
    wanted = size(sum(sizes.values()))
    locked = "" if limits.memlock_bytes is None else f" (now {size(limits.memlock_bytes)})"
    return (
        f"{len(missing)} of {len(sizes)} layers run without error compensation, from {missing[0]} on: residuals take "
        f"{wanted} of page-locked memory, and {reason}. {REMEDY}: close other programs, raise the limit of "
        f"locked memory with `ulimit -l`{locked}, under WSL2 give it more memory in .wslconfig, or quantize the model "
        "with fewer residual bits"
    )
