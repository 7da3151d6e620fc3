"""States: the memory of layers that keep a state instead of a cache, and the bookkeeping of what can be cut back.

A layer keeps of a sequence its inputs for the most recent tokens (a convolution reads a few of them), and maybe a
matrix that has absorbed all tokens before. A matrix cannot be cut back. So the rows of a small step are absorbed only
when the next step begins, which says how many of them stay; until then a slot can be cut back to each of them, as
speculation does. The rows of a large step, a prompt's, are absorbed at once. Further back a slot can go only to its
snapshots, which are taken where prompts begin and as they go on.

Backends read and write the arrays, which are numpy's, or like them on a device (`Memory`). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from models.spec import ModelSpec
from runtime.errors import RequestError
from runtime.kv.stores import Arrays, checked

SNAPSHOT_GAP = 64
"""A snapshot is taken if the latest before it is at least so many tokens away."""
MOST_SNAPSHOTS = 8
"""Most snapshots of a slot."""


def is_due(places: Collection[int], at: int) -> bool:
    """Whether to take a snapshot of a slot's first `at` tokens, given the places of those it has."""
    return at - max(places, default=0) >= SNAPSHOT_GAP


def least_needed(places: Collection[int], end: int) -> int:
    """The snapshot that a slot of `end` tokens needs least: those near it are close, compared to how far back it is."""
    ordered = [0, *sorted(places), end]
    between = zip(ordered, ordered[1:], ordered[2:], strict=False)
    return min(between, key=lambda each: (each[2] - each[0]) / (end - each[1] + 1))[1]


