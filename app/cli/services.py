"""Services of the other rooms for the commands: imported on demand, replaceable in tests."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

    from models.catalogue import KnownModel
    from models.progress import Cancelled, ProgressCallback
    from models.recipe import Recipe
    from models.store import Store, StoredModel, StoredModelInfo
    from runtime.backends import Presence
    from runtime.backends.decoder import Decoder
    from runtime.load.loading import LoadedModel
    from runtime.load.plan import LoadOptions, LoadPlan
    from runtime.server.service import Service
    from tuner.bandwidth import ReadBandwidth
    from tuner.detect import Machine, MemoryInfo
    from tuner.profiles import ProfileStore

DEMO = "demo"
"""The name of the bundled model."""


class Services:
    """The real services. A test subclasses them and passes its own as the context's object."""

    def store(self) -> Store:
        from app.paths import store_root
        from models.store import Store

        return Store(store_root())

    def home(self) -> Path:
        """The program's home folder, with the lock file of the runtime."""
        from app.paths import home

        return home()

    def demo(self) -> StoredModel:
        from assets import demo_path
        from models.store import StoredModel

        return StoredModel.open_folder(demo_path(), DEMO)

    def demo_info(self) -> StoredModelInfo:
        """The entry of the bundled model, without opening its weights."""
        from assets import demo_path
        from models.store import StoredModelInfo

        return StoredModelInfo.read(demo_path(), DEMO)

    def demo_checkpoint(self) -> Path:
        """The full-precision checkpoint that the bundled model was made from."""
        from assets import demo_checkpoint_path

        return demo_checkpoint_path()

    def calibration_text(self) -> str:
        """The bundled text for calibration."""
        from assets import calibration_text

        return calibration_text()

    def evaluation_text(self) -> str:
        """The bundled text for measuring quantized models."""
        from assets import evaluation_text

        return evaluation_text()

    def cached(self, name: str) -> Path | None:
        """The folder of a hub checkpoint in the cache."""
        from models.hub import cached

        return cached(name)

    def pull(self, name: str, revision: str | None, progress: ProgressCallback, cancelled: Cancelled) -> Path:
        """Download a checkpoint unless the cache has it. Returns its folder."""
        from models.hub import pull

        return pull(name, revision, progress=progress, cancelled=cancelled)

    def fetch(self, model: KnownModel, progress: ProgressCallback, cancelled: Cancelled) -> Path:
        """Download the GGUF file of a model with a short name unless it is here. Returns the file."""
        from models.fetch import fetch

        return fetch(model, self.store(), progress, cancelled)

    def quantize(
        self,
        checkpoint: Path,
        recipe: Recipe,
        *,
        name: str | None,
        calibration: str,
        force: bool,
        progress: ProgressCallback,
        cancelled: Cancelled,
    ) -> StoredModelInfo:
        """Quantize a checkpoint, and measure its certificate; deletes the saved caches of a model that it replaces."""
        from models.quantize import quantize
        from runtime.engine.saved import forgetting
        from runtime.load.certificate import certify

        store = self.store()
        with forgetting(self.chats(), store.root):
            info = quantize(
                checkpoint,
                store,
                recipe,
                name=name,
                calibration=calibration,
                evaluation=self.evaluation_text(),
                force=force,
                progress=progress,
                cancelled=cancelled,
            )
        certify(store.open(info.name), self.evaluation_text(), progress=progress, cancelled=cancelled)
        return info

    def service(self, defaults: LoadOptions, *, keeps: bool, max_models: int) -> Service:
        """A service of the stored models and the bundled one, with these defaults.

        With `keeps`, the caches of long conversations are on disk while their model is not loaded.
        """
        prepare_folders()
        from app.paths import home
        from assets import demo_path
        from runtime.load.catalogue import Bundle
        from runtime.server.service import open_service

        return open_service(
            home(),
            Bundle(models={DEMO: demo_path()}),
            defaults=defaults,
            chats=self.chats() if keeps else None,
            max_models=max_models,
        )

    def load(
        self, plan: LoadPlan, *, prompts_later: bool, progress: ProgressCallback, cancelled: Cancelled
    ) -> LoadedModel:
        """Load a planned model; see `runtime.load.loading.load`."""
        from runtime.load.loading import load

        return load(
            plan,
            profiles=self.profiles(),
            text=self.evaluation_text,
            prompts_later=prompts_later,
            progress=progress,
            cancelled=cancelled,
        )

    def profiles(self) -> ProfileStore:
        from app.paths import profiles_dir
        from tuner.profiles import ProfileStore

        return ProfileStore(profiles_dir())

    def chats(self) -> Path:
        """Folder of the saved caches of long conversations."""
        from app.paths import chats_dir

        return chats_dir()

    def slowdown(self, decoder: Decoder, cancelled: Cancelled) -> float:
        """Slowdown of decoding, in percent, measured with the model's current compensation."""
        from runtime.measure.timing import DecodeTimer

        timer = DecodeTimer(decoder, cancelled=cancelled)
        return timer.slowdown(decoder.options.k_chunk, decoder.options.n_tb)

    def memory(self) -> MemoryInfo:
        from tuner.detect import detect_memory

        return detect_memory()

    def presences(self) -> dict[str, Presence]:
        """Availability of each backend, best first."""
        from runtime.backends import backends

        return {backend.name: backend.probe() for backend in backends()}

    def machine(self) -> Machine:
        from tuner.detect import detect

        return detect()

    def link_gb_s(self) -> float | None:
        """Measured bandwidth from main memory to the graphics card; None without a usable card."""
        from runtime.load.prospects import link_gb_s

        return link_gb_s()

    def bandwidth(self, *, fresh: bool) -> ReadBandwidth:
        """The memory read bandwidth of this machine; the runtime stores it in the same folder."""
        from app.paths import profiles_dir
        from tuner.bandwidth import read_bandwidth

        return read_bandwidth(profiles_dir(), fresh=fresh)


def services_of(ctx: typer.Context) -> Services:
    """The services of a command."""
    return ctx.obj if isinstance(ctx.obj, Services) else Services()


def prepare_folders() -> None:
    """Create the program's private folders before anybody else creates open ones.

    Compiled kernels are stored there too. Failures are ignored: the bundled model runs without the folders, and
    `doctor` reports them.
    """
    from app.paths import cache_dir, home, profiles_dir
    from models.files import private_folder

    with contextlib.suppress(OSError):
        private_folder(home())
        private_folder(profiles_dir())
        private_folder(cache_dir())
