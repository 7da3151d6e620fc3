"""The backends, best first, and the contract of one: whether it can run here, and how to open a model on it.

Adding one: a folder with a `backend.py`, and a line here. Nothing outside this package imports anything of a backend's
folder, and no backend imports another's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from models.progress import ProgressCallback, ignore_progress
from models.recipe import Recipe
from models.spec import ModelSpec
from models.weights import Weights
from runtime.backends.decoder import Decoder, DecoderOptions
from runtime.errors import BackendError, Problem
from runtime.kv.kinds import KVKind

if TYPE_CHECKING:
    from tuner.detect import MemoryInfo
    from tuner.gpu import GpuInfo
    from tuner.timer import Timer

BufferBytes = Callable[[int, int], int]
"""(tokens of context, most rows of a step) -> bytes of activations, logits and rotary tables."""
D = TypeVar("D", bound=Decoder, contravariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device; timings taken on it are good for another one that is equal.

    Source: QDEC §4.4 (a profile belongs to a model and a device).
    """

    name: str
    """As it calls itself."""
    capability: str
    """What it can do: `avx512, 8 threads`, or the compute capability `8.9`."""
    driver: str | None
    """Version of its driver; None for a processor."""
    sm_count: int | None = None
    """Multiprocessors; None for a processor."""
    shared_bytes: int | None = None
    """Shared memory of a thread block in bytes; None for a processor."""

    def __str__(self) -> str:
        """For a person."""
        return f"{self.name} ({self.capability})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """Whether a backend can run on this machine."""

    usable: bool
    """Whether it can."""
    reason: str
    """Why, or why not, in half a sentence."""
    fix: str | None = None
    """What a person can do about it; None where there is nothing to be done, or no need."""
    variant: str | None = None
    """What its kernels are built for; None where they can't be built, or need not be."""
    memory: MemoryInfo | None = None
    """The memory that weights and cache have to fit; None: main memory."""
    gpu: GpuInfo | None = None
    """The card that it would run on, or would if it could."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What the weights of a stored model take."""

    weight_bytes: int
    """Packed linear layers, norms and scales."""
    residual_bytes: int = 0
    """Residual codes; they stay mapped from the file, and the system may drop and read them again."""
    whole: bool = False
    """Whether every residual will be read at every step."""
    recipe: Recipe | None = None
    """How the weights are stored, for backends whose layout is another one; None: as good as the file's."""

    def __post_init__(self) -> None:
        if self.weight_bytes < 0 or self.residual_bytes < 0:
            raise ValueError(f"sizes cannot be negative: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a model takes on a backend, apart from cache and buffers. All sizes in bytes."""

    weight_bytes: int
    """Weights in the backend's own layout."""
    residual_bytes: int = 0
    """Residuals, in main memory."""
    residuals_beside: bool = False
    """Whether they are copied to where the weights are and have to fit there too; else they stay mapped from the file,
    or are in another memory."""
    overhead_bytes: int = 0
    """What the backend itself takes: a driver's context, say."""
    buffer_bytes: BufferBytes | None = None
    """What its buffers take; None: about as many as `runtime.load.memory.buffer_bytes` says."""


class Backend(Protocol[D]):
    """One way to run models. Importing its module is cheap; what it stands on is imported when a method needs it."""

    name: str
    """What `--backend` calls it."""
    label: str
    """What a sentence calls it: `the CPU backend`."""
    kinds: Sequence[KVKind]
    """Kinds of KV cache that it has."""
    untuned: Problem | None
    """Why a slowdown budget has no effect on it; None where it has."""
    step_rows: int
    """Rows of a prompt that it takes in one step."""
    prompt_levels: Sequence[int]
    """Channels per 1024 by which its prompts may be compensated, the most first; the tuner takes the first one that a
    budget pays for."""

    def probe(self) -> Presence:
        """Whether it can run here. Free memory is as it is now."""
        ...

    def footprint(self, spec: ModelSpec, sizes: ModelSizes, *, compensated: bool) -> Footprint:
        """What a model would take.

        Args:
            spec: The architecture.
            sizes: What its stored weights take.
            compensated: Whether error compensation will be used.
        """
        ...

    def prepare(
        self, model: Weights, kv: KVKind, *, compensated: bool, ahead: bool = False, progress: ProgressCallback
    ) -> None:
        """Do what the first load of such a model takes long for and later ones don't, where it is still to be done.

        Args:
            model: The stored model.
            kv: The kind of cache.
            compensated: Whether error compensation will be used.
            ahead: Whether to do also what `open` would start beside the first answer, which can do without.
            progress: Receives reports of the phase `compile`; none where there is nothing to do. What can't be done
                is told by `open`.
        """
        ...

    def open(self, model: Weights, options: DecoderOptions, progress: ProgressCallback = ignore_progress) -> Decoder:
        """Load a model.

        Args:
            model: The stored model.
            options: How it is to be run.
            progress: Receives reports of the phase `compile` where something is compiled that only a loaded model
                tells.

        Raises:
            BackendError: it cannot run here, or not this model.
            OutOfMemoryError: its memory does not suffice.
            RequestError: an option is out of range, or the model keeps no residuals.
        """
        ...

    def device(self, options: DecoderOptions) -> Device:
        """What a decoder of these options computes on.

        Raises:
            BackendError: the device does not answer.
        """
        ...

    def timer(self, decoder: D, *, seconds: float) -> Timer:
        """What times the layer types of a model that this backend opened; slot 0 of its cache is overwritten.

        Args:
            decoder: What `open` gave.
            seconds: How long one reading may take; a large model's takes longer, for it needs a few passes.

        Raises:
            BackendError: it has no clock.
        """
        ...

    def problems(self, decoder: D) -> tuple[Problem, ...]:
        """What a model that this backend opened goes without."""
        ...

    def link_gb_s(self) -> float | None:
        """Measured bandwidth of the link that residuals come over, in 10^9 bytes per second; None without one."""
        ...


AnyBackend = Backend[Any]
"""A backend as everything above sees it: decoders go back to where they came from."""


AUTO = "auto"
"""Asks for the first backend that can run here and has room."""
NAMES = ("triton", "cpu", "reference")
"""The folders."""


def backend(name: str) -> AnyBackend:
    """A backend by its name.

    Raises:
        BackendError: there is none of that name.
    """
    if name not in NAMES:
        known = ", ".join((AUTO, *NAMES))
        raise BackendError(f"there is no backend {name!r} in this version; choose one of {known}")
    found: AnyBackend = import_module(f"{__name__}.{name}.backend").BACKEND
    return found


def backends() -> Iterator[AnyBackend]:
    """All of them, best first."""
    return map(backend, NAMES)
