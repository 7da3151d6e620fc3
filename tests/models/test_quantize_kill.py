"""kill -9 at random moments of a quantization: the next run resumes, with the result of an undisturbed run.

One process imports everything and forks a child for every attempt, so that an attempt costs no imports.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from models.errors import ModelNotFoundError
from models.quantize import quantize
from models.recipe import Recipe
from models.store import Store
from models.store import store as store_module
from tests.models.conftest import TEXT, content, write_checkpoint

KILLS = 30
KILLS_OF_QOQ = 10

WORKER = """
import json, os, signal, sys, time
from pathlib import Path
import torch, transformers, tokenizers, numpy
from models import threads
from models.quantize import quantize, pipeline
from models.recipe import Recipe
from models.store import Store

torch.set_num_threads(1)
threads._cores = lambda: 1  # a forked process has no threads but one
text = Path(sys.argv[1]).read_text()


def make(source, root, name, method, bits):
    steps = {"residual_bits": 4, "rotate": True} if method == "qoq" else {}
    recipe = Recipe.usual(method, bits=bits, group_size=32, **steps)
    quantize(Path(source), Store(Path(root)), recipe, name=name, force=True, calibration=text, evaluation=text)


for line in sys.stdin:
    asked = json.loads(line)
    kill_after, here = asked.pop("kill_after"), asked.pop("here")
    child = 0 if here else os.fork()
    if child == 0:
        try:
            make(**asked)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        if not here:
            os._exit(0)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)  # if it is over, it waits as a zombie and its number is still its own
    print(0 if here else os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Attempts:
    """Starts quantizations in forked children of one process, and kills them."""

    def __init__(self, folder: Path) -> None:
        self.source = write_checkpoint(folder / "source", layers=4, family="qwen2", tied=False)
        self.root = folder
        (folder / "text").write_text(TEXT)
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(folder / "text")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TOKENIZERS_PARALLELISM": "false"},
        )
        for method, bits in (("gptq", 3), ("qoq", 4)):  # what is compiled is there for all children
            assert self.attempt("warm", bits, method=method, here=True) == 0

    def attempt(
        self, name: str, bits: int, kill_after: float | None = None, *, method: str = "gptq", here: bool = False
    ) -> int:
        """Run one quantization, killed after some seconds or in the process itself; the exit code."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        asked = {"source": str(self.source), "root": str(self.root), "name": name, "method": method, "bits": bits}
        self.process.stdin.write(json.dumps({**asked, "kill_after": kill_after, "here": here}) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def timed(self, name: str, bits: int, *, method: str = "gptq") -> tuple[dict[str, bytes], float]:
        """The files of a quantization that nothing disturbs, and how many seconds it takes."""
        begin = time.monotonic()
        assert self.attempt(name, bits, method=method) == 0
        return content(Store(self.root).path(name)), time.monotonic() - begin

    def close(self) -> None:
        self.process.communicate()


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attempts]:
    worker = Attempts(tmp_path_factory.mktemp("attempts"))
    yield worker
    worker.close()


@pytest.fixture
def attempts(worker: Attempts, tmp_path: Path) -> Attempts:
    """The worker with an empty store."""
    worker.root = tmp_path / "store"
    return worker


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_thirty_random_moments(attempts: Attempts) -> None:
    store, rng = Store(attempts.root), random.Random(20)
    expected, duration = attempts.timed("undisturbed", 3)
    killed = finished = resumed = 0
    while killed < KILLS or (not resumed and killed < 5 * KILLS):
        # Moments spread over a whole run: an attempt that goes on with another's work is over sooner. On a machine that
        # became slower all of them may come too early for work to be left.
        code = attempts.attempt("killed", 3, kill_after=rng.uniform(0, duration) * (1 + killed // KILLS))
        assert code in (0, -signal.SIGKILL)
        killed += code != 0
        if code == 0:
            finished += 1
            assert content(store.path("killed")) == expected
            store.remove("killed")
        else:
            resumed += any(store.work_folder("killed").glob("streams-*"))
        assert [entry.folder for entry in store.damaged()] == []
        store.verify("undisturbed")
    assert resumed > 0
    assert attempts.attempt("killed", 3) == 0
    assert content(store.path("killed")) == expected
    assert not any((store.root / ".work").iterdir())


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_qoq_killed_between_its_steps_goes_on(attempts: Attempts) -> None:
    """The steps of a block that was not finished are done anew: nothing twice, nothing left out."""
    store = Store(attempts.root)
    expected, duration = attempts.timed("undisturbed", 4, method="qoq")
    number = kept = 0
    while number < KILLS_OF_QOQ or (not kept and number < 5 * KILLS_OF_QOQ):
        # On a machine that became slower all of the first round's moments may come too early for work to be left.
        rounds, step = divmod(number, KILLS_OF_QOQ)
        moment = duration * (0.15 + 0.5 * step / KILLS_OF_QOQ) * (1 + rounds)
        code = attempts.attempt("killed", 4, moment, method="qoq")
        number += 1
        assert code in (0, -signal.SIGKILL)
        kept += code != 0 and any(store.work_folder("killed").glob("streams-*"))
        assert "killed" not in store or code == 0
        assert [entry.folder for entry in store.damaged()] == []
        if code == 0:
            assert content(store.path("killed")) == expected
            store.remove("killed")
    assert kept > 0
    assert attempts.attempt("killed", 4, method="qoq") == 0
    assert content(store.path("killed")) == expected
    assert not any((store.root / ".work").iterdir())


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_while_it_replaces_a_model(attempts: Attempts) -> None:
    """At any moment the name gives the old model or the new one, whole."""
    store, rng = Store(attempts.root), random.Random(21)
    timed = {bits: attempts.timed(f"bits{bits}", bits) for bits in (3, 4)}
    contents, duration = {bits: files for bits, (files, _) in timed.items()}, timed[4][1]
    assert attempts.attempt("model", 3) == 0
    for attempt in range(8):
        bits = 4 - attempt % 2
        # Towards the end, where the models are exchanged.
        attempts.attempt("model", bits, kill_after=duration * rng.uniform(0.5, 1.1))
        store.verify("model")
        assert content(store.path("model")) in contents.values()
    assert attempts.attempt("model", 4) == 0
    assert content(store.path("model")) == contents[4]


def test_a_kill_between_the_two_renames_keeps_the_old_model(
    tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store")
    old_recipe, recipe = (Recipe(bits=bits, method="rtn", residual_bits=0) for bits in (3, 4))
    quantize(tiny_checkpoint, store, old_recipe, name="model")
    old = content(store.path("model"))
    moves: list[Path] = []

    def move(source: Path, target: Path) -> None:
        if moves:
            raise KeyboardInterrupt
        moves.append(source)
        source.rename(target)

    monkeypatch.setattr(store_module, "move_folder", move)
    with pytest.raises(KeyboardInterrupt):
        quantize(tiny_checkpoint, store, recipe, name="model", force=True)
    monkeypatch.undo()
    assert not store.path("model").exists()
    assert [info.recipe.bits for info in store.list()] == [3]
    assert content(store.path("model")) == old
    assert quantize(tiny_checkpoint, store, recipe, name="model", force=True).recipe == recipe
    with pytest.raises(ModelNotFoundError):
        store.open("other")
