"""Captured steps without a card: a capture keeps what the host said, a replay runs it again over what changed since."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from runtime.backends.decoder import DecoderOptions
from runtime.backends.triton import decoder as graphs
from runtime.backends.triton.decoder import CAPTURED_ROWS, Graphs, TritonDecoder, _Shape
from runtime.text.sampling import Sampler, SamplingOptions
from tests.runtime.backends.steps import rows
from tests.runtime.backends.triton.decoding import step


class Recorder:
    """Stands for CUDA: captures without running, and runs what was captured at each replay."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error, self.captured, self.replayed = error, 0, 0

    def __call__(self, launches: Callable[[], Any], _pool: Any) -> tuple[Callable[[], object], Any, Any]:
        if self.error is not None:
            raise self.error
        self.captured += 1
        result = launches()

        def replay() -> None:
            self.replayed += 1
            again = launches()
            assert again is result or again.data_ptr() == result.data_ptr()

        return replay, result, "pool"


@pytest.fixture
def recorded(small: Any, device: str) -> Any:
    """Two decoders of one model: one that captures by a recorder, one that launches."""

    def made(recorder: Recorder, **options: Any) -> tuple[TritonDecoder, TritonDecoder]:
        model = small(bits=4)
        how = DecoderOptions(context=16, slots=3, max_rows=6, select="static", **options)
        both = TritonDecoder(model, how, device), TritonDecoder(model, how, device)
        both[0]._graphs = Graphs(recorder)
        return both

    return made


def cheap(decoder: TritonDecoder) -> TritonDecoder:
    """Without kernels: one buffer of logits."""
    logits = torch.zeros(6, decoder.spec.vocab_size)
    decoder._launch = lambda shape: logits[: shape.R]  # type: ignore[method-assign]
    return decoder


@pytest.mark.slow
def test_a_captured_step_answers_for_any_slots_and_positions(recorded: Any) -> None:
    """One graph for a number of rows, whichever sequences they belong to; bit for bit what launches give."""
    recorder = Recorder()
    captured, launched = recorded(recorder, k_chunk=300)
    steps = [
        rows([5, 6], [0, 1], [0, 0]),
        rows([9, 3], [0, 1], [1, 1]),
        rows([4, 8], [0, 2], [2, 0]),
        rows([7, 1], [1, 1], [2, 3]),
    ]
    for number, one in enumerate(steps):
        assert np.array_equal(np.array(captured.forward(one)), launched.forward(one)), number
        assert (recorder.captured, recorder.replayed) == (min(number, 1), number)


def test_a_shape_is_all_that_launches_bake_in(recorded: Any) -> None:
    """Rows, rows of logits, compensation and drafts each have their own graph; a setting met again has its old one."""
    recorder = Recorder()
    captured = cheap(recorded(recorder)[0])
    one, fewer = rows([5, 6], [0, 1], [0, 0]), rows([5, 6], [0, 1], [0, 0], [1])
    alone = rows([5], [0], [0])
    draft = rows([5], [0], [0], draft=True)
    for shape in (one, fewer, alone, draft):
        captured.forward(shape)
        captured.forward(shape)
    assert recorder.captured == 4
    captured.set_sensitive_layers([0])
    for shape, expected in ((draft, 5), (alone, 5)):
        captured.forward(shape)
        captured.forward(shape)
        assert recorder.captured == expected
    for k_chunk, expected in ((100, 6), (0, 6), (100, 6)):
        captured.set_k_chunk(k_chunk)
        captured.forward(alone)
        captured.forward(alone)
        assert recorder.captured == expected


def test_a_prompt_s_setting_drops_graphs_with_its_buffers(recorded: Any) -> None:
    recorder = Recorder()
    captured = cheap(recorded(recorder, prompt_k_chunk=1024)[0])
    prompt = step([5, 9, 3, 47, 12, 8], 0, prefill=True, rows=[5])
    for expected, level in ((1, 1024), (2, 300), (3, 1024)):
        captured.set_prompt_k_chunk(level)
        for _ in range(3):
            captured.forward(prompt)
        assert recorder.captured == expected
    captured.set_k_chunk({"head": 8})  # by which a prompt's head is compensated
    captured.forward(prompt)
    captured.forward(prompt)
    assert recorder.captured == 4


@pytest.mark.slow
def test_a_captured_prompt_copies_residuals_again(recorded: Any) -> None:
    recorder = Recorder()
    captured, launched = recorded(recorder, prompt_k_chunk=1024)
    for tokens in ([5, 9, 3, 47, 12, 8], [1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]):
        prompt = step(tokens, 0, prefill=True, rows=[5])
        assert np.array_equal(np.array(captured.forward(prompt)), launched.forward(prompt))
    assert (recorder.captured, recorder.replayed) == (1, 2)


