"""Residuals in page-locked host memory, which kernels read over PCIe without a copy.

Kernels can only read page-locked memory, of which there is not always enough. Layers whose residuals cannot be locked
run without compensation, which only costs quality, and one warning says how many layers are affected and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from models.packed import PackedLinear, PackedResidual
from models.packing import packed_width
from runtime.errors import BackendError, byte_count
from tuner.detect import detect_memory

LINE_WORDS = 32
"""32-bit words of a line: 128 bytes, the largest read that a GPU issues on the bus."""
_WORD_BITS = 32
_MARGIN = 512 << 20
"""Bytes of free memory to leave to the rest of the system, which cannot reclaim locked pages."""
_BITS = (2, 4, 8, 16)
_HALVES = 16
"""Bits of residuals that are halves, without scales."""
REMEDY = "To compensate all"
"""Beginning of the advice in a warning."""

Allocate = Callable[[int], torch.Tensor]
"""Bytes -> uint8 [bytes], in memory that kernels can read. Raises `PageLockError`."""


class PageLockError(BackendError):
    """The system refused page-locked memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuResidual:
    """Residuals of one linear layer, input-channel-major, in the kernels' layout; or those of a block's experts."""

    bits: int  # 2, 4, 8 or 16
    shape: tuple[int, int]  # (N, K) of the layer, or of an expert's
    codes: torch.Tensor
    """int32 [K, lines * 32] in page-locked memory of the CPU: [K, N] in canonical packing (`models.packing`), two
    halves to a word at 16 bits, each row filled up with zeros to whole lines of 128 bytes. Of experts [E * K, lines *
    32], one behind the other."""
    scales: torch.Tensor | None  # float16 [N] on the device, of experts [E, N]; None at 16 bits

    @property
    def lines(self) -> int:
        """Lines of a row; at 4 bits, the segments of 256 outputs of QDEC's appendix A.1."""
        return self.codes.shape[1] // LINE_WORDS


@dataclass(frozen=True, slots=True, kw_only=True)
class LockLimits:
    """Limits of page-locked memory on this machine."""

    available_bytes: int  # Available memory
    memlock_bytes: int | None
    """The process's limit of locked memory (RLIMIT_MEMLOCK), None if it has none.

    The user is told it when locking fails, but it is not decisive: NVIDIA's driver locks pages on its own account, and
    with the usual limit of 8 MiB locks gigabytes all the same.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedResiduals:
    """The residuals of a model that could be loaded."""

    layers: Mapping[str, GpuResidual]  # By name of the linear layer; missing layers run without compensation
    warning: str | None  # Which are missing, why, and advice; None if none are


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


def words_of(shape: tuple[int, int], bits: int) -> int:
    """Words of the residuals of a layer [N, K]."""
    N, K = shape
    return K * row_lines(N, bits) * LINE_WORDS


def locked_bytes(shape: tuple[int, int], bits: int, count: int = 1) -> int:
    """Bytes locked for the residuals of a layer, or of `count` experts: torch page-locks powers of two."""
    return 1 << max(0, 4 * count * words_of(shape, bits) - 1).bit_length()


def fitting(sizes: Mapping[str, int], limits: LockLimits) -> tuple[str, ...]:
    """The layers, from the first on, whose residuals of so many bytes fit together in the free memory."""
    room = limits.available_bytes - _MARGIN
    kept = []
    for name, nbytes in sizes.items():
        room -= nbytes
        if room < 0:
            break
        kept.append(name)
    return tuple(kept)


def page_locked(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] of page-locked memory; raises PageLockError if the driver or the system refused."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:  # torch has no narrower type for what the driver answers
        raise PageLockError(f"{byte_count(nbytes)} could not be page-locked: {str(error).splitlines()[0]}") from error


def ordinary(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] of ordinary memory, for Triton's interpreter."""
    return torch.empty(nbytes, dtype=torch.uint8)


