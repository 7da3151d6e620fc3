"""GPU decoder: a stored model on the GPU, one graph replay for each decoded token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import wraps
from subprocess import CalledProcessError
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from triton.errors import TritonError

from models.architecture import body, forward
from models.weights import Weights
from runtime.backends.decoder import DecoderOptions, Float32Array, Step, Way, check_step, compensation_of
from runtime.backends.operations.channels import LAYER_KINDS, k_chunk_of
from runtime.backends.triton.failures import explained, first_line
from runtime.backends.triton.forward import Buffers, Pass
from runtime.backends.triton.kernels.select import Selection, recall, select
from runtime.backends.triton.model import GpuModel, Linear
from runtime.backends.triton.reclaim import return_cached
from runtime.backends.triton.sampling import DeviceDraw
from runtime.compensation import k_chunk_by_type
from runtime.errors import BackendError, InvalidActivationError, OutOfMemoryError, RequestError
from runtime.text.sampling import Draw, Drawn

_NOT_FINITE = (
    "the model produced a number that is not finite (NaN or infinity): its weights are damaged, or its activations "
    "leave the range of half precision; run `lowbit-chat show NAME --verify`, or use the CPU backend"
)
_GRAPHS = 8
"""Number of captured steps to keep, so that a timer can alternate between two settings, and speculation between drafts
and the target."""
_TRITON_S = ("Triton Error", "Failed to find C compiler")
"""Prefix of Triton's errors that have no type of their own."""
CAPTURE_MODE = "thread_local"
"""Capture mode that lets other threads use the card during a capture: they measure its link, or its free memory."""
P = ParamSpec("P")
T = TypeVar("T")


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
    """Raise RequestError if drafts are to be compensated."""
    if any(k_chunk_by_type(k_chunk).values()):
        raise RequestError("the GPU backend drafts without compensation: leave the drafts' k_chunk at 0")


