"""Captured launches: a shape of step runs directly at first, is captured the second time, and then replayed.

The first time compiles its kernels and allocates their scratch memory; a shape that never comes again is not captured.
A capture bakes in addresses and numbers of the host, so everything that changes between steps of one shape (tokens,
slots, positions) must lie in buffers on the device.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from runtime.backends.triton.failures import first_line
from runtime.errors import Problem

logger = logging.getLogger(__name__)

CAPTURE_MODE = "thread_local"
"""Capture mode that lets other threads use the card during a capture: they measure its link, or its free memory."""
KEPT = 32
"""Captured graphs to keep, the latest used: steps of 1 to 16 rows in two settings, between which a timer alternates."""
_NOTED = 1024
"""Shapes to remember as seen once."""

Launches = Callable[[], Any]
Capture = Callable[[Launches, Any], tuple[Callable[[], object], Any, Any]]
"""Launches, and the memory pool of other graphs or None -> a function that replays them, what they returned, and their
pool."""


class _Captured(NamedTuple):
    """A captured graph."""

    replay: Callable[[], object]
    """Starts it."""
    result: Any
    """What the launches returned: tensors that each replay overwrites."""
    pool: Any
    """Its pool of memory, which all share: they run one after another."""
    kept: Any
    """Whatever must live as long as the graph."""


class Graphs:
    """Captured launches by shape.

    Args:
        capture: Captures launches; None: nothing is captured, and everything runs directly.
    """

    def __init__(self, capture: Capture | None) -> None:
        self._capture = capture
        self._made: OrderedDict[Hashable, _Captured] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self.problem: Problem | None = None
        """Why nothing more is captured, once a capture has failed."""

    def run(self, shape: Hashable, launches: Launches, kept: Callable[[], Any] = tuple) -> Any:
        """Run launches: directly, captured, or replayed.

        Args:
            shape: Everything that the launches bake in.
            launches: Start kernels on the current stream, without waiting for any.
            kept: Gives what the graph needs alive beside the launches' result.

        Returns:
            Their result, valid until the next call.
        """
        found = self._made.pop(shape, None)
        if found is None:
            found = self._new(shape, launches, kept)
        if found is None:
            return launches()
        self._made[shape] = found
        found.replay()
        return found.result

    def clear(self) -> None:
        """Drop every graph: addresses that they contain are about to change."""
        self._made.clear()
        self._seen.clear()

    def _new(self, shape: Hashable, launches: Launches, kept: Callable[[], Any]) -> _Captured | None:
        """The graph of a shape met for the second time; None if it is to run directly."""
        if self._capture is None or self.problem is not None:
            return None
        if shape not in self._seen:
            self._seen[shape] = None
            while len(self._seen) > _NOTED:
                self._seen.popitem(last=False)
            return None
        while len(self._made) >= KEPT:
            self._made.popitem(last=False)
        pool = next((found.pool for found in self._made.values()), None)
        try:
            return _Captured(*self._capture(launches, pool), kept())
        except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
            # What has stopped the card itself is raised again by the launches that follow.
            what = f"steps are launched kernel by kernel, which is slower: capturing one failed ({first_line(error)})"
            self.problem = Problem(what=what, fix="use a shorter context, or close other programs that use the GPU")
            logger.warning("%s", what)
            return None


def capture(launches: Launches, pool: Any) -> tuple[Callable[[], object], Any, Any]:
    """Capture launches on the current card; a `Capture`."""
    graph = torch.cuda.CUDAGraph()
    # The outer context returns to the current stream even where ending a failed capture raises, too.
    with (
        torch.cuda.stream(torch.cuda.current_stream()),
        torch.cuda.graph(graph, pool=pool, capture_error_mode=CAPTURE_MODE),
    ):
        result = launches()
    return graph.replay, result, graph.pool()
