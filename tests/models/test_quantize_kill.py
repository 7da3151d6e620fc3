"""kill -9 at random moments of a quantization: the next run resumes, with the result of an undisturbed run.

One process imports everything and forks a child for every attempt, so that an attempt costs no imports.
"""

from __future__ import annotations

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
from models.store import Store
from tests.models.conftest import TEXT, write_checkpoint

KILLS = 30
KILLS_OF_QOQ = 10

WORKER = """
import os, signal, sys, time
from pathlib import Path
import torch, transformers, tokenizers, numpy
from models.quantize import quantize, pipeline
from models.recipe import Recipe
from models.store import Store

torch.set_num_threads(1)
folder, root, text = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]).read_text()
for line in sys.stdin:
    name, method, bits, kill_after = line.split()
    child = os.fork()
    if child == 0:
        try:
            steps = {"residual_bits": 4, "rotate": True} if method == "qoq" else {}
            recipe = Recipe.usual(method, bits=int(bits), group_size=32, **steps)
            quantize(folder, Store(root), recipe, name=name, force=True, calibration=text, evaluation=text)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if kill_after != "never":
        time.sleep(float(kill_after))
        os.kill(child, signal.SIGKILL)  # if it is over, it waits as a zombie and its number is still its own
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Attempts:
    """Starts quantizations in forked children of one process, and kills them."""

    def __init__(self, folder: Path, root: Path, text: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(folder), str(root), str(text)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TOKENIZERS_PARALLELISM": "false"},
        )

    def attempt(self, name: str, bits: int, kill_after: float | None = None, *, method: str = "gptq") -> int:
        """Run one quantization, killed after some seconds; the exit code."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{name} {method} {bits} {'never' if kill_after is None else kill_after}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def attempts(tmp_path: Path) -> Iterator[Attempts]:
    folder = write_checkpoint(tmp_path / "source", layers=4, family="qwen2", tied=False)
    (tmp_path / "text").write_text(TEXT)
    attempts = Attempts(folder, tmp_path / "store", tmp_path / "text")
    yield attempts
    attempts.close()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_thirty_random_moments(attempts: Attempts, tmp_path: Path) -> None:
    store, rng = Store(tmp_path / "store"), random.Random(20)
    assert attempts.attempt("warm", 3) == 0
    begin = time.monotonic()
    assert attempts.attempt("undisturbed", 3) == 0
    duration = time.monotonic() - begin
    expected = content(store.path("undisturbed"))
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
def test_qoq_killed_between_its_steps_goes_on(attempts: Attempts, tmp_path: Path) -> None:
    """The steps of a block that was not finished are done anew: nothing twice, nothing left out."""
    store = Store(tmp_path / "store")
    assert attempts.attempt("warm", 4, method="qoq") == 0
    begin = time.monotonic()
    assert attempts.attempt("undisturbed", 4, method="qoq") == 0
    duration = time.monotonic() - begin
    expected = content(store.path("undisturbed"))
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
def test_killed_while_it_replaces_a_model(attempts: Attempts, tmp_path: Path) -> None:
    """At any moment the name gives the old model or the new one, whole."""
    store, rng = Store(tmp_path / "store"), random.Random(21)
    contents = {}
    for bits in (3, 4):
        begin = time.monotonic()
        assert attempts.attempt(f"bits{bits}", bits) == 0
        duration = time.monotonic() - begin
        contents[bits] = content(store.path(f"bits{bits}"))
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
    from models.quantize import quantize
    from models.recipe import Recipe
    from models.store import store as store_module

    store, recipe = Store(tmp_path / "store"), Recipe(bits=3, method="rtn", residual_bits=0)
    quantize(tiny_checkpoint, store, recipe, name="model")
    old = content(store.path("model"))
    moves: list[Path] = []

    def move(source: Path, target: Path) -> None:
        if moves:
            raise KeyboardInterrupt
        moves.append(source)
        source.rename(target)

    monkeypatch.setattr(store_module, "move_folder", move)
    with pytest.raises(KeyboardInterrupt):
        quantize(tiny_checkpoint, store, Recipe(bits=4, method="rtn", residual_bits=0), name="model", force=True)
    monkeypatch.undo()
    assert not store.path("model").exists()
    assert [info.recipe.bits for info in store.list()] == [3]
    assert content(store.path("model")) == old
    assert (
        quantize(
            tiny_checkpoint, store, Recipe(bits=4, method="rtn", residual_bits=0), name="model", force=True
        ).recipe.bits
        == 4
    )
    with pytest.raises(ModelNotFoundError):
        store.open("other")
