"""The program on aarch64 Linux, emulated by qemu-user: `make test-arm`, or `python -m tests.emulated`.

A Debian root for arm64 is made once, in a folder of the user's cache: debootstrap's packages are unpacked, not
configured, and wheels come by uv, without torch. Then the bundled model answers, the CPU backend's logits of small
models are compared with those of this processor (which other tests compare with the oracle), and a server answers.

It needs root, qemu-user-static, debootstrap and the mirrors of both; without, it says so and ends well.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from platformdirs import user_cache_path

from tests.architecture import ROOT
from tests.close import Tolerance, assert_close
from tests.lab.installations import SMALL
from tests.systems import ROOMS

HOME = user_cache_path("lowbit-chat-tests") / "arm64"
MIRROR, RELEASE = "http://deb.debian.org/debian", "bookworm"
TOOLS = ("debootstrap", "dpkg-deb", "qemu-aarch64-static", "mount", "umount", "chroot")
PYTHON = "3.11"
"""That of the release."""
BINFMT = Path("/proc/sys/fs/binfmt_misc")
_HEADER = r"\x7fELF\x02\x01\x01" + r"\x00" * 9 + r"\x02\x00\xb7\x00"
_MASK = r"\xff" * 7 + r"\x00" + r"\xff" * 8 + r"\xfe" + r"\xff" * 3
_NAME = "lowbit-chat-arm64"
CLOSE = Tolerance(atol=2e-4, why="float additions fused in one place or another")
STEPS = """
import importlib.util, json, sys
from dataclasses import replace
import numpy as np
from models import trellis
place = importlib.util.spec_from_file_location("tiny", "tests/runtime/conftest.py")
tiny = importlib.util.module_from_spec(place)
sys.modules["tiny"] = tiny
place.loader.exec_module(tiny)
from runtime.backends.cpu.decoder import CpuDecoder
from runtime.backends.decoder import DecoderOptions, Step
results, rng = [], np.random.default_rng(0)
for bits, coded in ((3, False), (4, False), (2, True), (3, True), (4, True)):
    model = tiny.make_model(tiny.make_spec(qkv_bias=True), bits=max(bits, 3), codebook=False)
    for name, linear in (model.linears if coded else {}).items():
        N, K = linear.shape
        codes = rng.integers(0, 1 << bits, (N, trellis.padded_width(K))).astype(np.uint8)
        form = {"bits": bits, "group_size": 64, "zeros": None, "trellis": True}
        scales = np.full((N, 1), 0.03 / K**0.5, np.float16)
        model.linears[name] = replace(linear, codes=trellis.pack(codes, bits), scales=scales, **form)
    options = DecoderOptions(context=64, k_chunk=64, prompt_k_chunk=700, select="static", kv="int8", threads=2)
    decoder = CpuDecoder(model, options)
    for count, prefill, first in ((19, False, 1), (1, False, 1), (3, True, 1)):
        numbers = np.arange(count, dtype=np.int32)
        one = Step(tokens=numbers + first, slots=numbers * 0, positions=numbers, logit_rows=numbers, prefill=prefill)
        results.append(decoder.forward(one).tolist())
print(json.dumps({"variant": decoder.variant, "logits": results}))
"""


def obstacle() -> str | None:
    """Why it cannot be done here; None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "it needs root on Linux"
    missing = [name for name in TOOLS if shutil.which(name) is None]
    if missing:
        return f"it needs {', '.join(missing)} (Debian: qemu-user-static, debootstrap)"
    return None


def make_root() -> Path:
    """The root, with Python and wheels."""
    root = HOME / "root"
    if not (HOME / "unpacked").exists():
        shutil.rmtree(root, ignore_errors=True)
        HOME.mkdir(parents=True, exist_ok=True)
        more = "--include=python3,libpython3-stdlib,libgomp1,libstdc++6"
        run("debootstrap", "--foreign", "--arch=arm64", "--variant=minbase", more, RELEASE, str(root), MIRROR)
        for package in sorted((root / "var/cache/apt/archives").glob("*.deb")):
            run("dpkg-deb", "--extract", str(package), str(root))
        (HOME / "unpacked").touch()
    packages = root / "packages"
    wheels = ("--python-platform", "aarch64-manylinux_2_31", "--python-version", PYTHON, "--only-binary", ":all:")
    target = ("--quiet", "--target", str(packages), *wheels)
    run(sys.executable, "-m", "uv", "pip", "install", *target, "-r", str(SMALL), "pytest")
    about = packages / "lowbit_chat-0.1.0.dist-info" / "METADATA"
    about.parent.mkdir(exist_ok=True)
    about.write_text("Metadata-Version: 2.1\nName: lowbit-chat\nVersion: 0.1.0\n", encoding="utf-8")
    program = root / "program"
    shutil.rmtree(program, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "demo_model")
    for room in ROOMS:
        shutil.copytree(ROOT / room, program / room, ignore=ignored)
    (program / "tests" / "runtime").mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "runtime" / "conftest.py", program / "tests" / "runtime")
    shutil.rmtree(root / "home" / "lowbit-chat", ignore_errors=True)
    return root


