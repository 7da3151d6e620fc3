"""A first launch on the card: what `doctor` looks at, and a minimal kernel."""

from __future__ import annotations

import torch

from runtime.backends import backend
from runtime.backends.triton.buffers import refused_cooperation
from runtime.backends.triton.card import launch
from tests.lab.gpu.record import Part
from tests.lab.gpu.sizes import Sizes


def measure(part: Part, sizes: Sizes, device: torch.device) -> None:
    """What the backend says of itself here."""
    if device.type == "cpu":
        part.add({"what": "trial launch", "correct": launch(device)})
        part.add({"what": "cooperative launch", "correct": launch(device, cooperative=True)})
        return
    found = backend("triton").probe()
    row = {"what": "probe", "correct": found.usable, "reason": found.reason, "fix": found.fix}
    memory = found.memory
    part.add(row | {"free_bytes": memory.available_bytes if memory else None, "variant": found.variant})
    if found.usable:
        refused = refused_cooperation(device)
        part.add({"what": "cooperative launch", "refused": refused, "correct": refused is None})
    if found.gpu is not None and found.gpu.pcie is not None:
        part.add({"what": "link", "pcie": f"{found.gpu.pcie.generation} x{found.gpu.pcie.lanes}"})
