"""Keeping a decoder's threads ready for a run of steps."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from runtime.decoder import Decoder


def session(decoder: Decoder) -> AbstractContextManager[None]:
    """A context in which a decoder keeps its threads ready between steps, where it has any to keep.

    Between sessions a decoder costs no processor time.
    """
    opened: AbstractContextManager[None] = getattr(decoder, "session", nullcontext)()
    return opened