@contextlib.contextmanager
def entered(root: Path) -> Iterator[None]:
    """Context manager: the kernel runs arm64 programs through qemu, and the root has the system's folders."""
    if not (BINFMT / "register").exists():
        run("mount", "-t", "binfmt_misc", "none", str(BINFMT))
    known = any(
        "aarch64" in entry.read_text() for entry in BINFMT.iterdir() if entry.name not in ("register", "status")
    )
    if not known:
        interpreter = shutil.which("qemu-aarch64-static")
        (BINFMT / "register").write_text(f":{_NAME}:M::{_HEADER}:{_MASK}:{interpreter}:F")
    mounted = [root / name for name in ("proc", "dev")]
    for place in mounted:
        run("mount", "--bind", f"/{place.name}", str(place))
    try:
        yield
    finally:
        for place in mounted:
            run("umount", "--lazy", str(place))
        if not known:
            (BINFMT / _NAME).write_text("-1")


def run(*command: str) -> None:
    """Run a program that must succeed."""
    subprocess.run(command, check=True)


def inside(root: Path, *arguments: str) -> list[str]:
    """The command that runs Python with some arguments in the root."""
    environment = ("PYTHONPATH=/packages:/program", "HOME=/home", "LOWBIT_CHAT_HOME=/home/lowbit-chat")
    environment += ("LOWBIT_CHAT_BUDGET=0", "LOWBIT_CHAT_PROMPT_BUDGET=0")  # tuning would take an hour
    return ["chroot", str(root), "/usr/bin/env", "-C", "/program", *environment, "/usr/bin/python3", *arguments]


def answered(root: Path) -> dict[str, Any]:
    """The bundled model's answer, kernels compiled on the way."""
    prompt = (
        "run",
        "demo",
        "What can you do?",
        "--max-tokens",
        "24",
        "--budget",
        "0",
        "--prompt-budget",
        "0",
        "--json",
    )
    done = subprocess.run(inside(root, "-m", "app.cli.start", *prompt), check=True, stdout=subprocess.PIPE)
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["completion_tokens"] > 0
    return found


def stepped(root: Path) -> str:
    """Logits here and there. Returns the variant of the emulated processor."""
    there = subprocess.run(inside(root, "-c", STEPS), check=True, stdout=subprocess.PIPE).stdout
    here = subprocess.run([sys.executable, "-c", STEPS], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    found, expected = json.loads(there), json.loads(here)
    for actual, wanted in zip(found["logits"], expected["logits"], strict=True):
        assert_close(np.array(actual), np.array(wanted), CLOSE)
    return str(found["variant"])


def served(root: Path, port: int = 18080) -> str:
    """The text of an answer over HTTP."""
    command = inside(root, "-m", "app.cli.start", "serve", "--model", "demo", "--port", str(port))
    with subprocess.Popen(command) as server:
        try:
            for _ in range(600):
                with contextlib.suppress(httpx.TransportError):
                    asked = {"model": "demo", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}
                    url = f"http://127.0.0.1:{port}/v1/chat/completions"
                    answer = httpx.post(url, json=asked, timeout=600, trust_env=False)
                    return str(answer.raise_for_status().json()["choices"][0]["message"]["content"])
                time.sleep(1)
        finally:
            server.terminate()
    raise SystemExit("the server did not answer")


def main() -> None:
    """Do all three, and say how long each took."""
    reason = obstacle()
    if reason is not None:
        sys.stdout.write(f"skipped: {reason}\n")
        return
    root = make_root()
    with entered(root):
        for name, work in (("run demo", answered), ("logits of small models", stepped), ("a request", served)):
            begin = time.monotonic()
            found = work(root)
            shown = found["text"] if isinstance(found, dict) else found
            sys.stdout.write(f"{name}: {time.monotonic() - begin:.0f} s: {shown!r}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
