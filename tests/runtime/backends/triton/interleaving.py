"""A stand-in for the card: programs of a launch that run interleaved, over a memory whose writes arrive late.

Triton's interpreter runs one program after another, and hides what goes wrong between them. Here each program is a
thread, one runs at a time, and at every load, store and atomic another one may go on: a seed gives a schedule, and the
same seed the same schedule.

Each program has a multiprocessor to itself, with what a GPU has of one:

- a first-level cache of lines of 128 bytes that nobody keeps coherent: a line that was read once is read from there
  again, however old it is, until an atomic that acquires empties the cache (or the line happens to be dropped);
- stores on their way: others see them late and in any order, except those to one place, until an atomic that releases
  sends them all off.

Atomics work on memory itself. `fences=False` makes acquire and release do nothing, so that whatever stands on them
breaks. What is not modelled: threads of one program, which here are one.

Source: NVIDIA, PTX ISA, "Memory Consistency Model" and "Cache Operators".
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import math
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import triton.language as tl  # noqa: F401 - the interpreter replaces what it finds in a kernel's module
from triton._C.libtriton import ir
from triton.runtime import interpreter

LINE = 128
"""Bytes of a line of the cache."""
_SWITCH, _DROP, _ARRIVE = 0.6, 0.05, 0.15
"""How likely another program goes on, a line is dropped, a store arrives early, at each access."""
_PACE, _PACES = 150, (-2.5, 0.0)
"""For so many turns a program keeps its pace, 10 to a power within these: some sleep while others do all their work."""
_RELEASES = (ir.MEM_SEMANTIC.RELEASE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
_ACQUIRES = (ir.MEM_SEMANTIC.ACQUIRE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)


class Stuck(Exception):
    """Programs wait for something that never comes."""


class _Abandoned(BaseException):
    """Ends a program's thread where the launch has failed already."""


class Machine:
    """What programs run on.

    Args:
        seed: Of the schedule.
        fences: Whether acquire and release have an effect.
        patience: Accesses of all programs after which they count as stuck.
    """

    def __init__(self, seed: int, *, fences: bool = True, patience: int = 20_000) -> None:
        self.random = random.Random(seed)
        self.fences, self._patience = fences, patience
        self._running: Program | None = None
        self._controller = threading.Semaphore(0)
        self._failure: BaseException | None = None
        self.launches = 0
        """Launches that ran interleaved."""

    @property
    def running(self) -> Program | None:
        """The program whose turn it is; None outside of a launch."""
        return self._running

    def launch(self, fn: Callable[..., None], places: list[tuple[int, int, int]], arguments: dict[str, Any]) -> None:
        """Run all programs of a launch to their ends.

        Raises:
            Stuck: they do not end.
        """
        self.launches += 1
        programs = [Program(self, fn, place, arguments) for place in places]
        alive, steps = list(programs), 0
        while alive and self._failure is None:
            if steps % _PACE == 0:
                pace = {program: 10 ** self.random.uniform(*_PACES) for program in programs}
            self._running = self.random.choices(alive, [pace[program] for program in alive])[0]
            self._running.resume()
            self._controller.acquire()
            steps += 1
            if self._running.done:
                alive.remove(self._running)
            if steps > self._patience:
                self._failure = Stuck(f"{len(alive)} of {len(programs)} programs wait for ever")
        for program in programs:
            program.end()
        self._running = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def end_turn(self, error: BaseException | None = None) -> None:
        """Called by the running program's thread: the controller goes on, or the launch has failed."""
        self._failure = error
        self._controller.release()

    @property
    def failed(self) -> bool:
        """Whether the launch has failed."""
        return self._failure is not None


