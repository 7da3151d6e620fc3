"""From a stored model to a running one: which backend, and why."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from runtime.backends.triton.card import look
from runtime.decoder import Decoder, DecoderOptions
from runtime.engine import Engine
from runtime.errors import BackendError, OutOfMemoryError, RequestError
from runtime.kv.kinds import KINDS, KVKind
from runtime.tokenizer import Tokenizer
from runtime.weights import Weights
from tuner.detect import MemoryInfo

BACKENDS = ("auto", "triton", "cpu", "reference")
"""What `open_decoder` can be asked for."""

logger = logging.getLogger(__name__)


class Model(Weights, Protocol):
    """Weights that bring a name and a tokenizer; `models.store.StoredModel` does."""

    @property
    def name(self) -> str:
        """What the model is called."""
        ...

    @property
    def tokenizer_path(self) -> Path:
        """Folder of its tokenizer files."""
        ...


_FEW_KERNELS = 2
"""Kernels that a cache has for itself: more that are missing are everybody's."""


def preparation(backend: str = "auto", kv: KVKind = "fp16") -> str | None:
    """What the first load with this backend does that later ones do not, in one sentence; None if there is nothing.

    Args:
        backend: As in `open_decoder`.
        kv: The kind of cache.
    """
    if backend in ("reference", "triton"):
        return None
    try:
        from runtime.backends.cpu.link import needed
    except (ImportError, OSError, BackendError):
        return None
    missing = sum(not unit.is_compiled for unit in needed(KINDS[kv]))
    if not missing:
        return None
    if missing > _FEW_KERNELS:
        return "compiling the kernels for this processor, once; this takes up to half a minute"
    return f"compiling the kernels that {kv} caches need besides, once; this takes some seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a model is to run."""

    backend: Literal["triton", "cpu", "reference"]
    """The backend."""
    reason: str
    """Why this one, in one sentence."""
    memory: MemoryInfo | None
    """The memory that its weights and cache have to fit; None: main memory."""


def target(backend: str = "auto") -> Target:
    """Where a model would run: what the memory plan has to know before anything is loaded.

    Args:
        backend: As in `open_decoder`.

    Raises:
        BackendError: an unknown backend, or a GPU was asked for that can't be used.
    """
    if backend not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise BackendError(f"there is no backend {backend!r} in this version; choose one of {known}")
    if backend == "reference":
        return Target(backend="reference", reason="the reference backend was asked for", memory=None)
    if backend == "cpu":
        return Target(backend="cpu", reason="the CPU backend was asked for", memory=None)
    found = look()
    if found.usable:
        return Target(backend="triton", reason=found.because, memory=found.memory)
    if backend == "triton":
        todo = f": {found.fix}" if found.fix else ""
        raise BackendError(f"the GPU backend cannot run here, for {found.reason}{todo}; or use the CPU backend")
    return Target(
        backend="cpu",
        reason=f"{found.reason}, so the GPU is out; the CPU backend's kernels were built for this processor",
        memory=None,
    )


def open_decoder(model: Weights, options: DecoderOptions, backend: str = "auto") -> tuple[Decoder, str]:
    """Load a model on a backend.

    Args:
        model: The stored model.
        options: How to run it.
        backend: `triton`, `cpu`, `reference`, or `auto`: the GPU where there is one that the model fits, else the CPU
            backend where its kernels can be built, else the reference.

    Returns:
        The decoder, and in one sentence why this backend.

    Raises:
        BackendError: an unknown backend, or one that cannot run here.
        OutOfMemoryError: the GPU was asked for, and its memory does not suffice.
        RequestError: options that do not fit the model.
    """
    chosen = target(backend)
    if not 1 <= options.context <= model.spec.max_context:
        raise RequestError(
            f"a context of {options.context} tokens was asked for, and the model knows positions up to "
            f"{model.spec.max_context}: choose a context from 1 to {model.spec.max_context}"
        )
    reason = chosen.reason
    if chosen.backend == "reference":
        return _reference(model, options), reason
    if chosen.backend == "triton":
        try:
            return _triton(model, options), reason
        except (BackendError, OutOfMemoryError) as error:
            if backend == "triton":
                raise
            logger.warning("the GPU backend cannot run this model, so the CPU does: %s", error)
            reason = f"the GPU backend cannot run this model ({error}), so the CPU does"
    try:
        return _cpu(model, options), reason
    except BackendError as error:
        if backend == "cpu":
            raise
        logger.warning("the CPU backend cannot run here, so the slow reference backend is used: %s", error)
        reason = f"the CPU backend cannot run here ({error}), so the reference backend is used"
        return _reference(model, options), reason


def open_engine(model: Model, options: DecoderOptions, backend: str = "auto") -> Engine:
    """Load a model with its tokenizer, ready to answer.

    Args:
        model: The stored model.
        options: How to run it.
        backend: As in `open_decoder`.

    Returns:
        The engine; its `reason` says why this backend.

    Raises:
        BackendError: as `open_decoder`, or the tokenizer cannot be read.
        RequestError: as `open_decoder`.
    """
    tokenizer = Tokenizer(model.tokenizer_path)
    decoder, reason = open_decoder(model, options, backend)
    ends = {*model.spec.eos_token_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}
    return Engine(decoder, tokenizer, name=model.name, eos_token_ids=sorted(ends), reason=reason)


def _triton(model: Weights, options: DecoderOptions) -> Decoder:
    """The GPU backend. Raises BackendError where Triton or torch is missing."""
    try:
        from runtime.backends.triton.decoder import TritonDecoder
    except (ImportError, OSError) as error:
        raise BackendError(f"the GPU backend needs torch and Triton, which cannot be imported: {error}") from error
    return TritonDecoder(model, options)


def _cpu(model: Weights, options: DecoderOptions) -> Decoder:
    """The CPU backend. Raises BackendError where its kernels cannot be built."""
    try:
        from runtime.backends.cpu.decoder import CpuDecoder
    except (ImportError, OSError) as error:
        raise BackendError(f"its kernels cannot be built here: {error}") from error
    return CpuDecoder(model, options)


def _reference(model: Weights, options: DecoderOptions) -> Decoder:
    """The reference backend. Raises BackendError where torch is missing."""
    try:
        from runtime.backends.reference.decoder import ReferenceDecoder
    except (ImportError, OSError) as error:
        raise BackendError(f"the reference backend needs torch, which cannot be imported: {error}") from error
    return ReferenceDecoder(model, options)