class TritonDecoder:
    """Implements `runtime.backends.decoder.Decoder` with Triton kernels.

    A step of one row with its logits, a decoded token, is captured once for every k_chunk and then replayed: the host
    writes three numbers, starts the graph and waits for the logits, or for the sampled token. Every other step launches
    kernel by kernel.

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
        self.spec, self.options = model.spec, options
        self._device = torch.device(device)
        self._model = GpuModel(model, options, self._device)
        self._model.set_k_chunk(options.k_chunk, options.n_tb)
        self._buffers = Buffers(self._model, options.max_rows)
        self._on_gpu = self._device.type == "cuda"
        self._side = torch.cuda.Stream(self._device, priority=-1) if self._on_gpu else None  # type: ignore[no-untyped-call]
        self._model.set_prompt_k_chunk(options.prompt_k_chunk, self._side)
        pinned = self._on_gpu
        self._inputs = torch.zeros((3, 1), dtype=torch.int32, pin_memory=pinned)
        self._logits = torch.zeros((1, self.spec.vocab_size), pin_memory=pinned)
        self._status = torch.zeros(2, dtype=torch.int32, pin_memory=pinned)
        self._graphs: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, torch.Tensor, list[Selection | None]]] = {}
        self._recall_sum, self._selections, self._closed = 0.0, 0, False
        self.cache = self._model.cache
        self.kv_bytes = self.cache.store.nbytes
        self.weight_bytes = self._model.weight_bytes

    @property
    def model(self) -> GpuModel:
        """The model on the device."""
        return self._model

    @property
    def buffers(self) -> Buffers:
        """The activations on the device."""
        return self._buffers

    @property
    def side(self) -> torch.cuda.Stream | None:
        """The stream on which compensation runs; None under the interpreter."""
        return self._side

    @property
    def recall(self) -> float | None:
        """Mean recall of all selections so far, against exact top-k of the whole row; None if unmeasured."""
        return self._recall_sum / self._selections if self._selections else None

    @_explained
    def forward(self, step: Step) -> Float32Array:
        """See `runtime.backends.decoder.Decoder.forward`."""
        logits = self._run(step)
        one = step.logit_rows.size == 1
        host = self._logits.copy_(logits, non_blocking=True) if one else logits.to("cpu")
        self._wait()
        return host.numpy()

    @_explained
    def hidden(self, step: Step) -> Float32Array:
        """See `runtime.backends.decoder.Decoder.hidden`."""
        check_step(step, self.spec, self.options)
        self.cache.begin(step.slots, step.positions, flush=step.flush)
        run = self._pass(step)
        found = run.norm(body(run, self.spec), "norm").tensor.to("cpu", torch.float32)
        if not bool(torch.isfinite(found).all()):
            raise InvalidActivationError(_NOT_FINITE)
        return found.numpy()

    @_explained
    def draw(self, step: Step, draws: Sequence[Draw]) -> list[Drawn]:
        """See `runtime.backends.decoder.DrawsTokens.draw`."""
        if len(draws) != step.logit_rows.size:
            raise RequestError(f"{len(draws)} draws are not one for each of {step.logit_rows.size} rows of logits")
        ready = [DeviceDraw(draw, self._device) for draw in draws]
        logits = self._run(step)
        drawn = [each.launch(row) for each, row in zip(ready, logits, strict=True)]
        numbers = [each.to("cpu") for each in drawn]
        self._wait()
        return [each.result(found) for each, found in zip(ready, numbers, strict=True)]

    def _run(self, step: Step) -> torch.Tensor:
        """Launch a step. Returns its logits on the device, float32 [R, V], until the next step."""
        check_step(step, self.spec, self.options)
        self.cache.begin(step.slots, step.positions, flush=step.flush)
        decoding = step.tokens.size == 1 and step.logit_rows.size == 1
        if self._on_gpu and decoding and not self.options.measure_recall:
            return self._decode(step)
        return self._launch(step)

    def _wait(self) -> None:
        """Wait for the step, and raise if it computed NaN or infinity."""
        if self._on_gpu:
            torch.cuda.current_stream(self._device).synchronize()
        flag, total = int(self._status[0]), float(self._status[1:].view(torch.float32)[0])
        if flag or not math.isfinite(total):
            self._buffers.status.zero_()
            raise InvalidActivationError(_NOT_FINITE)

    def set_k_chunk(self, k_chunk: Mapping[str, int] | int, n_tb: Mapping[str, int] | None = None) -> None:
        """See `runtime.backends.decoder.Decoder.set_k_chunk`."""
        self._model.set_k_chunk(k_chunk, n_tb or {})
        self.options = replace(self.options, k_chunk=k_chunk, n_tb=dict(n_tb or {}))

    @_explained
    def set_prompt_k_chunk(self, prompt_k_chunk: Mapping[str, int] | int) -> None:
        """See `runtime.backends.decoder.Decoder.set_prompt_k_chunk`."""
        self._model.set_prompt_k_chunk(prompt_k_chunk, self._side)
        self.options = replace(self.options, prompt_k_chunk=prompt_k_chunk)

    def set_draft_k_chunk(self, draft_k_chunk: Mapping[str, int] | int) -> None:
        """See `runtime.backends.decoder.Decoder.set_draft_k_chunk`. Drafts are never compensated here."""
        _check_draft(draft_k_chunk)

    def session(self) -> AbstractContextManager[None]:
        """Nothing to keep ready: waiting for the device costs nothing."""
        return nullcontext()

    def close(self) -> None:
        """See `runtime.backends.decoder.Decoder.close`."""
        if self._closed:
            return
        self._closed = True
        self._graphs.clear()
        self._model.close()
        del self._buffers, self._inputs, self._logits, self._status
        with suppress(RuntimeError):  # a card that stopped working releases nothing
            return_cached()

    def _decode(self, step: Step) -> torch.Tensor:
        """Run one token: launch it the first time, which compiles all kernels, then capture, then replay."""
        way = compensation_of(step, self.options)
        key = (int(way != "none"), int(step.draft), *self._setting())
        if key not in self._graphs:
            logits = self._launch(step)
            while len(self._graphs) >= _GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            selections = [
                linear.selection for linear in self._model.linears.values()
            ]  # the graph contains their addresses
            self._graphs[key] = (*self._capture(way, draft=step.draft), selections)
            return logits
        for i, values in enumerate((step.tokens, step.slots, step.positions)):
            self._inputs[i, 0] = int(values[0])
        graph, logits, _ = self._graphs[key]
        graph.replay()
        return logits

    def _capture(self, way: Way, *, draft: bool) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Capture a decoded token, from the inputs in page-locked memory to the logits on the device."""
        buffers, graph = self._buffers, torch.cuda.CUDAGraph()
        buffers.logit_rows[:1] = 0
        with torch.cuda.graph(graph, capture_error_mode=CAPTURE_MODE):
            for i, values in enumerate((buffers.tokens, buffers.slots, buffers.positions)):
                values[:1].copy_(self._inputs[i], non_blocking=True)
            run = Pass(self._model, buffers, M=1, R=1, way=way, draft=draft, side=self._side)
            logits = run.finish(forward(run, self.spec))
            self._status.copy_(buffers.status, non_blocking=True)
        return graph, logits

    def _launch(self, step: Step) -> torch.Tensor:
        """Run any step, kernel by kernel."""
        run = self._pass(step)
        logits = run.finish(forward(run, self.spec))
        self._status.copy_(self._buffers.status, non_blocking=True)
        return logits

    def _pass(self, step: Step) -> Pass:
        """Copy a step's inputs to the device. Returns the launcher of its kernels."""
        M, R = step.tokens.size, step.logit_rows.size
        buffers = self._buffers
        inputs = (buffers.tokens, buffers.slots, buffers.positions, buffers.logit_rows)
        for to, values in zip(inputs, (step.tokens, step.slots, step.positions, step.logit_rows), strict=True):
            to[: values.size].copy_(torch.from_numpy(np.ascontiguousarray(values)))
        watch = self._measure if self.options.measure_recall else None
        return Pass(
            self._model,
            buffers,
            M=M,
            R=R,
            way=compensation_of(step, self.options),
            draft=step.draft,
            side=self._side,
            watch=watch,
        )

    def _measure(self, linear: Linear, x: torch.Tensor, positions: torch.Tensor) -> None:
        """Compare a selection with exact top-k."""
        assert linear.selection is not None
        indices = torch.empty((x.shape[0], linear.selection.k), dtype=torch.int32, device=x.device)
        values = torch.empty_like(indices, dtype=torch.float32)
        select(x, linear.selection, indices, values, self._buffers.flag, positions=positions)
        self._recall_sum += float(recall(x, indices).sum())
        self._selections += x.shape[0]

    def _setting(self) -> tuple[int, ...]:
        n_tb = self.options.n_tb
        return tuple(v for kind in LAYER_KINDS for v in (k_chunk_of(self.options.k_chunk, kind), n_tb.get(kind, 0)))