class Program:
    """One program of a launch, with its multiprocessor's cache and its stores on their way."""

    def __init__(
        self, machine: Machine, fn: Callable[..., None], place: tuple[int, int, int], arguments: dict[str, Any]
    ) -> None:
        self._machine, self._fn, self._place, self._arguments = machine, fn, place, arguments
        self._turn = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._lines: dict[int, np.ndarray] = {}
        self._stores: list[tuple[Any, Any, Any]] = []
        self.done = False

    def resume(self) -> None:
        """Let it go on to its next access or its end; `Machine.end_turn` tells of that."""
        if not self._thread.ident:
            self._thread.start()
        self._turn.release()

    def end(self) -> None:
        """Let what is on its way arrive, and wait for the thread."""
        if self._thread.ident:
            self._turn.release()
            self._thread.join()
        self._arrive()

    def access(self) -> None:
        """Before every access: the cache and the stores may change, and another program may go on."""
        draw = self._machine.random
        if self._stores and draw.random() < _ARRIVE:
            self._write(self._stores.pop(self._unhindered(draw.randrange(len(self._stores)))))
        if self._lines and draw.random() < _DROP:
            del self._lines[draw.choice(list(self._lines))]
        if draw.random() < _SWITCH:
            self._machine.end_turn()
            self._wait()

    def load(self, places: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: Any) -> np.ndarray:
        """Numbers at addresses, through the cache."""
        self.access()
        result, wanted = (
            np.array(np.broadcast_to(other, places.shape), dtype=dtype),
            np.broadcast_to(mask, places.shape),
        )
        at = places[wanted].astype(np.uint64)
        if at.size:
            numbers = at >> np.uint64(7)
            lines = np.unique(numbers)
            table = np.stack([self._line(int(line)) for line in lines])
            offsets = (at & np.uint64(LINE - 1)).astype(np.int64)[:, None] + np.arange(result.itemsize)
            raw = table[np.searchsorted(lines, numbers)[:, None], offsets]
            result[wanted] = np.ascontiguousarray(raw).view(dtype)[:, 0]
        return result

    def store(self, places: np.ndarray, values: np.ndarray, mask: np.ndarray) -> None:
        """Numbers to addresses: seen by this program at once, by others later."""
        self.access()
        entry = (places.copy(), np.array(np.broadcast_to(values, places.shape)), np.array(mask))
        self._stores.append(entry)
        self._show(entry, self._lines)

    def atomic(self, run: Callable[[], Any], sem: Any) -> Any:
        """An atomic on memory, with what it releases before it and what it acquires after it."""
        self.access()
        if self._machine.fences and sem in _RELEASES:
            self._arrive()
        result = run()
        if self._machine.fences and sem in _ACQUIRES:
            self._lines.clear()
        return result

    def _run(self) -> None:
        with contextlib.suppress(_Abandoned):
            try:
                self._wait()
                self._fn(**self._arguments)
            finally:
                error = sys.exc_info()[1]
                self.done = True
                if not isinstance(error, _Abandoned):
                    self._machine.end_turn(error)

    def _wait(self) -> None:
        self._turn.acquire()
        if self._machine.failed:
            raise _Abandoned
        interpreter.interpreter_builder.set_grid_idx(*self._place)

    def _line(self, number: int) -> np.ndarray:
        """A line as this program sees it: bytes [LINE]."""
        if number not in self._lines:
            line = np.frombuffer(ctypes.string_at(number * LINE, LINE), np.uint8).copy()
            self._lines[number] = line
            for entry in self._stores:
                self._show(entry, {number: line})
        return self._lines[number]

    @staticmethod
    def _show(entry: tuple[Any, Any, Any], lines: dict[int, np.ndarray]) -> None:
        """Write a store to copies of lines."""
        places, values, mask = entry
        mask = np.broadcast_to(mask, places.shape)
        at, raw = places[mask].astype(np.uint64), np.ascontiguousarray(values[mask])
        if not at.size:
            return
        raw = raw.view(np.uint8).reshape(at.size, -1)
        numbers = at >> np.uint64(7)
        for number in np.unique(numbers).tolist():
            if number in lines:
                own = numbers == number
                offsets = (at[own] & np.uint64(LINE - 1)).astype(np.int64)[:, None] + np.arange(raw.shape[1])
                lines[number][offsets] = raw[own]

    def _unhindered(self, index: int) -> int:
        """A store on its way, or the first one before it to one of the same places: these never change their order."""
        places = self._stores[index][0]
        return next(at for at in range(index + 1) if np.isin(self._stores[at][0], places).any())

    def _arrive(self) -> None:
        for entry in self._stores:
            self._write(entry)
        self._stores.clear()

    @staticmethod
    def _write(entry: tuple[Any, Any, Any]) -> None:
        interpreter._interpreter.store(*entry)


@contextlib.contextmanager
def interleaved(seed: int, *, fences: bool = True, patience: int = 20_000) -> Iterator[Machine]:
    """While entered, interpreted launches run interleaved; see the module and `Machine`."""
    machine, builder = Machine(seed, fences=fences, patience=patience), interpreter.interpreter_builder
    call = interpreter.GridExecutor.__call__

    def run(executor: Any, *arguments: Any, **options: Any) -> None:
        kernel, places = executor.fn, list[tuple[int, int, int]]()
        count = math.prod(executor.grid)

        def gather(**found: Any) -> None:
            """Note where each program stands; the last one's turn runs all."""
            places.append(builder.grid_idx)
            if len(places) == count:
                machine.launch(kernel, places, found)

        gather.__signature__ = inspect.signature(kernel)  # type: ignore[attr-defined]
        executor.fn = gather
        try:
            call(executor, *arguments, **options)
        finally:
            executor.fn = kernel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", run)
        for name, method in _memory(machine, builder).items():
            patch.setattr(builder, name, method)
        yield machine


def _memory(machine: Machine, builder: Any) -> dict[str, Callable[..., Any]]:
    """What replaces the interpreter's accesses while programs run."""

    def load(ptrs: Any, mask: Any, other: Any, *_: Any) -> Any:
        kind = ptrs.get_element_ty()
        dtype = interpreter._get_np_dtype(kind)
        default = np.zeros(ptrs.data.shape, dtype) if other is None else other.data
        assert machine.running is not None
        wanted = mask.data.astype(bool)  # the interpreter has whole numbers where a mask is joined with an argument
        return interpreter.TensorHandle(machine.running.load(ptrs.data, wanted, default, dtype), kind)

    def store(ptrs: Any, value: Any, mask: Any, *_: Any) -> None:
        assert machine.running is not None
        machine.running.store(ptrs.data, value.data, mask.data.astype(bool))

    def atomic(original: Callable[..., Any], *arguments: Any) -> Any:
        assert machine.running is not None
        return machine.running.atomic(lambda: original(*arguments), arguments[-2])

    return {
        "create_masked_load": load,
        "create_masked_store": store,
        "create_atomic_rmw": functools.partial(atomic, builder.create_atomic_rmw),
        "create_atomic_cas": functools.partial(atomic, builder.create_atomic_cas),
    }
