"""A tiny random checkpoint, its low-bit model, and the program wired to both."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from app.cli.main import app
from app.cli.services import Services
from models.catalogue import KnownModel
from models.progress import Cancelled, ProgressCallback
from models.recipe import Recipe
from models.store import Store, StoredModel, StoredModelInfo
from tests.models import conftest as checkpoints
from tests.models.gguf.making import random_model, write_gguf
from tuner.bandwidth import ReadBandwidth
from tuner.detect import MemoryInfo

TEXT = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs!\n" * 8


def write_checkpoint(folder: Path, seed: int = 3) -> Path:
    """A random llama of two blocks with a context of 256; with seed 3, compensation pays in every type of layer."""
    return checkpoints.write_checkpoint(folder, dtype=torch.float16, max_position_embeddings=256, seed=seed)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint; tests must not write to it."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GGUF file whose weights are low-bit; tests must not write to it."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf", random_model("Llama"), kind="Q8_0")


@pytest.fixture(scope="session")
def packed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the low-bit model of the tiny checkpoint; tests must not write to it."""
    from models.quantize import quantize

    store = Store(tmp_path_factory.mktemp("packed"))
    return quantize(checkpoint, store, Recipe(), name="small", calibration=TEXT, evaluation=TEXT).path


class TinyServices(Services):
    """The real services on short texts, with the tiny model as the bundled one and a hub of one checkpoint."""

    def __init__(self, checkpoint: Path, packed: Path, cache: Path) -> None:
        self.checkpoint = checkpoint
        self.packed = packed
        self.snapshot = cache / "models--some--tiny" / "snapshots" / "abc123"
        self.pulled: list[tuple[str, str | None]] = []
        self.fetched: list[str] = []
        self.quantized: list[Recipe] = []
        self.available = 8 << 30

    def demo(self) -> StoredModel:
        return StoredModel.open_folder(self.packed, "demo")

    def demo_info(self) -> StoredModelInfo:
        return StoredModelInfo.read(self.packed, "demo")

    def demo_checkpoint(self) -> Path:
        return self.checkpoint

    def calibration_text(self) -> str:
        return TEXT

    def evaluation_text(self) -> str:
        return TEXT

    def cached(self, name: str) -> Path | None:
        return self.snapshot if name == "some/tiny" and self.snapshot.exists() else None

    def pull(self, name: str, revision: str | None, progress: ProgressCallback, cancelled: Cancelled) -> Path:
        self.pulled.append((name, revision))
        if not self.snapshot.exists():
            shutil.copytree(self.checkpoint, self.snapshot)
        return self.snapshot

    def fetch(self, model: KnownModel, progress: ProgressCallback, cancelled: Cancelled) -> Path:
        self.fetched.append(model.name)
        file = self.snapshot.parent / model.file
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_gguf(file, random_model("Llama"), kind="Q4_1")
        return file

    def quantize(self, checkpoint: Path, recipe: Recipe, **options: Any) -> StoredModelInfo:
        self.quantized.append(recipe)
        return super().quantize(checkpoint, recipe, **options)

    def memory(self) -> MemoryInfo:
        return MemoryInfo(total_bytes=8 << 30, available_bytes=self.available, limit_bytes=None)

    def link_gb_s(self) -> float | None:
        return 12.25

    def bandwidth(self, *, fresh: bool) -> ReadBandwidth:
        return ReadBandwidth(gb_s=10.0, threads=1, buffer_bytes=1, boot="")


@pytest.fixture(autouse=True)
def without_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that say nothing of a budget must not tune."""
    monkeypatch.setenv("LOWBIT_CHAT_BUDGET", "0")


@pytest.fixture
def services(checkpoint: Path, packed: Path, tmp_path: Path) -> TinyServices:
    """Services with an empty store."""
    return TinyServices(checkpoint, packed, tmp_path / "hub")


@pytest.fixture
def stored(services: TinyServices, packed: Path) -> str:
    """The name of a model in the store."""
    root = services.store().root
    root.mkdir(mode=0o700)
    shutil.copytree(packed, root / "small")
    return "small"


@pytest.fixture
def run(services: TinyServices) -> Callable[..., Any]:
    """Run the program with arguments; its services are the tiny ones."""
    runner = CliRunner()

    def run(*arguments: object, piped: str | None = None, code: int = 0) -> Any:
        result = runner.invoke(app, [str(argument) for argument in arguments], obj=services, input=piped)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.stderr
        return result

    return run


@pytest.fixture
def answer(run: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Run the program with `--json` and read the one object on standard output."""

    def answer(*arguments: object, piped: str | None = None) -> dict[str, Any]:
        result = run(*arguments, "--json", piped=piped)
        assert result.stdout.count("\n") == 1
        found = json.loads(result.stdout)
        assert isinstance(found, dict)
        return found

    return answer


@pytest.fixture
def error(run: Callable[..., Any]) -> Callable[..., str]:
    """Run the program where it fails with exit code 1; returns the one line that it says last."""

    def error(*arguments: object, piped: str | None = None) -> str:
        result = run(*arguments, piped=piped, code=1)
        assert result.stdout == ""
        line: str = result.stderr.splitlines()[-1]
        assert line.startswith("lowbit-chat: ")
        return line

    return error
