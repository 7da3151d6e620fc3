"""Quantizing in a separate process, as `lowbit-chat quantize` does: the model, its seconds, memory and buffers.

    python -m tests.bench.quality.making REQUEST.json        one JSON object on stdout

A process of its own, because a person waits for one, and because a process's largest memory never shrinks. The model is
made in a folder of its own, so that nothing of a run that was killed is used and its time is whole.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from models.recipe import Recipe
from models.spec import ModelSpec
from models.store import Store, StoredModel
from models.store.manifest import Manifest
from runtime.system.parent import ParentWatch
from tests.bench.reporting.results import digest

_BESIDE = 3 << 29
"""Bytes that quantizing may take beside weights, maps and moments."""


class MakingError(Exception):
    """The process could not make the model; the message says why."""


def make(folder: Path, store: Store, recipe: Recipe, *, name: str, calibration: str) -> dict[str, Any]:
    """Make a model and put it into a store.

    Args:
        folder: The checkpoint.
        store: Where the model goes; one of that name is replaced.
        recipe: How to quantize.
        name: The model's name.
        calibration: The calibration text.

    Returns:
        JSON object: `seconds` from the start of the process to the finished model, `processor_seconds` of all its
        threads, `others_seconds` of processor time that other processes took meanwhile, `cores`, `peak_bytes` and the
        `limit_bytes` that are promised, `cpu_buffers` and `gpu_buffers`, the bytes that the weights of all linear
        layers take in the layouts of the backends.

    Raises:
        MakingError: the process failed.
    """
    store.root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=store.root.parent) as scratch:
        root = Path(scratch) / "store"
        request = {
            "folder": str(folder),
            "root": str(root),
            "recipe": recipe.to_json(),
            "name": name,
            "calibration": calibration,
            "begun": time.time(),
        }
        path = Path(scratch) / "request.json"
        path.write_text(json.dumps(request), encoding="utf-8")
        before = _busy_seconds()
        command = [sys.executable, "-m", "tests.bench.quality.making", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise MakingError((done.stderr.strip().splitlines() or ["no output"])[-1][:300])
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        found["others_seconds"] = round(max(0.0, _busy_seconds() - before), 2)
        if name in store:
            store.remove(name)
        store.path(name).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(Store(root).path(name), store.path(name))
    return found


def _busy_seconds() -> float:
    """Seconds of processor time that all processes but this one and its children have taken."""
    all_of_them = psutil.cpu_times()
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return float(all_of_them.user + all_of_them.system) - sum(used.ru_utime + used.ru_stime for used in own)


def weights_of(folder: Path) -> str:
    """Digest of the files of a stored model that hold tensors: models with the same one answer the same."""
    files = Manifest.read(folder).files
    return digest({name: entry.sha256 for name, entry in files.items() if name.endswith(".safetensors")})


def limit_bytes(spec: ModelSpec, recipe: Recipe, folder: Path) -> int:
    """Memory within which a checkpoint is quantized, as `models.quantize.quantize` promises.

    Args:
        spec: The architecture.
        recipe: How it is quantized.
        folder: The checkpoint.
    """
    shapes = [spec.linear_shape(name) for name in spec.linear_names()[:-1]]
    block = 4 * sum(rows * width for rows, width in shapes) // spec.num_layers
    shard = max(file.stat().st_size for file in folder.glob("*.safetensors"))
    moments = 0
    if recipe.method != "rtn":
        widths = [width for _, width in shapes[: len(shapes) // spec.num_layers]]
        moments = 4 * sum(width**2 for width in widths) + 16 * max(widths) ** 2
    return block + shard + moments + _BESIDE


def same_twice(method: str) -> bool:
    """Whether a method makes the same bytes of the bundled checkpoint each time."""
    from assets import calibration_text, demo_checkpoint_path
    from models.quantize import quantize

    with tempfile.TemporaryDirectory() as scratch:
        store = Store(Path(scratch))
        for name in ("one", "two"):
            recipe = Recipe(method=method, bits=3)
            quantize(demo_checkpoint_path(), store, recipe, name=name, calibration=calibration_text())
        return weights_of(store.path("one")) == weights_of(store.path("two"))


def buffers(model: StoredModel) -> dict[str, int]:
    """Bytes of the weights of all linear layers in each backend's layout, summed over real buffers."""
    import torch

    from runtime.backends.decoder import DecoderOptions
    from runtime.backends.triton.layout import repack
    from runtime.load.open import open_decoder

    decoder, _ = open_decoder(model, DecoderOptions(context=64, k_chunk=0), "cpu")
    found = {"cpu_buffers": decoder.weight_bytes}
    decoder.close()
    names = model.spec.linear_names()
    return {**found, "gpu_buffers": sum(repack(model.linear(name), torch.device("cpu")).nbytes for name in names)}


def main() -> None:
    """Make the model of a request; ends with the process that asked."""
    with ParentWatch(os.getppid()).watching(lambda: os._exit(1)):
        print(json.dumps(_made(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))


def _made(request: dict[str, Any]) -> dict[str, Any]:
    from assets import evaluation_text
    from models.quantize import quantize
    from runtime.measure.speed import peak_memory_bytes

    store, folder, recipe = Store(Path(request["root"])), Path(request["folder"]), Recipe.from_json(request["recipe"])
    quantize(
        folder,
        store,
        recipe,
        name=request["name"],
        calibration=request["calibration"],
        evaluation=evaluation_text(),
    )
    seconds, used = time.time() - request["begun"], resource.getrusage(resource.RUSAGE_SELF)
    peak = peak_memory_bytes()  # not ru_maxrss: a child inherits that from the process which started it
    model = store.open(request["name"])
    return {
        "seconds": round(seconds, 2),
        "processor_seconds": round(used.ru_utime + used.ru_stime, 2),
        "cores": os.cpu_count(),
        "peak_bytes": peak,
        "limit_bytes": limit_bytes(model.spec, recipe, folder),
        **buffers(model),
    }


if __name__ == "__main__":
    main()
