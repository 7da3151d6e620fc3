"""GPU decoder: a stored model on the GPU, one graph replay for each decoded token.

A shape of step runs directly at first, which compiles its kernels and allocates their scratch memory, is captured the
second time, and then replayed; a shape that never comes again is not captured. Once as many graphs are there as are
kept, only a shape that comes often takes another's place, since a batch with drafts has more. A capture bakes in
addresses and numbers of the host, so everything that changes between steps of one shape (tokens, slots, positions) must
lie in buffers on the device.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import cache, partial, wraps
from subprocess import CalledProcessError
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from triton.errors import TritonError

from models.architecture import step_graph
from models.packed import Weights
from runtime.backends.decoder import (
    CompensationMode,
    DecoderOptions,
    Float32Array,
    Step,
    check_step,
    compensation_of,
    sensitive,
)
from runtime.backends.triton.buffers import Buffers
from runtime.backends.triton.card import return_cached
from runtime.backends.triton.forward import Pass
from runtime.backends.triton.gpu import explained, first_line
from runtime.backends.triton.kernels.select import Selection, recall, select
from runtime.backends.triton.model import GpuModel, Linear
from runtime.backends.triton.sampling import SEEN, HostDraws
from runtime.backends.triton.sizes import LOGIT_ROWS, SUMMED_ROWS
from runtime.compensation import k_chunk_by_type
from runtime.errors import BackendError, InvalidActivationError, OutOfMemoryError, Problem, RequestError
from runtime.text.sampling import Draw, Drawn, SamplingOptions
from tuner.placement import ExpertPlacement

logger = logging.getLogger(__name__)

_NOT_FINITE = (
    "the model produced a number that is not finite (NaN or infinity): its weights are damaged, or its activations "
    "leave the range of half precision; run `lowbit-chat show NAME --verify`, or use the CPU backend"
)
CAPTURED_ROWS = 32
"""Most rows of a step that is captured, apart from full steps of a prompt: tokens of parallel answers, and drafts that
are verified. Other lengths of prompts hardly come twice."""
_TRITON_S = ("Triton Error", "Failed to find C compiler")
"""Prefix of Triton's errors that have no type of their own."""
_INPUTS = ("slots", "positions", "logit_rows")
P = ParamSpec("P")
T = TypeVar("T")
CAPTURE_MODE = "thread_local"
"""Capture mode that lets other threads use the card during a capture: they measure its link, or its free memory."""
KEPT = 32
"""Captured graphs to keep, the latest used: steps of 1 to 16 rows in two settings, between which a timer alternates."""
OFTEN = 8
"""Times that a shape runs directly before its graph takes another one's place: where more shapes alternate than graphs
are kept, a graph would be made at every step otherwise, which takes longer than to launch it."""
_NOTED = 1024
"""Shapes to remember without a graph."""
SPARE_BYTES = 64 << 20
"""Free memory of the card with which a capture doesn't look for more: steps allocate next to nothing."""

Launches = Callable[[], Any]
Capture = Callable[[Launches, Any], tuple[Callable[[], object], Any, Any]]
"""Launches, and the memory pool of other graphs or None -> a function that replays them, what they returned, and their
pool."""


def _explained(call: Callable[P, T]) -> Callable[P, T]:
    """Translate errors of the driver and of Triton into plain words with advice."""

    @wraps(call)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"not enough GPU memory ({first_line(error)}): use a shorter context, fewer bits "
                "or a smaller model, or close other programs that use the GPU"
            ) from error
        except torch.AcceleratorError as error:
            raise BackendError(
                f"the GPU stopped working ({first_line(error)}): load the model again; if that fails, restart "
                "the program, or use the CPU backend"
            ) from error
        except (TritonError, OSError, CalledProcessError) as error:
            raise explained(error) from error
        except RuntimeError as error:
            if not str(error).startswith(_TRITON_S):
                raise
            raise explained(error) from error

    return run


def _check_draft(k_chunk: Mapping[str, int] | int) -> None:
    if any(k_chunk_by_type(k_chunk).values()):
        raise RequestError("the GPU backend drafts without compensation: leave the drafts' k_chunk at 0")


class _Captured(NamedTuple):
    """A captured graph."""

    replay: Callable[[], object]
    result: Any  # What the launches returned: tensors that each replay overwrites
    pool: Any  # Its pool of memory, which all share: they run one after another
    kept: Any  # Whatever must live as long as the graph


