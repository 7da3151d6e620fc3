"""Backends, best first, and their interface: detection, memory footprint, opening of models.

To add one, create a folder with a `backend.py` and add a line here. Nothing outside this package imports from a
backend's folder, and no backend imports another's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from models.packed import Weights
from models.progress import ProgressCallback, ignore_progress
from models.recipe import Recipe
from models.spec import ModelSpec
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
    """A device; timings taken on it are valid for any device that compares equal.

    Source: QDEC §4.4 (a profile belongs to a model and a device).
    """

    name: str
    """Its own name."""
    capability: str
    """Capabilities: `avx512, 8 threads`, or the compute capability `8.9`."""
    driver: str | None
    """Driver version; None for a processor."""
    sm_count: int | None = None
    """Multiprocessors; None for a processor."""
    shared_bytes: int | None = None
    """Shared memory per thread block in bytes; None for a processor."""

    def __str__(self) -> str:
        """A description for the user."""
        return f"{self.name} ({self.capability})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """Whether a backend can run on this machine."""

    usable: bool
    """Whether it can."""
    reason: str
    """The reason, as a phrase."""
    fix: str | None = None
    """Advice for the user; None if nothing can or needs to be done."""
    variant: str | None = None
    """Target of its kernels; None if they cannot be built or need not be."""
    memory: MemoryInfo | None = None
    """Memory that weights and cache must fit; None: main memory."""
    gpu: GpuInfo | None = None
    """The card that it would run on, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Memory sizes of a stored model's weights."""

    weight_bytes: int
    """Packed linear layers, norms and scales."""
    residual_bytes: int = 0
    """Residual codes; they stay mapped from the file, so the system may evict and reread them."""
    whole: bool = False
    """Whether every residual is read at every step."""
    exact: bool = False
    """Whether the source's own weights are beside them (`DecoderOptions.exact`)."""
    recipe: Recipe | None = None
    """Storage of the weights, for backends with a different layout; None: assume the file's size."""
    mtp: ModelSpec | None = None
    """The block that predicts further tokens (`models.mtp`); None: there is none, or it is not wanted."""
    mtp_bytes: int = 0
    """Its packed linear layers, norms and scales."""

    def __post_init__(self) -> None:
        if self.weight_bytes < 0 or self.residual_bytes < 0:
            raise ValueError(f"sizes cannot be negative: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """A model's memory use on a backend, without cache and buffers. All sizes in bytes."""

    weight_bytes: int
    """Weights in the backend's layout."""
    residual_bytes: int = 0
    """Residuals, in main memory."""
    residuals_beside: bool = False
    """Whether they are copied to the weights' memory and must fit there too; otherwise they stay mapped from the file,
    or are in another memory."""
    mtp: ModelSpec | None = None
    """The block that predicts further tokens, whose weights are among these; None: the backend loads none."""
    overhead_bytes: int = 0
    """Memory of the backend itself, such as a driver's context."""
    buffer_bytes: BufferBytes | None = None
    """Memory of its buffers; None: estimated by `runtime.load.memory.buffer_bytes`."""
    experts: int = 0
    """Experts of a block, each of which may stay in main memory instead; 0: all weights must fit."""
    expert_bytes: int = 0
    """Of `weight_bytes`, one expert's of every block."""
    seams: Sequence[int] = ()
    """Numbers of a model's first blocks that can be on the device while the processor runs the others, ascending;
    empty: all are in one place."""
    parts: Callable[[int], tuple[Footprint, Footprint]] | None = None
    """The footprints of the blocks on the device and of the others, by their seam; None without seams."""


class Backend(Protocol[D]):
    """A way to run models. Importing its module is cheap; its dependencies are imported on first use."""

    name: str
    """Name for `--backend`."""
    label: str
    """Name within a sentence: `the CPU backend`."""
    kinds: Sequence[KVKind]
    """Supported kinds of KV cache."""
    untuned: Problem | None
    """Reason why a slowdown budget has no effect on it; None if it has."""
    step_rows: Sequence[int]
    """Prompt rows per step that it can take, most first. A load takes the most that cost no context."""
    prompt_levels: Sequence[int]
    """Supported compensation levels of prompts, in channels per 1024, highest first; the tuner picks the first that a
    budget pays for."""

    def probe(self) -> Presence:
        """Detect whether it can run here, with the memory that is free now."""
        ...

    def footprint(self, spec: ModelSpec, sizes: ModelSizes, *, compensated: bool) -> Footprint:
        """Memory use of a model.

        Raises:
            BackendError: it cannot run a model of this architecture.
        """
        ...

    def prepare(
        self, model: Weights, kv: KVKind, *, compensated: bool, ahead: bool = False, progress: ProgressCallback
    ) -> None:
        """Do the slow one-time work of a model's first load, such as compilation, if it is still to be done.

        Args:
            model: The stored model.
            kv: The kind of cache.
            compensated: Whether error compensation will be used.
            ahead: Also compile what `open` would otherwise compile in the background.
            progress: Receives reports of the phase `compile`; none if there is nothing to do. Errors are raised later,
                by `open`.
        """
        ...

    def open(self, model: Weights, options: DecoderOptions, progress: ProgressCallback = ignore_progress) -> Decoder:
        """Load a model.

        Args:
            model: The stored model.
            options: Decoder options.
            progress: Receives reports of the phase `compile`, if something can only be compiled with the loaded model.

        Raises:
            BackendError: it cannot run here, or cannot run this model.
            OutOfMemoryError: there is not enough memory.
            RequestError: an option is out of range, or the model has no residuals.
        """
        ...

    def device(self, options: DecoderOptions) -> Device:
        """The device that a decoder with these options would use.

        Raises:
            BackendError: the device does not respond.
        """
        ...

    def timer(self, decoder: D, *, seconds: float) -> Timer:
        """A timer of the layer types of a model that this backend opened. Overwrites slot 0 of its cache.

        Args:
            decoder: A decoder from `open`.
            seconds: Time limit of one measurement; a large model's takes longer, since it needs a few passes.

        Raises:
            BackendError: it has no clock.
        """
        ...

    def problems(self, decoder: D) -> tuple[Problem, ...]:
        """Problems of a model that this backend opened."""
        ...

    def link_gb_s(self) -> float | None:
        """Measured bandwidth of the link that residuals cross, in 10^9 bytes per second; None without a link."""
        ...

    def memory_gb_s(self) -> float | None:
        """Measured read bandwidth of the device's own memory, in 10^9 bytes per second; None: it reads main memory.

        Raises:
            BackendError: the measurement failed.
        """
        ...


ONLY_CPU = "exact answers are computed by the CPU backend only"
"""Why others refuse."""
NO_EXPERTS = "experts are not multiplied in full precision, so this model cannot answer exactly"
AnyBackend = Backend[Any]
"""A backend whose decoder type is hidden: decoders are only passed back to the backend that made them."""


AUTO = "auto"
"""Name that requests the first backend that can run here and has enough memory."""
NAMES = ("triton", "shared", "cpu", "reference")
"""The folders."""
ON_CARD = ("triton", "shared")
"""Those that have weights on a graphics card."""


def backend(name: str) -> AnyBackend:
    """A backend by name.

    Raises:
        BackendError: there is none of that name.
    """
    if name not in NAMES:
        known = ", ".join((AUTO, *NAMES))
        raise BackendError(f"there is no backend {name!r} in this version; choose one of {known}")
    found: AnyBackend = import_module(f"{__name__}.{name}.backend").BACKEND
    return found


def backends() -> Iterator[AnyBackend]:
    """All backends, best first."""
    return map(backend, NAMES)
