"""CPU decoder: a stored model on the CPU backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from models.packed import Weights
from runtime.backends import NO_EXPERTS
from runtime.backends.cpu.cache import CpuCache
from runtime.backends.cpu.constants import Constants
from runtime.backends.cpu.data.records import CONTROL_WORDS, FAILED, RUN_ROWS, padded, parameters_of
from runtime.backends.cpu.link import link, paging_units, prompt_units
from runtime.backends.cpu.machine.build import build_later
from runtime.backends.cpu.machine.isa import VARIANT
from runtime.backends.cpu.machine.loader import rest
from runtime.backends.cpu.plan import PlanOperations, Program
from runtime.backends.cpu.pool import Pool, default_threads
from runtime.backends.cpu.tiles import aligned_zeros
from runtime.backends.decoder import (
    DecoderOptions,
    Float32Array,
    Step,
    check_step,
    compensation_of,
    options_of_mtp,
    sensitive,
)
from runtime.backends.operations.channels import k_chunk_of
from runtime.compensation import k_chunk_by_type
from runtime.errors import InvalidActivationError, RequestError

_PROGRAMS = 9
"""Number of recorded programs to keep."""
NOT_FINITE = (
    "the model produced a number that is not finite (NaN or infinity): its weights are damaged, or the checkpoint was "
    "quantized from a broken one; run `lowbit-chat show NAME --verify`"
)
FEW_ROWS = 16
"""Up to this many rows, a prompt is compensated by a separate product with the residuals; for more rows a panel
pays."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """What a model shares with its block that predicts further tokens: they run one after the other."""

    control: npt.NDArray[np.int64]
    inputs: npt.NDArray[np.int32]
    runs: npt.NDArray[np.int32]
    pool: Pool
    constants: Constants


class CpuDecoder:
    """Implements `runtime.backends.decoder.Decoder` with the compiled CPU kernels.

    Args:
        model: The stored model.
        options: How to run it.
        shared: Of the model that this one is a block of.

    Raises:
        RequestError: an option is out of range.
    """

    backend = "cpu"

    def __init__(self, model: Weights, options: DecoderOptions, shared: _Shared | None = None) -> None:
        self.spec, self.options = model.spec, options
        self.variant = VARIANT
        """Instruction set of the kernels."""
        if options.context < 1 or options.slots < 1 or options.max_rows < 1:
            raise RequestError("context, slots and max_rows must be at least 1")
        if options.exact is not None and model.spec.mixture is not None:
            raise RequestError(NO_EXPERTS)
        options = replace(options, sensitive_layers=sensitive(options.sensitive_layers, model.spec))
        threads = options.threads or default_threads()
        self.cache = CpuCache(model.spec, options, threads)
        self._kv_heads = min([model.spec.heads_of(layer).kv_heads for layer in model.spec.attention_layers] or [1])
        self._control = aligned_zeros((CONTROL_WORDS,), np.int64) if shared is None else shared.control
        self._parameters = parameters_of(self._control)
        self._inputs = aligned_zeros((4, options.max_rows), np.int32) if shared is None else shared.inputs
        self._runs = aligned_zeros((options.max_rows, 2), np.int32) if shared is None else shared.runs
        for name, array in zip(("tokens", "slots", "positions", "logit_rows"), self._inputs, strict=True):
            self._parameters[name] = array.ctypes.data
        self._parameters["run_rows"] = self._runs.ctypes.data
        self._threads, self._rows = threads, 0
        self._make_room(self.cache.scratch_bytes)
        lender = None if shared is None else shared.constants
        self._plan = PlanOperations(model, options, self.cache, self._threads, lender)
        pages = paging_units(self.cache.kind)
        self._plan.paged = all(unit.is_compiled for unit in pages)
        build_later([*prompt_units(model), *pages])
        self._programs: dict[tuple[object, ...], Program] = {}
        self._program = self._recorded(options.k_chunk)
        self._drafts = self._recorded(options.draft_k_chunk)
        self._prompts = self._recorded_together(options)
        self._pool = Pool(self._control, threads) if shared is None else shared.pool
        self._pool.prepare()
        self.cache.use(self._pool)
        self._selections = 0
        self.kv_bytes = self.cache.nbytes
        self.weight_bytes = self._plan.weight_bytes
        self.mtp: CpuDecoder | None = None
        if options.mtp and model.mtp is not None:
            lent = _Shared(self._control, self._inputs, self._runs, self._pool, self._plan.constants)
            self.mtp = CpuDecoder(model.mtp, options_of_mtp(options), lent)
            self.kv_bytes += self.mtp.kv_bytes

    @property
    def threads(self) -> int:
        """Threads that a step runs on."""
        return self._pool.threads

    @property
    def recall(self) -> float | None:
        """Mean recall of all selections so far, against exact top-k of the whole row; None if unmeasured."""
        if not self.options.measure_recall or not self._selections:
            return None
        return float(self._plan.recall_sums.sum(dtype=np.float64) / self._selections)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Keep the threads ready between steps; a generation runs inside a session."""
        try:
            with self._pool.session():
                yield
        finally:
            self._plan.release()  # rows of the embedding table

    def forward(self, step: Step) -> Float32Array:
        M, R = step.tokens.size, step.logit_rows.size
        self._rows = M
        check_step(step, self.spec, self.options)
        for array, values in zip(self._inputs, (step.tokens, step.slots, step.positions, step.logit_rows), strict=True):
            array[: values.size] = values
        self.cache.begin(step.slots, step.positions, flush=step.flush, draft=step.draft)
        if step.stream is not None:
            self._plan.stream[:M, : self.spec.hidden_size] = step.stream
        if not self._plan.paged and any(self.cache.paged_length(int(slot)) for slot in np.unique(step.slots)):
            self._link_pages()
        runs = self._write_runs(step)
        control, parameters = self._control, self._parameters
        parameters["rows"], parameters["wanted_rows"], parameters["runs"] = M, R, runs
        # Few rows, and all rows outside prompts, are split as if alone, whatever else is in the step.
        splits = self._splits(1 if M <= FEW_ROWS or not step.prefill else runs)
        parameters["splits"], parameters["items"] = splits, runs * self._kv_heads * splits
        way = compensation_of(step, self.options)
        program = self._drafts if step.draft else self._program
        if way == "shared":
            program = self._recorded_together(self.options, few=True) if M <= FEW_ROWS else self._prompts
        parameters["compensate"], parameters["draft"] = way != "none", step.draft
        control[FAILED] = 0
        self._pool.step(program.words, token=M == 1, draft=step.draft)
        rows, width = (R, self.spec.vocab_size) if self.spec.has_head else (M, self.spec.hidden_size)
        result = program.result[:rows, :width]
        if control[FAILED] or not (self.spec.has_head or np.isfinite(result).all()):
            raise InvalidActivationError(NOT_FINITE)
        if way != "none" and self.options.measure_recall:
            blocks, head = program.selections
            self._selections += M * blocks + R * head
        return result

    def hidden(self, step: Step) -> Float32Array:
        """See `runtime.backends.decoder.Decoder.hidden`.

        Recorded programs apply the final norm only to wanted rows, so it is computed here.
        """
        self.forward(step)
        hidden = self.left()
        if not np.isfinite(hidden).all():
            raise InvalidActivationError(NOT_FINITE)
        return hidden

    def left(self) -> Float32Array:
        x = self._plan.stream[: self._rows, : self.spec.hidden_size].astype(np.float64)
        scale = 1 / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + self.spec.norm_eps)
        normed: Float32Array = (x * scale * self._plan.final_norm).astype(np.float32)
        return normed

    def set_k_chunk(self, k_chunk: Mapping[str, int] | int, n_tb: Mapping[str, int] | None = None) -> None:
        """See `runtime.backends.decoder.Decoder.set_k_chunk`. Thread blocks are ignored."""
        wanted = replace(self.options, k_chunk=k_chunk, n_tb=dict(n_tb or {}))
        self._program, self._prompts = self._recorded(k_chunk), self._recorded_together(wanted)
        self.options = wanted

    def set_prompt_k_chunk(self, prompt_k_chunk: Mapping[str, int] | int) -> None:
        wanted = replace(self.options, prompt_k_chunk=prompt_k_chunk)
        self._prompts = self._recorded_together(wanted)
        self.options = wanted

    def set_draft_k_chunk(self, draft_k_chunk: Mapping[str, int] | int) -> None:
        self._drafts = self._recorded(draft_k_chunk)
        self.options = replace(self.options, draft_k_chunk=draft_k_chunk)

    def set_sensitive_layers(self, layers: Sequence[int]) -> None:
        wanted = sensitive(layers, self.spec)
        self.cache.read_exactly(wanted)
        self.options = replace(self.options, sensitive_layers=wanted)

    def layer_program(self, kind: str, k_chunk: int) -> npt.NDArray[np.int64]:
        """The products of one layer type in all blocks, with their selections, for timing.

        Args:
            kind: Layer type.
            k_chunk: Salient channels per 1024 of that type.

        Returns:
            int64 [instructions, WIDTH], for `run_layers`.
        """
        program = self._plan.record({kind: k_chunk})
        self._make_room(program.scratch)
        return np.ascontiguousarray(program.words[[own == kind for own in program.kinds]])

    def run_layers(self, program: npt.NDArray[np.int64]) -> None:
        """Run a program from `layer_program` for one row of whatever activations are in the buffers."""
        for name in ("rows", "wanted_rows", "compensate"):
            self._parameters[name] = 1
        self._pool.step(program)

    def close(self) -> None:
        """See `runtime.backends.decoder.Decoder.close`. No threads run between sessions, so there are none to stop."""

    def _recorded_together(self, options: DecoderOptions, *, few: bool = False) -> Program:
        """The program for rows of a prompt; the one of other steps if prompts are not compensated.

        The program for few rows is recorded when first needed.
        """
        if not any(k_chunk_by_type(options.prompt_k_chunk).values()):
            return self._program
        head = {"head": k_chunk_of(options.k_chunk, "head")}
        return self._recorded(head, options.prompt_k_chunk, few=few)

    def _recorded(
        self, k_chunk: Mapping[str, int] | int, prompt: Mapping[str, int] | int | None = None, *, few: bool = False
    ) -> Program:
        """The program for a k_chunk; recent ones are kept, so that a timer can alternate."""
        key = (few, *(tuple(k_chunk_by_type(own).items()) for own in (k_chunk, prompt) if own is not None))
        if key not in self._programs:
            while len(self._programs) >= _PROGRAMS:
                del self._programs[next(iter(self._programs))]
            self._programs[key] = self._plan.record(k_chunk, prompt, few=few)
            self._plan.release()
            rest()
        self._make_room(self._programs[key].scratch)
        return self._programs[key]

    def _link_pages(self) -> None:
        """Link programs again, with attention to pages; waits if that is still being compiled."""
        self._plan.paged = True
        programs = (*self._programs.values(), self._program, self._drafts, self._prompts)
        for program in {id(program): program for program in programs}.values():
            link(program.words, self._threads)
        rest()

    def _make_room(self, scratch: int) -> None:
        """Ensure this many bytes of scratch per thread."""
        if scratch > self._parameters["scratch_stride"]:
            self._scratch = aligned_zeros((self._threads, padded(scratch, 64)), np.uint8)
            self._parameters["scratch"] = self._scratch.ctypes.data
            self._parameters["scratch_stride"] = self._scratch.strides[0]

    def _write_runs(self, step: Step) -> int:
        """Group the rows into runs of one sequence at consecutive positions. Returns their number."""
        M = step.tokens.size
        if M == 1:
            self._runs[0] = (0, 1)
            return 1
        starts = [0]
        for row in range(1, M):
            follows = step.slots[row] == step.slots[row - 1] and step.positions[row] == step.positions[row - 1] + 1
            if not follows or row - starts[-1] == RUN_ROWS:
                starts.append(row)
        self._runs[: len(starts), 0] = starts
        self._runs[: len(starts), 1] = np.diff([*starts, M])
        return len(starts)

    def _splits(self, runs: int) -> int:
        """Splits of a head's context, enough to occupy every thread; short contexts are split less."""
        items = runs * self._kv_heads
        return max(1, min(-(-2 * self._pool.threads // items), self.cache.max_splits))
