"""The warm-up after a load: kernels that are compiled together, without a card; steps, reports, and failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from models.progress import Progress
from runtime.backends import backend
from runtime.backends.decoder import DecoderOptions, Step
from runtime.backends.triton import backend as entrance
from runtime.backends.triton import warmup
from runtime.backends.triton.decoder import TritonDecoder
from runtime.errors import BackendError, OutOfMemoryError
from runtime.kv.kinds import KINDS

SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 32}


class Recorded:
    """A decoder that keeps its cache's books and computes nothing."""

    def __init__(self, decoder: TritonDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decoder, self.steps, self.drawn, self.flushed = decoder, [], 0, 0
        monkeypatch.setattr(decoder, "side", None)  # as without a card, where nothing is compiled beforehand
        monkeypatch.setattr(decoder, "forward", self.forward)
        monkeypatch.setattr(decoder, "draw", self.draw)
        monkeypatch.setattr(decoder.cache.store, "flush", self.flush)

    def forward(self, step: Step) -> Any:
        self.decoder.cache.begin(step.slots, step.positions, flush=step.flush)
        self.steps.append(step)
        return np.zeros((1, 1), np.float32)

    def draw(self, step: Step, draws: Any) -> None:
        self.forward(step)
        self.drawn += len(draws)

    def flush(self, slot: int, page: int, rest: int) -> None:
        self.flushed += 1


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("context", [5, 100, 1024])
def test_every_size_of_step_comes_once(
    tiny_model: Any, tiny_spec: Any, device: str, monkeypatch: pytest.MonkeyPatch, kv: Any, context: int
) -> None:
    model = tiny_model(tiny_spec(**SMALL, max_context=2048), bits=4)
    decoder = TritonDecoder(model, DecoderOptions(context=context, max_rows=64, kv=kv), device)
    recorded, said = Recorded(decoder, monkeypatch), list[Progress]()
    warmup.warm_up(decoder, said.append)
    prompts = {step.tokens.size for step in recorded.steps if step.prefill}
    assert prompts == {M for M in (1, 2, 4, 8, 16, 32, 64) if context >= M}
    assert [step.tokens.size for step in recorded.steps if not step.prefill] == [2, 1, 1]
    assert recorded.drawn == 1
    assert (recorded.flushed > 0) == (decoder.cache.kind.windowed and context == 1024)
    assert decoder.cache.length(0) == 0
    assert [report.done for report in said] == list(range(len(recorded.steps)))
    assert {(report.phase, report.total) for report in said} == {("compile", len(recorded.steps))}


def test_on_a_card_kernels_are_compiled_together_first(
    tiny_model: Any, tiny_spec: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = TritonDecoder(tiny_model(tiny_spec(**SMALL), bits=4), DecoderOptions(context=100, max_rows=64), device)
    recorded, said, rows = Recorded(decoder, monkeypatch), list[Progress](), list[int]()

    def together(launches: Any, done: Any) -> None:
        for launch in launches:
            launch()
        rows.extend(step.tokens.size for step in recorded.steps)
        done(3, 9)

    monkeypatch.setattr(decoder, "start", decoder.forward)
    monkeypatch.setattr(decoder, "side", "a stream")
    monkeypatch.setattr(warmup, "compile_together", together)
    warmup.warm_up(decoder, said.append)
    assert rows == [1, 2, 1, 2, 16, 32]
    assert (said[0].done, said[0].total, said[0].unit) == (3, 9, "kernels")
    assert "first time" in said[0].message
    assert recorded.steps[len(rows)].positions[0] == 0


def test_the_model_answers_as_it_does_without(tiny_model: Any, tiny_spec: Any, device: str) -> None:
    model = tiny_model(tiny_spec(**SMALL, vocab_size=64), bits=4)
    options = DecoderOptions(context=8, max_rows=2)
    warmed, cold = backend("triton"), TritonDecoder(model, options, device)
    step = Step(**{name: np.zeros(1, np.int32) for name in ("tokens", "slots", "positions", "logit_rows")})
    made = TritonDecoder(model, options, device)
    warmup.warm_up(made, lambda _: None)
    assert np.array_equal(np.array(made.forward(step)), cold.forward(step))
    assert warmed.problems(made) == ()


@pytest.mark.parametrize("error", [BackendError("no compiler"), OutOfMemoryError("full"), KeyboardInterrupt()])
def test_a_first_step_that_fails_closes_the_model(
    monkeypatch: pytest.MonkeyPatch, tiny_spec: Any, error: BaseException
) -> None:
    closed = []

    class Opened:
        def __init__(self, model: object, options: object) -> None: ...

        def close(self) -> None:
            closed.append(self)

    def fail(decoder: object, progress: object) -> None:
        raise error

    monkeypatch.setattr("runtime.backends.triton.decoder.TritonDecoder", Opened)
    monkeypatch.setattr("runtime.backends.triton.warmup.warm_up", fail)
    model: Any = SimpleNamespace(spec=tiny_spec())
    with pytest.raises(type(error)):
        entrance.BACKEND.open(model, DecoderOptions())
    assert len(closed) == 1


pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parents[4]

KERNELS = '''
import json, sys
import torch, triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class Driver:
    """One card that is not there."""
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 89, 32))

driver.set_active(Driver())

@triton.jit
def add(x_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets) + 1)

@triton.jit
def wrong(x_ptr, N: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, N), tl.reshape(tl.arange(0, N), [N // 32, 32]))

x = torch.zeros(64, dtype=torch.int32)
'''
TOGETHER = """
from runtime.backends.triton.warmup import compile_together
told, launched = [], []
run = JITFunction.run
steps = {steps}
compiled = compile_together([lambda s=s: launched.append([kernel[(1,)](x, N=n) for kernel, n in s]) for s in steps],
                            lambda *ready: told.append(ready))
kept = {{kernel.fn.__name__: sorted(type(one).__name__ for one in kernel.device_caches[0][0].values())
        for kernel in (add, wrong)}}
assert JITFunction.run is run and knobs.compilation.listener is None
print(json.dumps({{"compiled": compiled, "told": told, "launched": launched, "kept": kept}}))
"""


def together(folder: Path, steps: str, behind: str = "") -> dict[str, Any]:
    """What came of it, in a process of its own."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    file = folder / "kernels.py"
    file.write_text(KERNELS + TOGETHER.format(steps=steps) + behind)
    done = subprocess.run([sys.executable, str(file)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    return json.loads(first) | {"said": rest}


def test_kernels_are_compiled_and_nothing_is_launched(tmp_path: Path) -> None:
    """A driver that can launch nothing would raise. Each variant is compiled once, however often it comes."""
    found = together(tmp_path, "[[(add, 32)], [(add, 64), (add, 128), (add, 64)], [(add, 128)]]")
    assert found["compiled"] == 3
    assert found["launched"] == [[None], [None] * 3, [None]]
    assert found["kept"]["add"] == ["CompiledKernel"] * 3
    assert found["told"] == [[1, 1], [1, 2], [2, 2]]
    again = together(tmp_path, "[[(add, 32)], [(add, 64)]]")
    assert (again["compiled"], len(again["launched"])) == (0, 1)


def test_other_threads_go_on_launching(tmp_path: Path) -> None:
    """This driver can launch nothing, and says so."""
    behind = """
from concurrent.futures import ThreadPoolExecutor
elsewhere = ThreadPoolExecutor(1)

def beside(done, total):
    try:
        elsewhere.submit(lambda: add[(1,)](x, N=32)).result()
    except AttributeError as error:
        print("launched")
    else:
        raise AssertionError("swallowed")

assert compile_together([lambda: add[(1,)](x, N=256)], beside) == 1
"""
    assert "launched" in together(tmp_path, "[[(add, 32)], []]", behind)["said"]


def test_a_kernel_that_does_not_compile_says_so_when_it_is_launched(tmp_path: Path) -> None:
    behind = """
try:
    wrong[(1,)](x, N=16)
except triton.compiler.errors.CompilationError as error:
    assert "cannot change total number" in str(error), error
else:
    raise AssertionError("launched")
"""
    found = together(tmp_path, "[[(wrong, 16), (add, 32)], [(add, 64)]]", behind)
    assert found["kept"] == {"add": ["CompiledKernel"] * 2, "wrong": []}


def test_whoever_stops_it_leaves_nothing_that_waits(tmp_path: Path) -> None:
    behind = """
from itertools import count
from threading import Event
import runtime.backends.triton.warmup as compiling

compiling.MOST, turns, stopped, build = 2, count(), Event(), add.compile

def first_alone(*source, **how):
    next(turns) and stopped.wait()
    return build(*source, **how)

def stop(done, total):
    stopped.set()
    raise KeyboardInterrupt

add.compile = first_alone
try:
    compile_together([lambda: [add[(1,)](x, N=n) for n in (1, 2, 4, 8, 16, 64, 128, 256, 512, 1024)]], stop)
except KeyboardInterrupt:
    assert JITFunction.run is run and knobs.compilation.listener is None
    kept = [type(one).__name__ for one in add.device_caches[0][0].values()]
    assert set(kept) == {"CompiledKernel"} and len(kept) < 11, kept
else:
    raise AssertionError("went on")
"""
    together(tmp_path, "[[(add, 32)]]", behind)