class Graphs:
    """Captured launches by shape.

    Args:
        capture: Captures launches; None: nothing is captured, and everything runs directly.
    """

    def __init__(self, capture: Capture | None) -> None:
        self._capture = capture
        self._made: OrderedDict[Hashable, _Captured] = OrderedDict()
        self._seen: OrderedDict[Hashable, int] = OrderedDict()
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
        """The graph of a shape that has come often enough; None if it is to run directly."""
        if self._capture is None or self.problem is not None:
            return None
        direct = self._seen.pop(shape, 0)
        if direct < (1 if len(self._made) < KEPT else OFTEN):
            self._seen[shape] = direct + 1
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
    """Capture launches on the current card; a `Capture`.

    torch waits for the card and returns the memory that it caches before a capture, so that there is some for it. That
    is done for the first, and where memory is short.
    """
    graph = torch.cuda.CUDAGraph()
    # The outer context returns to the current stream even where ending a failed capture raises, too.
    with torch.cuda.stream(torch.cuda.current_stream()):
        if pool is None or torch.cuda.mem_get_info()[0] < SPARE_BYTES:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode=CAPTURE_MODE):
                result = launches()
        else:
            with torch.cuda.stream(_capturing(torch.cuda.current_device())):
                graph.capture_begin(pool=pool, capture_error_mode=CAPTURE_MODE)
                try:
                    result = launches()
                finally:
                    graph.capture_end()
    return graph.replay, result, graph.pool()


