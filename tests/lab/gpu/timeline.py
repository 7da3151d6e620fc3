"""Where the time of a decoded token goes: its kernels by name, and the gaps between them, by torch's profiler."""

from __future__ import annotations

from collections import defaultdict
from itertools import product

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tests.lab.gpu.decode import loaded, seconds_per_token
from tests.lab.gpu.record import Part
from tests.lab.gpu.sizes import Sizes

TOKENS = 20


def measure(part: Part, sizes: Sizes, device: torch.device) -> None:
    """For each kind of codes and bit width a row for the token, and one for each of its kernels, the longest first."""
    for trellis, bits in product((True, False), sizes.bits):
        about = {"bits": bits, "codes": "trellis" if trellis else "uniform"}
        if not part.begin(about):
            continue
        decoder = loaded(sizes, bits, device, trellis=trellis)
        tokens = min(TOKENS, sizes.tokens)
        seconds_per_token(decoder, tokens)  # captured then
        own = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        with profile(activities=[ProfilerActivity.CPU, *own]) as seen:
            seconds_per_token(decoder, tokens)
        events = sorted(
            (event.time_range.start, event.time_range.end, event.name)
            for event in seen.events() or ()
            if event.device_type == DeviceType.CUDA
        )
        times, counts, busy, until = defaultdict[str, float](float), defaultdict[str, int](int), 0.0, 0.0
        for start, end, name in events:
            times[name] += end - start
            counts[name] += 1
            busy += max(0.0, end - max(start, until))
            until = max(until, end)
        steps = tokens + 1
        span = until - events[0][0] if events else 0.0
        row = {"launches": len(events) / steps, "busy_us": busy / steps, "gaps_us": (span - busy) / steps}
        part.add({"what": "token"} | about | {name: round(value, 1) for name, value in row.items()})
        for name in sorted(times, key=times.__getitem__, reverse=True):
            each = {"us": round(times[name] / steps, 2), "launches": round(counts[name] / steps, 1)}
            part.add({"what": name} | about | each)
        decoder.close()
