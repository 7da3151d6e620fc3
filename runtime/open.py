"""From a stored model to a running one: which backend, and why."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

from runtime.decoder import Decoder, DecoderOptions
from runtime.engine import Engine
from runtime.errors import BackendError, RequestError
from runtime.tokenizer import Tokenizer
from runtime.weights import Weights

BACKENDS = ("auto", "cpu", "reference")
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


def preparation(backend: str = "auto") -> str | None:
    """What the first load with this backend does that later ones do not, in one sentence; None if there is nothing.

    Args:
        backend: As in `open_decoder`.
    """
    if backend == "reference":
        return None
    try:
        from runtime.cpu.isa import is_compiled
    except (ImportError, OSError, BackendError):
        return None
    return None if is_compiled() else "compiling the kernels for this processor, once; this takes some twenty seconds"


def open_decoder(model: Weights, options: DecoderOptions, backend: str = "auto") -> tuple[Decoder, str]:
    """Load a model on a backend.

    Args:
        model: The stored model.
        options: How to run it.
        backend: `cpu`, `reference`, or `auto`: the CPU backend where its kernels can be built, else the reference.

    Returns:
        The decoder, and in one sentence why this backend.

    Raises:
        BackendError: an unknown backend, or one that cannot run here.
        RequestError: options that do not fit the model.
    """
    if backend not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise BackendError(f"there is no backend {backend!r} in this version; choose one of {known}")
    if not 1 <= options.context <= model.spec.max_context:
        raise RequestError(
            f"a context of {options.context} tokens was asked for, and the model knows positions up to "
            f"{model.spec.max_context}: choose a context from 1 to {model.spec.max_context}"
        )
    if backend == "reference":
        return _reference(model, options), "the reference backend was asked for"
    try:
        decoder = _cpu(model, options)
    except BackendError as error:
        if backend == "cpu":
            raise
        logger.warning("the CPU backend cannot run here, so the slow reference backend is used: %s", error)
        return _reference(
            model, options
        ), f"the CPU backend cannot run here ({error}), so the reference backend is used"
    if backend == "cpu":
        return decoder, "the CPU backend was asked for"
    return decoder, "no GPU backend in this version; the CPU backend's kernels were built for this processor"


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


def _cpu(model: Weights, options: DecoderOptions) -> Decoder:
    """The CPU backend. Raises BackendError where its kernels cannot be built."""
    try:
        from runtime.cpu.decoder import CpuDecoder
    except (ImportError, OSError) as error:
        raise BackendError(f"its kernels cannot be built here: {error}") from error
    return CpuDecoder(model, options)


def _reference(model: Weights, options: DecoderOptions) -> Decoder:
    """The reference backend. Raises BackendError where torch is missing."""
    try:
        from runtime.reference.decoder import ReferenceDecoder
    except (ImportError, OSError) as error:
        raise BackendError(f"the reference backend needs torch, which cannot be imported: {error}") from error
    return ReferenceDecoder(model, options)
