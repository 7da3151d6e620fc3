"""Seconds from Enter in the catalogue to the first word of an answer, with a hub on this machine.

    python -m tests.bench.first_word --checkpoint FOLDER --gguf FILE
    python -m tests.bench.first_word --gguf FILE --bytes-per-s 12e6        as over a line of 100 Mbit/s

The hub of the tests (`tests/models/hub/hub_server.py`) holds FOLDER and FILE as repositories. For each, the terminal
UI's own job (`app.tui.model_setup`) downloads, quantizes and loads the model in a runtime process with an empty home,
and one question is asked. Kernels are compiled unless `--warm` names a folder that keeps them from run to run.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from types import ModuleType
from typing import Any

from app.supervisor import Supervisor
from app.tui.jobs import STAGES, Meter
from app.tui.model_setup import ModelSetup
from models.progress import Progress
from runtime.wire.requests import LoadRequest, QuantizeRequest
from tests.bench.reporting.markdown import table
from tests.bench.reporting.origin import ROOMS
from tests.bench.reporting.run import about_run, write_report

QUESTION = "Why is the sky blue?"
OWNER = "here"
"""The owner of the repositories."""
_USED = (".json", ".safetensors", ".jinja", ".model")


def checkpoint_files(folder: Path) -> dict[str, bytes]:
    """The files of a Hugging Face folder that a repository of it has."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in _USED}


async def set_up(home: Path, source: str, question: str = QUESTION) -> dict[str, float]:
    """Get a model as the terminal UI does, and ask one question.

    Args:
        home: The program's folder.
        source: The model's name on the hub.
        question: The question.

    Returns:
        Seconds of each of `STAGES`, of the runtime's start (`start`), from the question to the first word (`word`), and
        from Enter to the first word (`all`, without the start).
    """
    from app.protocol import ChatOptions

    began = time.perf_counter()
    supervisor = Supervisor(home)
    client = await supervisor.ensure()
    seconds = {"start": time.perf_counter() - began, **dict.fromkeys(STAGES, 0.0)}

    def load(name: str) -> AsyncGenerator[Progress, None]:
        return client.load(LoadRequest(model=name, num_parallel=2))

    try:
        entered = time.perf_counter()
        setup = ModelSetup(client, QuantizeRequest(source=source), load, lambda: True)
        meter, since = Meter(setup.title, time.perf_counter, stages=setup.stages), entered
        async with aclosing(setup.reports()) as reports:
            async for report in reports:
                before, now = meter.job.stage, time.perf_counter()
                meter.take(report)
                seconds[STAGES[before]] += now - since
                since = now
        seconds[STAGES[meter.job.stage]] += time.perf_counter() - since
        asked = time.perf_counter()
        async with aclosing(client.chat([{"role": "user", "content": question}], ChatOptions(max_tokens=16))) as answer:
            async for delta in answer:
                if delta.text:
                    break
        ended = time.perf_counter()
    finally:
        await supervisor.close()
    return {**seconds, "word": ended - asked, "all": ended - entered}


def measure(
    repositories: Mapping[str, tuple[str, Mapping[str, bytes]]],
    *,
    bytes_per_s: float | None = None,
    warm: Path | None = None,
    question: str = QUESTION,
) -> list[dict[str, Any]]:
    """Rows of the report.

    Args:
        repositories: By what a row is called: what is asked for behind the owner's name, and the repository's files.
        bytes_per_s: Speed of the hub; None: as fast as it can.
        warm: Folder of compiled kernels; None: each starts without any.
        question: The question that is asked.
    """
    hub = _hub_server().HubServer()
    hub.faults.bytes_per_s = bytes_per_s
    rows = []
    try:
        for what, (asked, files) in repositories.items():
            hub.add(f"{OWNER}/{asked.partition(':')[0]}", dict(files))
            hub.log.clear()
            with tempfile.TemporaryDirectory() as folder:
                _environment(Path(folder), hub.url, warm)
                home = Path(folder) / "home"
                home.mkdir(mode=0o700)
                seconds = asyncio.run(set_up(home, f"{OWNER}/{asked}", question))
            sent = sum(len(files[request.file]) - request.start for request in hub.sent() if request.file in files)
            rows.append({"what": what, "bytes": sent, **{name: round(took, 2) for name, took in seconds.items()}})
    finally:
        hub.close()
    return rows


def _environment(folder: Path, hub: str, warm: Path | None) -> None:
    """Let this process and those that it starts use this hub, and nothing of the user's."""
    os.environ |= {
        "HF_ENDPOINT": hub,
        "HF_HOME": str(folder / "hub"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
        "NO_PROXY": "127.0.0.1",
        "LOWBIT_CHAT_HOME": str(folder / "home"),
        "LOWBIT_CHAT_KERNEL_CACHE": str(warm or folder / "kernels"),
    }
    os.environ.pop("HF_HUB_OFFLINE", None)


def _hub_server() -> ModuleType:
    """The hub of the tests."""
    name, file = "hub_server", Path(__file__).parents[1] / "models" / "hub" / "hub_server.py"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def report(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    head = ("", "MB sent", "download s", "quantize s", "load s", "tune s", "first word s", "Enter to first word s")
    columns = (*STAGES, "word", "all")
    return table(
        head, ((row["what"], f"{row['bytes'] / 1e6:.1f}", *(f"{row[c]:.1f}" for c in columns)) for row in rows)
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="a Hugging Face folder")
    parser.add_argument("--gguf", type=Path, help="a GGUF file, its type of weights in its name")
    parser.add_argument("--bytes-per-s", type=float, help="speed of the hub")
    parser.add_argument("--warm", type=Path, metavar="FOLDER", help="where compiled kernels are kept")
    parser.add_argument("--out", type=Path, help="a JSON file")
    given = parser.parse_args()
    repositories: dict[str, tuple[str, Mapping[str, bytes]]] = {}
    if given.checkpoint is not None:
        repositories["Hugging Face folder"] = given.checkpoint.name, checkpoint_files(given.checkpoint)
    if given.gguf is not None:
        from models.gguf_files import type_of

        kind = type_of(given.gguf.name)
        asked = f"{given.gguf.stem}-GGUF" + ("" if kind is None else f":{kind}")
        repositories["GGUF file"] = asked, {given.gguf.name: given.gguf.read_bytes()}
    if not repositories:
        parser.error("name a checkpoint: --checkpoint FOLDER, --gguf FILE, or both")
    rows = measure(repositories, bytes_per_s=given.bytes_per_s, warm=given.warm)
    print(report(rows))
    about = about_run("python -m tests.bench.first_word", ("app", *ROOMS))
    write_report(given.out, {"about": about, "bytes_per_s": given.bytes_per_s, "rows": rows})


if __name__ == "__main__":
    main()