@pytest.mark.parametrize("size", [2, 5])
def test_prompts_of_other_lengths_are_launched(recorded: Any, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("runtime.backends.triton.decoder.CAPTURED_ROWS", 3)
    assert CAPTURED_ROWS == 32
    recorder = Recorder()
    captured = cheap(recorded(recorder)[0])
    for _ in range(2):
        captured.forward(step(list(range(size)), 0, prefill=True, rows=[size - 1]))
    assert recorder.captured == (size <= 3)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried"), torch.AcceleratorError("CUDA error: out of memory")]
)
def test_a_capture_that_fails_leaves_launches_and_a_message(
    recorded: Any, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    captured, launched = recorded(Recorder(error))
    one = rows([5], [0], [0])
    for _ in range(3):
        assert np.array_equal(np.array(captured.forward(one)), launched.forward(one))
    (problem,) = captured.problems
    assert "kernel by kernel" in problem.what
    assert "out of memory" in problem.what
    assert [record.message for record in caplog.records] == [problem.what]


def test_a_captured_draw_samples_other_logits_with_other_numbers(recorded: Any) -> None:
    """One graph for each row and way to sample; an answer's tokens double before it needs another."""
    recorder = Recorder()
    decoder = cheap(recorded(Recorder())[0])
    decoder._drawing = Graphs(recorder)
    options = SamplingOptions(seed=8, temperature=0.8, top_k=20, repetition_penalty=1.3, logprobs=2)
    ours, theirs = ([Sampler(options, [row]) for row in range(2)] for _ in range(2))
    logits = decoder._launch(_Shape(2, 2, "none", False))
    for number in range(40):
        logits.copy_(3 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(number)))
        found = decoder.draw(rows([5, 6], [0, 1], [0, 0]), [each.draw_inputs() for each in ours])
        assert [each.token for each in found] == [
            each.draw(row.numpy()) for each, row in zip(theirs, logits, strict=True)
        ]
        for sampler, each in zip(ours, found, strict=True):
            sampler.note(each.token)
    assert recorder.captured <= 6
    assert recorder.replayed >= 2 * 40 - 6


def test_the_oldest_graph_makes_room_for_one_that_comes_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "KEPT", 2)
    monkeypatch.setattr(graphs, "OFTEN", 3)
    made: list[str] = []

    def capture(launches: Callable[[], Any], pool: Any) -> Any:
        made.append(f"{launches()} beside {pool}")
        return (lambda: None), launches(), launches()

    found = Graphs(capture)
    for shape in "aabbaccaca" + "cbbb":
        assert found.run(shape, lambda name=shape: name) == shape
    assert made == ["a beside None", "b beside a", "c beside a"]
    found.run("b", lambda: "b")
    assert made[3:] == ["b beside c"]


def test_more_shapes_than_are_kept_are_hardly_ever_captured() -> None:
    """As drafts of a batch make: in turn, each would be captured every time that it comes."""
    captured = 0

    def capture(launches: Callable[[], Any], _pool: Any) -> Any:
        nonlocal captured
        captured += 1
        return (lambda: None), launches(), None

    found, rounds, shapes = Graphs(capture), 24, graphs.KEPT + 8
    for number in range(rounds * shapes):
        found.run(number % shapes, lambda: 0)
    assert captured <= graphs.KEPT + rounds * shapes / graphs.OFTEN


class Card:
    """Stands for torch.cuda: counts how often captures empty its caches."""

    def __init__(self, free: int) -> None:
        self.free, self.emptied = free, 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        card = self

        class Graph:
            def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
                assert (pool, capture_error_mode) == ("pool", graphs.CAPTURE_MODE)

            def capture_end(self) -> None:
                self.ended = True

            def replay(self) -> None: ...

            def pool(self) -> str:
                return "pool"

        def whole(graph: Graph, pool: Any, capture_error_mode: str) -> Any:
            card.emptied += 1
            return nullcontext()

        own = {"CUDAGraph": Graph, "graph": whole, "current_stream": object, "mem_get_info": lambda: (card.free, 0)}
        own |= {"stream": lambda _: nullcontext(), "current_device": lambda: 0}
        for name, stand_in in own.items():
            patch.setattr(torch.cuda, name, stand_in)
        patch.setattr(graphs, "_capturing", lambda _: None)


@pytest.mark.parametrize(("free", "emptied"), [(1 << 30, 1), (1 << 20, 3)])
def test_captures_behind_the_first_leave_caches_alone(free: int, emptied: int, monkeypatch: pytest.MonkeyPatch) -> None:
    card, pool = Card(free), None
    card.install(monkeypatch)
    for number in range(3):
        _, result, pool = graphs.capture(lambda one=number: one, pool)
        assert result == number
    assert card.emptied == emptied
