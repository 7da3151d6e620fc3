"""One request for a process's peak memory: loads a model, fills the cache, decodes at the end of a full context.

    python -m tests.bench.caches.peak REQUEST

What only loading needed is returned to the system first. The process imports what the runtime does, and no torch.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from models.store import StoredModel
from models.weights import Weights
from runtime.backends.cpu.decoder import CpuDecoder
from runtime.backends.decoder import DecoderOptions, Step
from runtime.kv.kinds import KVKind
from runtime.measure.speed import fill, peak_memory_bytes
from runtime.system.heap import trim
from tests.peers.shape import RESIDUAL_BITS, RandomModel, llama_1b

ROOT = Path(__file__).resolve().parents[3]
TOKENS, DRAFTED = 32, 3
"""Tokens decoded at the end of the context, and those drafted in each round where there are drafts."""
_RESET = Path("/proc/self/clear_refs")


def asked(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run one request in a process of its own.

    Args:
        request: `stored`, a model's folder, or `shape`, the bits of one with random weights; `kind` and `context` of
            the cache; `k_chunk` (0 if absent); `drafts`, whether every round drafts (not if absent).

    Returns:
        `kind`, `context`, and in bytes `weight_bytes`, `residual_bytes`, `kv_bytes`, `loaded_bytes` (resident after
        loading) and `peak_bytes`.
    """
    command = [sys.executable, "-m", "tests.bench.caches.peak", json.dumps(dict(request))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{request}: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _model(request: Mapping[str, Any]) -> Weights:
    if "stored" in request:
        return StoredModel.open_folder(Path(request["stored"]), "stored")
    spec = replace(llama_1b(), max_context=request["context"])
    return RandomModel(spec, request["shape"], residuals=bool(request.get("k_chunk")))


def _measured(request: Mapping[str, Any]) -> dict[str, Any]:
    """What `asked` returns, in this process."""
    kind: KVKind = request["kind"]
    context: int = request["context"]
    k_chunk = request.get("k_chunk", 0)
    model = _model(request)
    shapes = [model.spec.linear_shape(name.rsplit(".", 1)[-1]) for name in model.spec.linear_names()]
    decoder = CpuDecoder(model, DecoderOptions(kv=kind, context=context, k_chunk=k_chunk))
    del model
    trim()
    _RESET.write_text("5", encoding="ascii")  # the peak begins anew
    loaded = peak_memory_bytes()
    with decoder.session():
        fill(decoder, context - TOKENS)
        _decode(decoder, context - TOKENS, drafts=bool(request.get("drafts")))
    return {
        "kind": kind,
        "context": context,
        "k_chunk": k_chunk,
        "drafts": bool(request.get("drafts")),
        "weight_bytes": decoder.weight_bytes,
        "residual_bytes": sum(map(math.prod, shapes)) * RESIDUAL_BITS // 8 if k_chunk else 0,
        "kv_bytes": decoder.kv_bytes,
        "loaded_bytes": loaded,
        "peak_bytes": peak_memory_bytes(),
    }


def _decode(decoder: CpuDecoder, start: int, *, drafts: bool) -> None:
    """Decode the rest of the context, one by one or in rounds of drafts whose tokens are all taken."""
    rows = 1 + DRAFTED if drafts else 1
    for at in range(start, start + TOKENS - rows + 1, rows):
        for drafted in range(DRAFTED if drafts else 0):
            decoder.forward(Step.of([at % 97], at + drafted, draft=True, flush=drafted == 0))
        decoder.forward(Step.of([(at + i) % 97 for i in range(rows)], at))


if __name__ == "__main__":
    print(json.dumps(_measured(json.loads(sys.argv[1]))))
