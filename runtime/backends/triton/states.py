"""States on the device: their numbers, and what a step does to them, for kernels."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from runtime.kv.states import States


class DeviceMemory:
    """Tensors on a device. Implements `runtime.kv.states.Memory`.

    Args:
        device: Where.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def zeros(self, *shape: int) -> torch.Tensor:
        """See `Memory.zeros`."""
        return torch.zeros(shape, device=self._device)

    def read(self, array: torch.Tensor) -> npt.NDArray[np.float32]:
        """See `Memory.read`."""
        found: npt.NDArray[np.float32] = array.cpu().numpy()
        return found

    def made(self, array: npt.NDArray[np.float32]) -> torch.Tensor:
        """See `Memory.made`."""
        return torch.tensor(array, device=self._device)


class RunTable:
    """The runs of a step, which are the adjacent rows of one slot each, and what they do to its states.

    It is read when kernels run, so that a captured launch can be replayed for any step.

    Args:
        states: The states.
        slots: Most runs of a step.
        device: Of the table.
    """

    def __init__(self, states: States, slots: int, device: torch.device) -> None:
        self._states = states
        self._host = torch.zeros((slots, 4), dtype=torch.int32, pin_memory=device.type == "cuda")
        self.tensor = self._host.to(device, copy=True)
        """int32 [slots, 4], on the device: a run's first row, its number of rows, the tokens that the slot's matrices
        have absorbed, and what they do next (`States.absorbs`). Runs whose rows are absorbed at once come first. No
        rows: there is no such run."""

    def write(self, runs: Iterable[tuple[int, int, int]]) -> None:
        """Describe a step that has begun, by the slot, first position and end of each run."""
        table, row, found = self._host.numpy(), 0, []
        for slot, start, end in runs:
            found.append((row, end - start, self._states.absorbed[slot], self._states.absorbs[slot]))
            row += end - start
        found.sort(key=lambda run: -run[3])
        table[:] = 0
        table[: len(found)] = found
        self.tensor.copy_(self._host, non_blocking=True)  # the following step completes before the next one begins
