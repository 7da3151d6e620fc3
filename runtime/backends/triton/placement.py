"""Which experts are on the device, where not all fit: those that tokens go to most.

At the load, calibration says which those are. While the model runs, the router's kernel counts where tokens go, and
every `WINDOW` rows a few experts exchange their places: one that is read over the bus comes for one that is chosen
clearly less often. Results do not depend on it, as the same kernel reads the same numbers from either place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from models.spec import MixtureSpec
from runtime.backends.triton.expert_layout import GpuExperts
from tuner.placement import ExpertPlacement

WINDOW = 64
"""Rows between two exchanges. Counts are halved at each, so an expert's is about twice what it got in the last one."""
MARGIN = 8
"""How many more rows must have gone to an expert than to that whose place it takes. Half of them come in the next
window; each saves reading a record over the bus, and the exchange itself reads one and writes one."""
MOST = 64
"""Most exchanges at a time, of the whole model: 15 ms on a laptop's bus for experts of 2.7 MB."""

Int64Array = npt.NDArray[np.int64]


def exchanges(
    counts: Int64Array, resident: npt.NDArray[np.bool_], *, margin: int, most: int
) -> list[tuple[int, int, int]]:
    """The experts that exchange their places: (block, leaving, coming), those that save most first.

    Args:
        counts: [blocks, experts], where recent rows went.
        resident: [blocks, experts], what is on the device.
        margin: See `MARGIN`.
        most: See `MOST`.
    """
    found = []
    for block, (own, here) in enumerate(zip(counts, resident, strict=True)):
        leaving = sorted(np.flatnonzero(here), key=lambda expert: own[expert])
        coming = sorted(np.flatnonzero(~here), key=lambda expert: -own[expert])
        for out, into in zip(leaving, coming, strict=False):
            if own[into] - own[out] < margin:
                break
            found.append((int(own[into] - own[out]), block, int(out), int(into)))
    found.sort(key=lambda each: -each[0])
    return [(block, out, into) for _, block, out, into in found[:most]]


class Placement:
    """Keeps the experts that are chosen most on the device.

    Args:
        blocks: The layers of each block with experts.
        mixture: Of the model.
        device: The device.
    """

    def __init__(self, blocks: Mapping[int, Sequence[GpuExperts]], mixture: MixtureSpec, device: torch.device) -> None:
        self._blocks, self._experts = blocks, mixture.experts
        self._counts = torch.zeros((len(blocks), mixture.held), dtype=torch.int32, device=device)
        self._rows = 0
        self._hit_rate: float | None = None
        self.whole = all(all(layer.resident) for layers in blocks.values() for layer in layers)
        """Whether all experts are on the device."""

    @property
    def report(self) -> ExpertPlacement:
        """Where experts are, for the user."""
        layers = [layer for own in self._blocks.values() for layer in own]
        return ExpertPlacement(
            on_device=sum(layers[0].resident),
            held=layers[0].count,
            host_bytes=sum(layer.host_bytes for layer in layers),
            hit_rate=self._hit_rate,
        )

    def counts_of(self, block: int) -> torch.Tensor | None:
        """int32 [held], to which a block's router adds; None if all experts are on the device."""
        return None if self.whole else self._counts[list(self._blocks).index(block)]

    def after(self, rows: int) -> None:
        """Count a step's rows, and let experts exchange their places where that is due. The step is done.

        Args:
            rows: Rows of the step.
        """
        if self.whole:
            return
        self._rows += rows
        if self._rows < WINDOW:
            return
        self._rows = 0
        counts = self._counts[:, : self._experts].cpu().numpy().astype(np.int64)
        layers = list(self._blocks.values())
        resident = np.array([own[0].resident[: self._experts] for own in layers])
        # Half of the counts are of earlier windows, and of where experts were then: near enough for what is shown.
        self._hit_rate = float(counts[resident].sum() / max(1, counts.sum()))
        for block, leaving, coming in exchanges(counts, resident, margin=MARGIN, most=MOST):
            for layer in layers[block]:
                layer.exchange(leaving, coming)
        self._counts.div_(2, rounding_mode="floor")
