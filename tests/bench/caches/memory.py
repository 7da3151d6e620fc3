"""Peak memory of a process that decodes at the end of a full context, by kind of cache, on the real model."""

from __future__ import annotations

import itertools
from typing import Any

from runtime.kv.kinds import KVKind
from tests.bench.caches.extent import FIRST, ORDER
from tests.bench.caches.laboratory import Laboratory
from tests.bench.caches.peak import asked

CONTEXTS = (1024, 8192)
"""Tokens of the contexts."""


def measure(laboratory: Laboratory) -> None:
    """Measure what is missing for the real model: every kind of cache, without compensation and drafts."""
    if laboratory.case.name != FIRST:
        return
    notebook = laboratory.notebook
    for kind, context in itertools.product(ORDER, CONTEXTS):
        identity = {"source": laboratory.source, "kind": kind, "context": context}

        def run(kind: KVKind = kind, context: int = context) -> dict[str, Any]:
            notebook.tell(f"{laboratory.case.name}: memory of {kind} at {context} tokens")
            request = {"stored": str(laboratory.low_bit().path), "kind": kind, "context": context}
            return {"model": laboratory.case.name, **asked(request)}

        notebook.known("memory", identity, notebook.codes.cpu, run)