@cache
def _capturing(device: int) -> torch.cuda.Stream:
    """The stream on which launches of a card are captured."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _Shape(NamedTuple):
    """All that a step's launches bake in, beside the compensation's setting."""

    M: int
    R: int  # Rows whose logits are wanted
    way: CompensationMode
    draft: bool  # Whether attention reads only what drafts read
    sensitive: tuple[int, ...] = ()  # Layers in which a draft reads everything


class TritonDecoder:
    """Implements `runtime.backends.decoder.Decoder` with Triton kernels.

    Steps that come again (`_captures`) are captured by their number of rows and way of compensation, and replayed for
    any tokens, slots and positions: the host writes these, starts the graph and waits for the logits, or for the
    sampled tokens. Every other step launches kernel by kernel.

    Args:
        model: The stored model.
        options: Decoder options.
        device: A CUDA device, or `cpu` under Triton's interpreter, for tests.

    Raises:
        RequestError: an option is out of range, or compensation was requested for a model without residuals.
        OutOfMemoryError: the device does not have enough memory.
    """

    backend = "triton"

    @_explained
    def __init__(self, model: Weights, options: DecoderOptions, device: torch.device | str = "cuda") -> None:
        if options.context < 1 or options.slots < 1 or options.max_rows < 1:
            raise RequestError("context, slots and max_rows must be at least 1")
        _check_draft(options.draft_k_chunk)
        options = replace(options, sensitive_layers=sensitive(options.sensitive_layers, model.spec))
        self.spec, self.options = model.spec, options
        self._graph = step_graph(model.spec)
        self._device = torch.device(device)
        self.model = GpuModel(model, options, self._device)
        self.model.set_k_chunk(options.k_chunk, options.n_tb)
        self.buffers = Buffers(self.model, options.max_rows)
        self._on_gpu = pinned = self._device.type == "cuda"
        self.side = torch.cuda.Stream(self._device, priority=-1) if self._on_gpu else None  # type: ignore[no-untyped-call]
        """The stream on which compensation runs; None under the interpreter."""
        self.model.set_prompt_k_chunk(options.prompt_k_chunk, self.side)
        rows, drawn = options.max_rows, min(options.max_rows, LOGIT_ROWS)
        self._inputs = torch.zeros((len(_INPUTS), rows), dtype=torch.int32, pin_memory=pinned)
        sizes = {name: getattr(self.buffers, name).shape for name in self.model.tables}
        self._rows = {name: torch.zeros(of, dtype=torch.float16, pin_memory=pinned) for name, of in sizes.items()}
        shape = (drawn, self.spec.vocab_size) if self.spec.has_head else (rows, self.spec.hidden_size)
        self._logits = torch.zeros(shape, pin_memory=pinned)
        shape = (0 if self.spec.embeds else rows, self.spec.hidden_size)
        self._stream = torch.zeros(shape, pin_memory=pinned)
        self._status = torch.zeros(2, dtype=torch.int32, pin_memory=pinned)
        self._draws = HostDraws(rows, self.spec.vocab_size, pinned=pinned)
        self._graphs, self._drawing = (Graphs(capture if self._on_gpu else None) for _ in range(2))
        self._recall_sum, self._selections, self._closed = 0.0, 0, False
        self._limited: Problem | None = None
        self.cache = self.model.cache
        self.kv_bytes = self.cache.nbytes
        self.weight_bytes = self.model.weight_bytes

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What makes the model run worse than it could, with advice."""
        graphs = self._graphs.problem or self._drawing.problem
        found = [*self.model.problems, graphs, self._two_launches(), self._limited]
        return tuple(problem for problem in found if problem is not None)

    @property
    def recall(self) -> float | None:
        """Mean recall of all selections so far, against exact top-k of the whole row; None if unmeasured."""
        return self._recall_sum / self._selections if self._selections else None

    @property
    def experts(self) -> ExpertPlacement | None:
        placed = self.model.placement
        return None if placed is None or placed.whole else placed.report

    @_explained
    def forward(self, step: Step) -> Float32Array:
        logits = self._run(step)
        few = len(logits) <= len(self._logits)
        host = self._logits[: len(logits)].copy_(logits, non_blocking=True) if few else logits.to("cpu")
        self._end(step)
        return host.numpy()

    @_explained
    def hidden(self, step: Step) -> Float32Array:
        shape = self._begin(step)
        self._bring(shape.M)
        run = self._pass(shape)
        found = run.run(step_graph(self.spec, hidden=True)).tensor.to("cpu", torch.float32)
        if not bool(torch.isfinite(found).all()):
            raise InvalidActivationError(_NOT_FINITE)
        return found.numpy()

    @_explained
    def draw(self, step: Step, draws: Sequence[Draw]) -> list[Drawn]:
        if len(draws) != step.logit_rows.size:
            raise RequestError(f"{len(draws)} draws are not one for each of {step.logit_rows.size} rows of logits")
        rooms = [self._draws.put(row, draw) for row, draw in enumerate(draws)]
        logits = self._run(step)
        for row, (draw, room) in enumerate(zip(draws, rooms, strict=True)):
            self._draw(row, draw.options, room, logits)
        self._end(step)
        return [self._draws.result(row, draw.options) for row, draw in enumerate(draws)]

    def _draw(self, row: int, options: SamplingOptions, room: int, logits: torch.Tensor) -> None:
        """Sample from a row of logits [R, V]: as a graph for each row and way to sample, where logits have their place.

        Those of up to `LOGIT_ROWS` rows begin where the buffer of outputs does.
        """
        launches = partial(self._draws.launch, row, options, room, logits[row])
        if len(logits) > LOGIT_ROWS or room > SEEN:
            launches()
            return
        penalty = options.repetition_penalty if room else None
        filters = (options.temperature, options.top_k, options.top_p, options.min_p)
        self._drawing.run((row, room, penalty, options.logprobs, *filters, logits.data_ptr()), launches)

    def _run(self, step: Step) -> torch.Tensor:
        """Launch a step. Returns its logits on the device, float32 [R, V], until the next step."""
        shape = self._begin(step)
        if not self._captures(step):
            return self._launch(shape)
        setting = self._setting(self.options.k_chunk, shape.way != "none", self.options.n_tb)
        setting += self._setting(self.options.prompt_k_chunk, shape.way == "shared")
        found: torch.Tensor = self._graphs.run((shape, setting), partial(self._launch, shape), self._selections_now)
        return found

    def _begin(self, step: Step) -> _Shape:
        """Check a step, let the cache prepare for it, and put its inputs where `_launch` copies them from."""
        check_step(step, self.spec, self.options)
        self.cache.begin(step.slots, step.positions, flush=step.flush, draft=step.draft)
        for own, values in zip(self._inputs.numpy(), (step.slots, step.positions, step.logit_rows), strict=True):
            own[: values.size] = values
        for name, table in self.model.tables.items():
            self._rows[name].numpy()[: step.tokens.size] = table[step.tokens]
        if step.stream is not None:
            self._stream.numpy()[: step.tokens.size] = step.stream
        way, layers = compensation_of(step, self.options), self.options.sensitive_layers if step.draft else ()
        return _Shape(step.tokens.size, step.logit_rows.size, way, step.draft, layers)

    def _captures(self, step: Step) -> bool:
        """Whether a step is captured once it comes again."""
        M = step.tokens.size
        few = M <= CAPTURED_ROWS or (step.prefill and self.options.max_rows == M)
        return few and step.logit_rows.size <= LOGIT_ROWS and not self.options.measure_recall

    def _selections_now(self) -> list[Selection | None]:
        """What a graph contains addresses of, and a changed k_chunk replaces."""
        return [linear.selection for linear in self.model.linears.values()]

    def _two_launches(self) -> Problem | None:
        """What is to be said where the card refuses cooperative launches."""
        if not self._on_gpu or self.buffers.alone is None:
            return None
        what = f"compensation selects and fetches in two launches, as the card refuses one ({self.buffers.alone})"
        return Problem(what=what, fix="update NVIDIA's driver; a card that is shared or virtual may not allow it")

    def _end(self, step: Step) -> None:
        """Wait for a step, raise if it computed NaN or infinity, and count the experts that were found."""
        if self._on_gpu:
            torch.cuda.current_stream(self._device).synchronize()
        status = self._status.numpy()
        if status[0] or not math.isfinite(status.view(np.float32)[1]):
            self.buffers.status.zero_()
            raise InvalidActivationError(_NOT_FINITE)
        if self.model.placement is not None and step.tokens.size <= SUMMED_ROWS:
            self.model.placement.after(step.tokens.size)

    def set_k_chunk(self, k_chunk: Mapping[str, int] | int, n_tb: Mapping[str, int] | None = None) -> None:
        self.model.set_k_chunk(k_chunk, n_tb or {})
        self.options = replace(self.options, k_chunk=k_chunk, n_tb=dict(n_tb or {}))

    @_explained
    def set_prompt_k_chunk(self, prompt_k_chunk: Mapping[str, int] | int) -> None:
        self._graphs.clear()  # they contain the addresses of the buffers that residuals are copied to
        self.model.set_prompt_k_chunk(prompt_k_chunk, self.side)
        self.options = replace(self.options, prompt_k_chunk=prompt_k_chunk)

    def set_draft_k_chunk(self, draft_k_chunk: Mapping[str, int] | int) -> None:
        """Drafts are never compensated here."""
        _check_draft(draft_k_chunk)

    def set_sensitive_layers(self, layers: Sequence[int]) -> None:
        self.options = replace(self.options, sensitive_layers=sensitive(layers, self.spec))

    def session(self) -> AbstractContextManager[None]:
        """Nothing to keep ready: waiting for the device costs nothing."""
        return nullcontext()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._graphs.clear()
        self._drawing.clear()
        self.model.close()
        del self.buffers, self._inputs, self._rows, self._stream, self._logits, self._status, self._draws
        with suppress(RuntimeError):  # a card that stopped working releases nothing
            return_cached()

    @_explained
    def start(self, step: Step) -> torch.Tensor:
        """Start a step's kernels one by one. Returns its logits on the device, float32 [R, V], until the next step."""
        return self._launch(self._begin(step))

    @_explained
    def count_limited(self, step: Step) -> None:
        """Run a step, and have `problems` say how many of its activations half precision limits, if any."""
        shape = self._begin(step)
        self._bring(shape.M)
        run = self._pass(shape)
        run.limited = torch.zeros(2, dtype=torch.int64, device=self._device)
        run.run(self._graph)
        limited, read = run.limited.tolist()
        if limited:
            what = (
                f"{limited:,} of {read:,} activations of the first tokens are beyond half precision, and were limited"
            )
            fix = "compare answers with the CPU backend's (--backend cpu), whose activations have scales of their own"
            self._limited = Problem(what=what, fix=fix)
            logger.warning("%s", what)

    def _launch(self, shape: _Shape) -> torch.Tensor:
        """Start a step's kernels, from the inputs in page-locked memory to the logits on the device."""
        self._bring(shape.M)
        run = self._pass(shape)
        logits = run.finish(run.run(self._graph))
        self._status.copy_(self.buffers.status, non_blocking=True)
        return logits

    def _bring(self, M: int) -> None:
        """Start copying a step's inputs to the device."""
        self.buffers.inputs.copy_(self._inputs, non_blocking=True)
        for name, rows in self._rows.items():
            getattr(self.buffers, name)[:M].copy_(rows[:M], non_blocking=True)
        if self._stream.numel():
            self.buffers.stream(M, self.spec.hidden_size).copy_(self._stream[:M], non_blocking=True)

    def _pass(self, shape: _Shape) -> Pass:
        M, R, way, draft, layers = shape
        run = Pass(self.model, self.buffers, M=M, R=R, way=way, draft=draft, sensitive=layers, side=self.side)
        run.watch = self._measure if self.options.measure_recall else None
        return run

    def _measure(self, linear: Linear, x: torch.Tensor, positions: torch.Tensor, experts: torch.Tensor | None) -> None:
        """Compare a selection with exact top-k; `experts` are those of rows that each belong to one."""
        assert linear.selection is not None
        indices = torch.empty((x.shape[0], linear.selection.k), dtype=torch.int32, device=x.device)
        values = torch.empty_like(indices, dtype=torch.float32)
        flag = self.buffers.flag
        select(x, linear.selection, indices, values, flag, positions=positions, experts=experts)
        self._recall_sum += float(recall(x, indices).sum())
        self._selections += x.shape[0]

    @staticmethod
    def _setting(
        k_chunk: Mapping[str, int] | int, applies: bool, n_tb: Mapping[str, int] | None = None
    ) -> tuple[tuple[str, int], ...]:
        """Compensation as part of a graph's shape; nothing where it does not apply."""
        blocks = n_tb or {}
        return (*k_chunk_by_type(k_chunk).items(), *sorted(blocks.items())) if applies else ()