SMALL_STEP = 16
"""Most rows of a slot in a step that are absorbed when the next step begins: those of a verification, one more than
`runtime.drafting.LARGEST_GAMMA`."""
WAITING = 2 * SMALL_STEP
"""Most tokens of a slot that are not absorbed: of a verification, and of the drafts after it."""
RING = WAITING + 8
"""Recent tokens of a slot: those not absorbed, of a verification and of the drafts after it, and up to 8 before."""
LONGEST_TAPS = RING - WAITING + 1
"""Most taps of a convolution."""
SNAPSHOTS_BYTES = 64 << 20
"""Size limit of a slot's snapshots in bytes; there is always one."""

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StateShape:
    """The state of a layer."""

    inputs: int
    """Numbers kept of each recent token, a multiple of 16 and more than needed: kernels store whole vectors."""
    before: int
    """Recent tokens that the convolution reads, taps - 1."""
    matrix: tuple[int, int, int]
    """Heads, Dk, and Dv rounded up to a multiple of 16; zeros where there is no matrix."""

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers in a snapshot: of recent tokens, and of the matrices."""
        return self.before * self.inputs, prod(self.matrix)

    @property
    def size(self) -> int:
        """Numbers in a snapshot."""
        return sum(self.sizes)


def state_shapes(spec: ModelSpec) -> dict[int, StateShape]:
    """The states of a model's layers, by the layer; empty if all have caches."""
    width, before, (heads, rows, columns) = spec.state_shape
    shape = StateShape(-(-width // 16) * 16 + 16, before, (heads, rows, -(-columns // 16) * 16))
    return dict.fromkeys(spec.state_layers, shape)


def snapshots_of_slot(spec: ModelSpec) -> int:
    """Snapshots that a slot may have."""
    size = 4 * sum(shape.size for shape in state_shapes(spec).values())
    return min(MOST_SNAPSHOTS, max(1, SNAPSHOTS_BYTES // size)) if size else 0


def states_bytes(spec: ModelSpec, slots: int) -> int:
    """Bytes of all states and snapshots."""
    shapes = state_shapes(spec).values()
    snapshots = snapshots_of_slot(spec) * sum(shape.size for shape in shapes)
    own = sum(RING * shape.inputs + prod(shape.matrix) for shape in shapes)
    return 4 * slots * (own + snapshots)


class Memory:
    """Where the numbers of states are kept: arrays of numpy; a backend may have others, which are indexed alike."""

    def zeros(self, *shape: int) -> Any:
        """A float32 array of zeros, with numpy's indexing, `shape`, `reshape`, `nbytes` and `len`."""
        return np.zeros(shape, np.float32)

    def read(self, array: Any) -> Float32Array:
        """Such an array, or a part of one, in main memory. It may be a view."""
        numbers: Float32Array = array
        return numbers

    def made(self, array: Float32Array) -> Any:
        """Such an array, with the numbers of one in main memory. It may be a view."""
        return array


class States:
    """The states of all slots, and snapshots that slots may share.

    Args:
        spec: The model; it has at least one layer with a state.
        slots: Number of slots.
        memory: Where their numbers are kept.
    """

    def __init__(self, spec: ModelSpec, slots: int, memory: Memory | None = None) -> None:
        self._memory = memory or Memory()
        self.shapes = state_shapes(spec)
        """By layer."""
        self.recent: dict[int, Any] = {
            layer: self._memory.zeros(slots, RING, shape.inputs) for layer, shape in self.shapes.items()
        }
        """float32 [slots, RING, inputs] by layer: the inputs of the token at position p are in row p % RING."""
        self.matrices: dict[int, Any] = {
            layer: self._memory.zeros(slots, *shape.matrix) for layer, shape in self.shapes.items()
        }
        """float32 [slots, heads, Dk, Dv] by layer."""
        self.absorbed: npt.NDArray[np.int32] = np.zeros(slots, np.int32)
        """int32 [slots], for the step that has begun: the tokens that matrices have absorbed. Those between here and
        the step's first row are read again."""
        self.absorbs: npt.NDArray[np.int32] = np.zeros(slots, np.int32)
        """int32 [slots], for the step that has begun: 0: the matrices stay as they are; 1: they absorb the tokens
        before the step; 2: they absorb its rows, too."""
        self._most = snapshots_of_slot(spec)
        self._pool = self._memory.zeros(self._most * slots, sum(shape.size for shape in self.shapes.values()))
        self._references = [0] * len(self._pool)
        self._bases = [0] * slots  # tokens absorbed once the step that has begun is done
        self._lengths = [0] * slots
        self._drafted: list[int | None] = [None] * slots  # the first drafted row that is not absorbed
        self._snapshots: list[dict[int, int]] = [{} for _ in range(slots)]  # position -> place in the pool

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        arrays = [*self.recent.values(), *self.matrices.values(), self._pool]
        return int(sum(array.nbytes for array in arrays))

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot without its snapshots."""
        return int(sum(array[0].nbytes for arrays in (self.recent, self.matrices) for array in arrays.values()))

    def reach(self, slot: int, length: int) -> int:
        """Most tokens, at most `length`, to which a slot can be cut back."""
        if length >= self._bases[slot]:
            return length
        return max((at for at in self._snapshots[slot] if at <= length), default=0)

    def check(self, slot: int, start: int, end: int, *, draft: bool) -> None:
        """Check that a step's rows start .. end - 1 of a slot may begin.

        Raises:
            RequestError: the slot cannot be cut back to the first row, or too many rows are drafted.
        """
        if self.reach(slot, start) != start:
            raise RequestError(
                f"a step writes position {start} of slot {slot}, whose states have absorbed {self._bases[slot]} tokens "
                f"and were kept at {sorted(self._snapshots[slot])}: it can be cut back to {self.reach(slot, start)}"
            )
        if draft and (end - start > SMALL_STEP or end - min(self._bases[slot], start) > WAITING):
            raise RequestError(f"{end - start} more rows of slot {slot} are too many to draft before one is verified")

    def begin(self, slot: int, start: int, end: int, *, draft: bool) -> None:
        """Prepare a step of a slot that `check` has passed; it is cut back to the first row.

        Args:
            slot: The slot.
            start: Position of its first row.
            end: Behind its last.
            draft: Whether the rows are drafted, so that the next step begins at their first or goes on after them.
        """
        if start < self._lengths[slot]:
            self.trim(slot, start)
        if end - start > SMALL_STEP and is_due(self._snapshots[slot], self._bases[slot]):
            self._keep(slot)
        self.absorbed[slot] = self._bases[slot]
        waits = draft and self._drafted[slot] is not None
        whole = end - start > SMALL_STEP
        self.absorbs[slot] = 0 if waits else 2 if whole else 1
        if not waits:
            self._bases[slot] = end if whole else start
            self._drafted[slot] = start if draft else None
        self._lengths[slot] = end

    def inputs(self, layer: int, slot: int, first: int, end: int) -> Any:
        """A layer's inputs of the tokens first .. end - 1, which are recent or before the sequence: float32 copies."""
        found = self.recent[layer][slot][np.arange(first, end) % RING]
        found[: max(0, -first)] = 0
        return found

    def note(self, layer: int, slot: int, start: int, x: Any) -> None:
        """Keep a layer's inputs float32 [n, inputs or less] of tokens from `start` on."""
        end, rows = start + len(x), x[-RING:]
        self.recent[layer][slot][np.arange(end - len(rows), end) % RING, : x.shape[1]] = rows

    def trim(self, slot: int, length: int) -> None:
        """Cut a slot back to its first `length` tokens.

        Raises:
            RequestError: `reach` is less.
        """
        if length < self._bases[slot]:
            self._restore(slot, slot, length)
        self._lengths[slot] = length
        drafted = self._drafted[slot]
        if drafted is not None and length <= drafted:
            self._drafted[slot] = None
        for at in [at for at in self._snapshots[slot] if at > length]:
            self._release(self._snapshots[slot].pop(at))

    def fork(self, source: int, target: int, length: int) -> None:
        """Start another slot from the first `length` tokens of one. Snapshots are shared.

        Raises:
            RequestError: `reach` is less.
        """
        self.clear(target)
        for at, place in self._snapshots[source].items():
            if at <= length:
                self._snapshots[target][at] = place
                self._references[place] += 1
        if length < self._bases[source]:
            self._restore(target, target, length)
        else:
            for arrays in (self.recent, self.matrices):
                for array in arrays.values():
                    array[target] = array[source]
            self._bases[target] = self._bases[source]
        self._lengths[target] = length

    def shift(self, slot: int, more: int) -> None:
        """Move a slot's tokens to positions that are higher by `more`; its snapshots are dropped."""
        for array in self.recent.values():
            array[slot] = array[slot][(np.arange(RING) - more) % RING]
        self._bases[slot] += more
        self._lengths[slot] += more
        self._forget(slot)

    def clear(self, slot: int) -> None:
        """Drop all tokens of a slot."""
        self._forget(slot)
        self._bases[slot] = self._lengths[slot] = 0
        self._drafted[slot] = None
        for matrix in self.matrices.values():
            matrix[slot] = 0

    def close(self) -> None:
        """Release the numbers. Safe to call twice."""
        self.recent.clear()
        self.matrices.clear()
        self._pool = self._memory.zeros(0, 0)

    def export(self, slot: int) -> Iterator[Arrays]:
        """A slot's states, then its snapshots."""
        base, length = self._bases[slot], self._lengths[slot]
        live: dict[str, npt.NDArray[np.generic]] = {"absorbed": np.array([base], np.int32)}
        for layer, shape in self.shapes.items():
            live[f"recent.{layer}"] = self._memory.read(self.inputs(layer, slot, base - shape.before, length))
            live[f"matrix.{layer}"] = self._memory.read(self.matrices[layer][slot])
        yield live
        for at, place in self._snapshots[slot].items():
            yield {"absorbed": np.array([at], np.int32), "state": self._memory.read(self._pool[place])}

    def load(self, slot: int, length: int, pieces: Iterable[Arrays]) -> None:
        """Replace a slot's states by exported ones. On failure the slot is empty.

        Raises:
            RequestError: the pieces do not belong to a model of this shape.
        """
        self.clear(slot)
        incoming = iter(pieces)
        live = next(incoming, {})
        base = _position(live, length)
        like: dict[str, npt.NDArray[np.generic]] = {"absorbed": np.zeros(1, np.int32)}
        for layer, shape in self.shapes.items():
            like[f"recent.{layer}"] = _any(length - base + shape.before, shape.inputs)
            like[f"matrix.{layer}"] = _any(*shape.matrix)
        checked(live, like)
        if length - base > WAITING:
            raise RequestError(f"saved states have absorbed {base} of {length} tokens, fewer than a slot may have")
        for layer, shape in self.shapes.items():
            self.note(layer, slot, base - shape.before, self._memory.made(live[f"recent.{layer}"]))
            self.matrices[layer][slot] = self._memory.made(live[f"matrix.{layer}"])
        self._bases[slot], self._lengths[slot] = base, length
        for piece in incoming:
            like = {"absorbed": np.zeros(1, np.int32), "state": _any(self._pool.shape[1])}
            at = _position(checked(piece, like), length)
            self._snapshots[slot][at] = self._take(slot)
            self._pool[self._snapshots[slot][at]] = self._memory.made(piece["state"])

    def _keep(self, slot: int) -> None:
        """Take a snapshot of what a slot has absorbed."""
        at, place, start = self._bases[slot], self._take(slot), 0
        for layer, shape in self.shapes.items():
            parts = self.inputs(layer, slot, at - shape.before, at), self.matrices[layer][slot]
            for part, size in zip(parts, shape.sizes, strict=True):
                self._pool[place, start : start + size] = part.reshape(size)
                start += size
        self._snapshots[slot][at] = place

    def _restore(self, slot: int, source: int, length: int) -> None:
        """Set a slot to the snapshot that a slot has at a length, or to the beginning."""
        if length == 0:
            for matrix in self.matrices.values():
                matrix[slot] = 0
        else:
            place, start = self._snapshots[source].get(length), 0
            if place is None:
                raise RequestError(f"slot {slot} cannot be cut back to {length} tokens: no snapshot was taken there")
            for layer, shape in self.shapes.items():
                middle, end = start + shape.sizes[0], start + shape.size
                recent, matrix = self._pool[place, start:middle], self._pool[place, middle:end]
                self.note(layer, slot, length - shape.before, recent.reshape(shape.before, shape.inputs))
                self.matrices[layer][slot] = matrix.reshape(shape.matrix)
                start = end
        self._bases[slot] = length
        self._drafted[slot] = None

    def _take(self, slot: int) -> int:
        """A free place for one more snapshot of a slot; drops one of its own if it has as many as it may."""
        if len(self._snapshots[slot]) >= self._most:
            least = least_needed(self._snapshots[slot], self._bases[slot])
            self._release(self._snapshots[slot].pop(least))
        place = self._references.index(0)
        self._references[place] = 1
        return place

    def _forget(self, slot: int) -> None:
        for place in self._snapshots[slot].values():
            self._release(place)
        self._snapshots[slot].clear()

    def _release(self, place: int) -> None:
        self._references[place] -= 1


def _any(*shape: int) -> Float32Array:
    """What an array of that shape is compared with; takes no memory."""
    return np.broadcast_to(np.float32(0), shape)


def _position(piece: Arrays, length: int) -> int:
    """The number of absorbed tokens in an exported piece.

    Raises:
        RequestError: there is none, or it is out of range.
    """
    found = piece.get("absorbed")
    if found is None or found.shape != (1,) or not 0 <= int(found[0]) <= length:
        raise RequestError("saved states do not say how many tokens they have absorbed")
    return int(found[0])