def residuals_to_device(
    packed: Sequence[PackedResidual],
    shape: tuple[int, int],
    device: torch.device | str,
    *,
    allocate: Allocate | None = None,
) -> GpuResidual:
    """Load the residuals of a layer [N, K], or of a block's experts: codes are page-locked, scales are on the device.

    Raises:
        PageLockError: there is no page-locked memory for them.
        ValueError: the codes do not match the layer.
    """
    N, K = shape
    bits = packed[0].bits
    if bits not in _BITS or any(each.bits != bits for each in packed):
        raise ValueError(f"residuals have 2, 4, 8 or 16 bits, not {bits}, and those of all experts the same")
    lines = row_lines(N, bits)
    if allocate is None:
        allocate = ordinary if torch.device(device).type == "cpu" else page_locked
    codes = allocate(len(packed) * K * lines * LINE_WORDS * 4).view(torch.int32).view(-1, lines * LINE_WORDS)
    for number, each in enumerate(packed):
        stored = _words(each, shape)
        target = codes[number * K : (number + 1) * K].numpy()
        target[:, : stored.shape[1]] = stored
        target[:, stored.shape[1] :] = 0
    scales = None
    if bits != _HALVES:
        found = [_scales(each, N) for each in packed]
        scales = torch.from_numpy(found[0] if len(packed) == 1 else np.stack(found)).to(device)
    return GpuResidual(bits=bits, shape=shape, codes=codes, scales=scales)


def _words(packed: PackedResidual, shape: tuple[int, int]) -> npt.NDArray[np.int32]:
    """The stored words of residuals, int32 [K, words]; raises ValueError if they do not match the layer."""
    (N, K), bits = shape, packed.bits
    stored = np.ascontiguousarray(packed.codes)
    kind, width = (np.dtype(np.float16), N) if bits == _HALVES else (np.dtype(np.int32), packed_width(N, bits))
    if stored.dtype != kind or stored.shape != (K, width):
        raise ValueError(f"{stored.dtype} {list(stored.shape)} are not the {bits}-bit residuals of a layer {[N, K]}")
    padded = np.pad(stored, ((0, 0), (0, N % 2))) if bits == _HALVES else stored
    words: npt.NDArray[np.int32] = padded.view(np.int32)
    return words


def _scales(packed: PackedResidual, N: int) -> npt.NDArray[np.float16]:
    """Their scales, float16 [N]; raises ValueError where there are none."""
    if packed.scales is None or packed.scales.shape != (N,):
        raise ValueError(f"{packed.bits}-bit residuals need a scale for each of the {N} outputs")
    return np.array(packed.scales, dtype=np.float16)


def load_residuals(
    linears: Iterable[PackedLinear],
    device: torch.device | str,
    experts: Mapping[str, Sequence[PackedLinear]] | None = None,
    *,
    limits: LockLimits | None = None,
    allocate: Allocate | None = None,
) -> LoadedResiduals:
    """Load the residuals of a model's layers, in its order, as far as memory allows; `limits` are looked up if None.

    Layers without residuals are skipped; the first expert's name stands for all `experts` of a block. After a failure
    no further layers are tried: each would take from the little memory that is left.
    """
    of = {} if experts is None else experts
    wanted = {packed.name: packed for packed in linears if packed.residual is not None}
    sizes = {
        name: locked_bytes(packed.shape, packed.residual.bits, len(of.get(name, (packed,))))
        for name, packed in wanted.items()
        if packed.residual is not None
    }
    limits = limits if limits is not None else lock_limits()
    placed: dict[str, GpuResidual] = {}
    reason = f"only {byte_count(max(0, limits.available_bytes))} of memory are free"
    for name in fitting(sizes, limits):
        found = [packed.residual for packed in of.get(name, (wanted[name],)) if packed.residual is not None]
        try:
            placed[name] = residuals_to_device(found, wanted[name].shape, device, allocate=allocate)
        except PageLockError as error:
            reason = str(error)
            break
    missing = [name for name in wanted if name not in placed]
    return LoadedResiduals(layers=placed, warning=_warning(missing, sizes, limits, reason) if missing else None)


def _warning(missing: list[str], sizes: Mapping[str, int], limits: LockLimits, reason: str) -> str:
    wanted = byte_count(sum(sizes.values()))
    locked = "" if limits.memlock_bytes is None else f" (now {byte_count(limits.memlock_bytes)})"
    return (
        f"{len(missing)} of {len(sizes)} layers run without error compensation, from {missing[0]} on: residuals take "
        f"{wanted} of page-locked memory, and {reason}. {REMEDY}: close other programs, raise the limit of "
        f"locked memory with `ulimit -l`{locked}, under WSL2 give it more memory in .wslconfig, or quantize the model "
        "with fewer residual bits"
    )
