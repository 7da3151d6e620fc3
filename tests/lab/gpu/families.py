"""Steps of the families' blocks, with random weights: a decoded token, and a prompt's step, beside what reading takes.

Blocks are few, and the vocabulary is small, so a token of the whole model takes as many times as long as it has blocks.
Mixtures are timed with some of their experts in main memory, too; tokens go to all experts alike.
"""

from __future__ import annotations

import statistics
import time
from unittest import mock

import numpy as np
import torch

from models.spec import LAYER_TYPES, ModelSpec
from runtime.backends.decoder import DecoderOptions, Step
from runtime.backends.triton.decoder import TritonDecoder
from tests.lab.gpu.bandwidth import read_gb_s
from tests.lab.gpu.decode import Copied, seconds_per_token
from tests.lab.gpu.record import Part, Row
from tests.lab.gpu.sizes import Sizes
from tests.lab.models import RandomModel

BITS = 4


def measure(part: Part, sizes: Sizes, device: torch.device) -> None:
    """Rows for each family: tokens by their compensation and by the experts on the device, and a prompt's step."""
    limit = max(read_gb_s(sizes, device), 0.01)  # an interpreted read is rounded to nothing on a busy machine
    part.add({"what": "read", "gb_s": limit})
    for title, spec in sizes.families.items():
        if not part.begin({"model": title}):
            continue
        model, about = (
            RandomModel(spec, BITS, head_residuals=False),
            {"model": title, "blocks": spec.num_layers, "bits": BITS},
        )
        decoder = _loaded(model, sizes, device, None)
        for k_chunk in sizes.family_k_chunks:
            decoder.set_k_chunk(dict.fromkeys(LAYER_TYPES, k_chunk))
            part.add({"what": "token"} | about | {"k_chunk": k_chunk} | _token(decoder, sizes, limit))
        decoder.set_k_chunk(0)
        part.add({"what": "prompt"} | about | _prompt(decoder, sizes))
        decoder.close()
        for share in sizes.resident if spec.mixture is not None else ():
            assert spec.mixture is not None
            decoder = _loaded(model, sizes, device, round(share * spec.mixture.num_experts))
            found = _token(decoder, sizes, limit) | _placed(decoder, spec)
            part.add({"what": "experts in main memory"} | about | found)
            decoder.close()


def _loaded(model: RandomModel, sizes: Sizes, device: torch.device, resident: int | None) -> TritonDecoder:
    options = DecoderOptions(context=sizes.context, max_rows=sizes.family_rows, experts_on_device=resident)
    with mock.patch("runtime.backends.triton.model.repack", Copied().repack):
        return TritonDecoder(model, options, device)


def _token(decoder: TritonDecoder, sizes: Sizes, limit: float) -> Row:
    """A decoded token, the fastest of a few medians: what reading its weights would take, and what it takes."""
    turns = []
    for _ in range(sizes.turns):
        decoder.cache.clear(0)
        turns.append(seconds_per_token(decoder, sizes.tokens))
    seconds = min(turns)
    least = decoder.weight_bytes / limit / 1e9
    row: Row = {"milliseconds": round(1e3 * seconds, 3), "megabytes": round(decoder.weight_bytes / 1e6, 1)}
    return row | {"percent_of_limit": round(100 * least / seconds, 1)}


def _prompt(decoder: TritonDecoder, sizes: Sizes) -> Row:
    """A step of a prompt, without compensation: the median of a few at the same positions."""
    rows, seconds = sizes.family_rows, []
    step = Step(
        tokens=((7919 * np.arange(rows) + 17) % decoder.spec.vocab_size).astype(np.int32),
        slots=np.zeros(rows, np.int32),
        positions=np.arange(rows, dtype=np.int32),
        logit_rows=np.array([rows - 1], np.int32),
        prefill=True,
    )
    for _ in range(2 + sizes.turns):  # the first compiles, the second is captured
        decoder.cache.clear(0)
        began = time.perf_counter()
        decoder.forward(step)
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds[2:])
    return {"rows": rows, "milliseconds": round(1e3 * median, 3), "rows_per_second": round(rows / median)}


def _placed(decoder: TritonDecoder, spec: ModelSpec) -> Row:
    """Where experts are, and what share of those that tokens went to was on the device."""
    placed = decoder.experts
    assert placed is not None
    assert spec.mixture is not None
    held = {"experts_on_device": placed.on_device, "experts": spec.mixture.num_experts, "host_bytes": placed.host_bytes}
    return held | {"hit_rate": None if placed.hit_rate is None else round(placed.hit_rate, 3)}
