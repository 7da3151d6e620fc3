"""Opening of a stored model: chooses the backend, and explains the choice."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from models.progress import ProgressCallback, ignore_progress
from models.weights import Weights
from runtime.backends import AUTO, AnyBackend, Presence, backend, backends
from runtime.backends.decoder import Decoder, DecoderOptions
from runtime.engine.engine import Engine
from runtime.errors import BackendError, OutOfMemoryError, RequestError
from runtime.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Model(Weights, Protocol):
    """Weights with a name and a tokenizer, such as `models.store.StoredModel`."""

    @property
    def name(self) -> str:
        """The model's name."""
        ...

    @property
    def tokenizer_path(self) -> Path:
        """Folder of the tokenizer's files."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A backend that can run here."""

    backend: AnyBackend
    """The backend."""
    presence: Presence
    """Its device."""
    reason: str
    """The reason for this choice, in one sentence."""


def candidates(backend_name: str = AUTO) -> Iterator[Candidate]:
    """The backends that can run here, best first; probed lazily.

    Args:
        backend_name: Name of the only one to probe, or `auto` for all.

    Raises:
        BackendError: an unknown backend, or one requested by name that cannot run here.
    """
    if backend_name != AUTO:
        yield _requested(backend(backend_name))
        return
    out: list[str] = []
    for found in backends():
        presence = found.probe()
        if presence.usable:
            yield Candidate(backend=found, presence=presence, reason="; ".join([*out, presence.reason]))
        else:
            out.append(f"{presence.reason}, so {found.label} is out")


def _requested(found: AnyBackend) -> Candidate:
    presence = found.probe()
    if not presence.usable:
        todo = f": {presence.fix}" if presence.fix else ""
        raise BackendError(f"{found.label} cannot run here, because {presence.reason}{todo}; or use another backend")
    return Candidate(backend=found, presence=presence, reason=f"{found.label} was requested")


def open_decoder(
    model: Weights, options: DecoderOptions, backend_name: str = AUTO, progress: ProgressCallback = ignore_progress
) -> tuple[Decoder, str]:
    """Load a model on a backend.

    Args:
        model: The stored model.
        options: How to run it.
        backend_name: Name of a backend, or `auto`: the first that can run here and accepts the model.
        progress: See `runtime.backends.Backend.open`.

    Returns:
        The decoder, and a sentence that explains the choice of the backend.

    Raises:
        BackendError: an unknown backend, or one that cannot run here.
        OutOfMemoryError: the backend does not have enough memory.
        RequestError: options that do not fit the model.
    """
    if not 1 <= options.context <= model.spec.max_context:
        raise RequestError(
            f"a context of {options.context} tokens was requested, and the model knows positions up to "
            f"{model.spec.max_context}: choose a context from 1 to {model.spec.max_context}"
        )
    failure: BackendError | OutOfMemoryError | None = None
    for candidate in candidates(backend_name):
        label = candidate.backend.label
        try:
            decoder = candidate.backend.open(model, options, progress)
        except (BackendError, OutOfMemoryError) as error:
            if backend_name != AUTO:
                raise
            logger.warning("%s cannot run this model, so another one is tried: %s", label, error)
            failure, failed = error, label
            continue
        if failure is None:
            return decoder, candidate.reason
        return decoder, f"{failed} cannot run this model ({failure}), so {label} does"
    raise failure or BackendError("no backend can run here")


def open_engine(
    model: Model, options: DecoderOptions, backend_name: str = AUTO, progress: ProgressCallback = ignore_progress
) -> Engine:
    """Load a model with its tokenizer, ready to answer.

    Args:
        model: The stored model.
        options: How to run it.
        backend_name: As in `open_decoder`.
        progress: As in `open_decoder`.

    Returns:
        The engine; its `reason` explains the choice of the backend.

    Raises:
        BackendError: as `open_decoder`, or the tokenizer cannot be read.
        OutOfMemoryError: as `open_decoder`.
        RequestError: as `open_decoder`.
    """
    tokenizer = Tokenizer(model.tokenizer_path)
    decoder, reason = open_decoder(model, options, backend_name, progress)
    ends = {*model.spec.eos_token_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}
    return Engine(decoder, tokenizer, name=model.name, eos_token_ids=sorted(ends), reason=reason)
