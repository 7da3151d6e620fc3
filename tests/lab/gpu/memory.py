"""Device memory returned by unloading: load, unload, load again, and what the card says is free in between."""

from __future__ import annotations

import gc
from unittest import mock

import torch

from models.recipe import Recipe
from runtime.backends import ModelSizes, backend
from runtime.backends.decoder import DecoderOptions
from runtime.backends.triton import gpu
from runtime.backends.triton.decoder import TritonDecoder
from runtime.backends.triton.warmup import warm_up
from runtime.load.memory import plan
from tests.lab.gpu.decode import Copied
from tests.lab.gpu.record import Part
from tests.lab.gpu.sizes import Sizes
from tests.lab.models import GROUP_SIZE, RESIDUAL_BITS, RandomModel
from tuner.detect import MemoryInfo

BLOCKS = ("qkv", "o", "gate_up", "down")
_SLACK = 16 << 20
"""Bytes that modules of kernels may take from load to load."""
_MORE = 48 << 20
"""Bytes beyond the plan that the allocator's last segments, and graphs, may take."""
_SHARE = 1.02
"""By which the allocator may round."""
_LOADS = {"cuda": 3, "cpu": 2}


def measure(part: Part, sizes: Sizes, device: torch.device) -> None:
    """A row for each load: what it takes against the plan, without the plan's reserves; what an unload leaves free.

    Only the first may take what the plan has for modules of kernels. The driver has started before it.
    """
    model, spec = RandomModel(sizes.tuned, 4, head_residuals=False), sizes.tuned
    chosen = dict.fromkeys(BLOCKS, 16)
    options = DecoderOptions(
        context=sizes.load_context,
        k_chunk=chosen,
        prompt_k_chunk=dict.fromkeys(BLOCKS, 1024),
        max_rows=min(backend("triton").step_rows[0], sizes.load_context),
    )
    on_gpu = device.type == "cuda"
    if on_gpu:
        gpu.launch_once()
    values = [N * K for N, K in (spec.linear_shape(name) for name in spec.linear_names())]
    recipe = Recipe(bits=4, group_size=GROUP_SIZE)
    sizes = ModelSizes(weight_bytes=0, residual_bytes=sum(values) * RESIDUAL_BITS // 8, recipe=recipe)
    plain, footprint = (backend("triton").footprint(spec, sizes, compensated=how) for how in (False, True))
    staged = footprint.overhead_bytes - plain.overhead_bytes
    memory = MemoryInfo(total_bytes=1 << 40, available_bytes=1 << 40, limit_bytes=None)
    planned = plan(spec, footprint, kv=options.kv, context=options.context, rows=options.max_rows, memory=memory)
    held = planned.weight_bytes + planned.kv_bytes + planned.buffer_bytes
    copied, after = Copied(), list[int]()
    for load in range(_LOADS[device.type]):
        before = free_bytes(device)
        with mock.patch("runtime.backends.triton.model.repack", copied.repack):
            decoder = TritonDecoder(model, options, device)
        if on_gpu:
            warm_up(decoder, lambda _: None)
        taken = before - free_bytes(device)
        decoder.close()
        after.append(free_bytes(device))
        allowed = held + footprint.overhead_bytes if load == 0 else int(_SHARE * (held + staged)) + _MORE
        part.add(
            {"load": load, "free_before": before, "taken": taken, "allowed": allowed, "free_after": after[-1]}
            | {"correct": (taken <= allowed or not on_gpu) and after[-1] >= after[0] - _slack(on_gpu)}
        )


def free_bytes(device: torch.device) -> int:
    """Free memory according to the card; without one, minus the bytes of all tensors of this process."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info()[0]
    gc.collect()
    tensors = [found for found in gc.get_objects() if type(found) is torch.Tensor]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return -sum(storages.values())


def _slack(on_gpu: bool) -> int:
    return _SLACK if on_gpu else 1 << 20
