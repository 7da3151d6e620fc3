"""Device memory returned by unloading: load, unload, load again, and what the card says is free in between."""

from __future__ import annotations

from unittest import mock

import torch

from runtime.backends import ModelSizes, backend
from runtime.backends.decoder import DecoderOptions
from runtime.backends.triton.decoder import TritonDecoder
from runtime.backends.triton.warmup import warm_up
from runtime.load.memory import plan
from tests.bench.first_light.sizes import Amount
from tests.bench.gpu.decode import Copied
from tests.bench.gpu.matrices import RandomModel
from tests.bench.gpu.report import Part
from tuner.detect import MemoryInfo

BLOCKS = ("qkv", "o", "gate_up", "down")
_SLACK = 16 << 20
"""Bytes that modules of kernels may take from load to load."""
_LOADS = 3


def measure(part: Part, amount: Amount, device: torch.device) -> None:
    """A row for each load; the free memory after each unload must be that after the first."""
    model, spec = RandomModel.of(amount.tuned, 4), amount.tuned
    options = DecoderOptions(
        context=amount.context, k_chunk=dict.fromkeys(BLOCKS, 16), max_rows=min(128, amount.context)
    )
    copied, after = Copied(), list[int]()
    for load in range(_LOADS if device.type == "cuda" else 1):
        free = _free(device)
        with mock.patch("runtime.backends.triton.model.repack", copied.repack):
            decoder = TritonDecoder(model, options, device)
        if device.type == "cuda":
            warm_up(decoder, lambda _: None)
        footprint = backend("triton").footprint(spec, ModelSizes(weight_bytes=decoder.weight_bytes), compensated=False)
        memory = MemoryInfo(total_bytes=free, available_bytes=1 << 40, limit_bytes=None)
        planned = plan(spec, footprint, context=options.context, rows=options.max_rows, memory=memory)
        taken = free - _free(device)
        decoder.close()
        after.append(_free(device))
        part.add(
            {
                "load": load,
                "free_before": free,
                "taken": taken,
                "planned": planned.needed_bytes,
                "free_after": after[-1],
            }
            | {"correct": taken <= planned.needed_bytes and after[-1] >= after[0] - _SLACK}
        )


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info()[0] if device.type == "cuda" else 0
