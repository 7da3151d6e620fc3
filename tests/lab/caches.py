"""What compressed KV caches cost and save: perplexity, bytes, peak memory, and speed behind long caches.

    python -m tests.lab.caches --smollm2 FOLDER --peer-python PYTHON
    python -m tests.lab.caches --only speed --again

Losses are SmolLM2's with weights of 4 bits and k_chunk 64, on WikiText-2 in windows of 1,024 to 8,192 tokens and on
another book; sizes come from real buffers; speeds are those of a random shape whose cache of 32,768 tokens holds 13
times the bytes of its weights, beside llama.cpp's on the same shape. A run that was stopped goes on where it was, with
the same code. Interpreters with llama.cpp: see llama.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from models.packed import Weights
from models.quantize import quantize
from models.recipe import Recipe
from models.store import Store, StoredModel
from models.store.certificate import Certificate
from runtime.backends.cpu.cache import CpuCache
from runtime.backends.cpu.decoder import CpuDecoder
from runtime.backends.cpu.pool import default_threads
from runtime.backends.decoder import DecoderOptions, Step
from runtime.backends.reference.cache import ReferenceCache
from runtime.kv.control import KVCache
from runtime.kv.kinds import KINDS, LOW_RANK, SPARSITY, CacheKind, KVKind, window_token_bytes
from runtime.load.plan import open_decoder
from runtime.measure.evaluate import perplexity
from runtime.measure.speed import fill, peak_memory_bytes
from runtime.system.heap import trim
from tests.lab.compare import job, peer
from tests.lab.measure import Worker, closing_all, in_turns
from tests.lab.models import DATA, RESIDUAL_BITS, SMOLLM2, Case, RandomModel, book, llama, llama_1b, smollm2
from tests.lab.quality import numbers
from tests.lab.store import ROOT, Entries, about_run, attempt, columns, digest, listed, parser, teller, version
from tests.real_models import gemma_file

PARTS = ("perplexity", "steps", "checks", "size", "memory", "speed")
ORDER: tuple[KVKind, ...] = (
    *("fp16", "int8", "hierarchical", "int4", "kcvt4", "gear-l4", "gear4", "kivi2", "gear-l2", "gear2"),
)
LONG: tuple[KVKind, ...] = ("fp16", "int8", "hierarchical", "int4", "gear4", "gear2")
"""Kinds that are scored in long windows, which take minutes each."""
CONTEXTS, PEER_TYPES = (1024, 8192, 32768), ("f16", "q4_0")
"""Tokens in the cache while decoding is timed, and llama.cpp's types."""
STEPS, ROUNDS = 8, 15
"""Tokens of a turn, and turns."""
K_CHUNK = 64
BUILD = ROOT / "build" / "caches"
SLIM = {"hidden": 512, "intermediate": 1024, "layers": 8, "heads": 8, "kv_heads": 2, "vocab": 2048, "context": 65536}
"""The shape with few weights to read besides the cache."""
_TOKENS, _DRAFTED = 32, 3
"""Tokens decoded at the end of a full context, and those of a round of drafts."""


def cases(folder: Path) -> list[Case]:
    """SmolLM2 by windows and texts."""
    real = replace(smollm2(folder), tokens=3000, group_size=128)
    lengths = {
        "smollm2": (1024, 3000),
        "smollm2-2k": (2048, 4100),
        "smollm2-4k": (4096, 8200),
        "smollm2-8k": (8192, 8192),
    }
    found = [
        replace(real, name=name, window=window, stride=window // 2, tokens=tokens)
        for name, (window, tokens) in lengths.items()
    ]
    return [*found, replace(found[0], name="smollm2-book", encode=book)]


def low_bit(case: Case) -> StoredModel:
    """SmolLM2 at 4 bits, rounded plainly, for a cache is compared with fp16 over the same weights."""
    store, recipe = Store(BUILD / "store"), Recipe(method="rtn", bits=4, group_size=case.group_size)
    name = f"kv-{digest([recipe.to_json(), version('models')])}"
    if name not in store:
        quantize(case.folder, store, recipe, name=name, calibration=case.calibration(), force=True)
    return store.open(name)


def _large(tensors: dict[str, Any], sizes: dict[str, Any]) -> None:
    """Two pairs of key channels 50 times as large, and of query channels as small: every score stays."""
    half = sizes["hidden_size"] // sizes["num_attention_heads"] // 2
    for name, x in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            view = x.view(-1, 2, half, x.shape[1])
            view[:, :, [3, half - 2]] *= 50.0 if "k_proj" in name else 1 / 50


def _offsets(tensors: dict[str, Any], sizes: dict[str, Any]) -> None:
    """Offsets of 50 typical keys in two pairs of channels, one that hardly rotates; their queries as much smaller."""
    import torch

    half = sizes["hidden_size"] // sizes["num_attention_heads"] // 2
    sizes["attention_bias"] = True
    for name, x in list(tensors.items()):
        if ".self_attn." not in name:
            continue
        bias = torch.zeros(len(x))
        if name.endswith("k_proj.weight"):
            bias.view(-1, 2, half)[:, :, [3, half - 2]] = 50.0
        if name.endswith("q_proj.weight"):
            x.view(-1, 2, half, x.shape[1])[:, :, [3, half - 2]] /= 50
        tensors[name.replace("weight", "bias")] = bias


def _one_head(tensors: dict[str, Any], sizes: dict[str, Any]) -> None:
    """All query heads read one key-value head."""
    D = sizes["hidden_size"] // sizes["num_attention_heads"]
    sizes["num_key_value_heads"] = 1
    for name, x in tensors.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            tensors[name] = x[:D].contiguous()


def _wide(tensors: dict[str, Any], sizes: dict[str, Any]) -> None:
    """Heads of 512 channels: the model's own, and others of keys, thrice as large, that no query reads."""
    import torch

    wide, D = 512, sizes["hidden_size"] // sizes["num_attention_heads"]
    sizes |= {"head_dim": wide, "partial_rotary_factor": D / wide}
    noise = torch.Generator().manual_seed(0)
    for name, x in tensors.items():
        part = name.split(".")[-2][0] if ".self_attn." in name else ""
        if not part:
            continue
        own = (x.T if part == "o" else x).reshape(-1, D, sizes["hidden_size"])
        rows = torch.zeros(len(own), wide, sizes["hidden_size"])
        if part == "k":
            rows.normal_(std=3 * float(x.std()), generator=noise)
        rows[:, :D] = own * (wide / D) ** 0.5 if part == "q" else own
        rows = rows.flatten(0, 1)
        tensors[name] = (rows.T if part == "o" else rows).contiguous()


BUILT = {
    "key channels x 50": ("smollm2", _large),
    "key offsets x 50": ("smollm2", _offsets),
    "heads of 512": ("smollm2", _wide),
    "one key-value head": ("english3m", _one_head),
}
"""Changes to real models that are hard on a cache of 4 bits. The last one damages the model, too."""
GEMMA = "gemma3-270m"
CHECKED = ("smollm2", GEMMA, "english3m", *BUILT)
"""Models whose default cache is checked: real ones, a small one, and those that were built to break it."""


def checked(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """What the check of the default cache says of a model.

    Args:
        name: One of `CHECKED`; the small one is beside the repository.
        given: The command line: `smollm2` and `gemma`, the real ones' checkpoints; without the latter it is fetched.

    Raises:
        UnavailableError: Gemma can't be had.
    """
    import torch
    from safetensors.torch import load_file, save_file

    from assets import calibration_text, evaluation_text
    from runtime.load.certificate import cache_losses

    real, change = BUILT.get(name, (name, None))
    source = DATA / "models" / real if real == "english3m" else given.smollm2
    if name == GEMMA:
        source = given.gemma or gemma_file()
    if change is not None:
        made, sizes = BUILD / name.replace(" ", "-"), json.loads((source / "config.json").read_text("utf-8"))
        shutil.copytree(source, made, dirs_exist_ok=True)
        tensors = {key: x.to(torch.float32) for key, x in load_file(source / "model.safetensors").items()}
        change(tensors, sizes)
        save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
        (made / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
        source = made
    store, stored = Store(BUILD / "store"), f"check-{name.replace(' ', '-')}"
    recipe = Recipe(method="rtn", bits=4, residual_bits=0)
    quantize(source, store, recipe, name=stored, calibration=calibration_text()[:40000], force=True)
    model = store.open(stored)
    cache_losses(model, evaluation_text(), backend="cpu")  # compiles
    began = time.process_time()
    cache_losses(model, evaluation_text(), backend="cpu")
    seconds = time.process_time() - began
    with patch("runtime.load.certificate.CACHE_LIMIT", 0.0):
        found = cache_losses(model, evaluation_text(), backend="cpu")
    about = {"model": name, "default": Certificate(caches=found).kv, "processor_s": round(seconds, 1)}
    return about | {way.kv: {"kl": way.kl, "same_percent": way.same_percent} for way in found}


def scored(case: Case, kind: CacheKind) -> dict[str, Any]:
    """Perplexity over one kind of cache, or over one that has the name of a kind and other parameters."""
    options, kinds = DecoderOptions(kv=kind.name, context=case.window, k_chunk=K_CHUNK), {**KINDS, kind.name: kind}
    with patch("runtime.backends.cpu.cache.KINDS", kinds), patch("runtime.backends.cpu.backend.KINDS", kinds):
        decoder, _ = open_decoder(low_bit(case), options, "cpu")
    try:
        result = perplexity(decoder, case.text(), case.window, case.stride)
    finally:
        decoder.close()
    about = {"model": case.name, "weights": "4-bit", "backend": "cpu", "kind": kind.name, "window": case.window}
    return {**about, **numbers(result)}


def steps() -> list[tuple[CacheKind, dict[str, Any]]]:
    """GEAR's corrections one by one, over backbones as the paper has them and as this program does (GEAR §3, §4.1).

    The paper's keep keys in their own basis, no first tokens, and buffers of n_b = 64; here it is n_b = 128. All pages
    have a prompt's rank of 4, which is that of the kernels.

    Returns:
        Kinds, each with what it differs in.
    """
    found = []
    for name, page in itertools.product(("kivi2", "kcvt4"), (64, 128)):
        for rank, sparsity in ((0, 0.0), (LOW_RANK, 0.0), (LOW_RANK, SPARSITY), (LOW_RANK, 2 * SPARSITY)):
            about = {"backbone": name, "n_b": page, "rank": rank, "outliers_percent": round(100 * sparsity)}
            own = replace(KINDS[name], rank=rank, sparsity=sparsity)
            found.append((replace(own, page=page, sinks=0, turned=False) if page == 64 else own, about))
    return found


def sized(name: KVKind, head_dim: int) -> dict[str, Any]:
    """Bytes in percent of half precision, by backend: of a page, and of what so many tokens hold, windows included."""
    spec = llama(hidden=2 * head_dim, intermediate=64, layers=1, heads=2, kv_heads=2, vocab=64, context=65536)
    kind, token = KINDS[name], 8 * head_dim
    found: dict[str, Any] = {"kind": name, "head_dim": head_dim}
    for backend in ("reference", "cpu"):
        for length in (1024, 32768):
            cache, page = _cache(backend, kind, spec, length)
            for _, store in cache._parts:
                store.flush = lambda slot, page, rest: None  # type: ignore[method-assign]  # zeros need no arithmetic
            for start in range(0, length, 128):
                rows = np.arange(start, min(start + 128, length), dtype=np.int32)
                cache.begin(np.zeros_like(rows), rows)
            used = cache.table.used * page + cache.window_length(0) * window_token_bytes(kind, spec)
            found[f"{backend} page"] = round(100 * page / (kind.page * token), 2)
            found[f"{backend} {length}"] = round(100 * used / (length * token), 2)
    return found


def _cache(backend: str, kind: CacheKind, spec: Any, length: int) -> tuple[KVCache, int]:
    """An empty cache, and bytes of one of its pages."""
    if backend == "reference":
        one = ReferenceCache(kind, spec, context=length, slots=1, max_rows=128)
        return one, sum(pool[0].nbytes for pool in one.store.pools.values())
    other = CpuCache(spec, DecoderOptions(kv=kind.name, context=length, slots=1, max_rows=128), 1)
    return other, other.store.page_bytes


def peak(request: Mapping[str, Any]) -> dict[str, Any]:
    """Memory of a process of its own that decodes at the end of a full context.

    Args:
        request: `stored`, a model's folder, or `shape`, the bits of one with random weights; `kind` and `context` of
            the cache; `k_chunk` (0 if absent); `drafts`, whether every round drafts (not if absent).
    """
    command = [sys.executable, "-m", "tests.lab.caches", "--peak", json.dumps(dict(request))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{request}: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _peak(request: Mapping[str, Any]) -> dict[str, Any]:
    """The same in this process; what only loading needed is returned to the system first."""
    context, k_chunk, drafts = request["context"], request.get("k_chunk", 0), bool(request.get("drafts"))
    if "stored" in request:
        model: Weights = StoredModel.open_folder(Path(request["stored"]), "stored")
    else:
        model = RandomModel(llama_1b(context), request["shape"], residuals=bool(k_chunk))
    shapes = [model.spec.linear_shape(name) for name in model.spec.linear_names()]
    decoder = CpuDecoder(model, DecoderOptions(kv=request["kind"], context=context, k_chunk=k_chunk))
    del model
    trim()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    loaded, start, rows = peak_memory_bytes(), context - _TOKENS, 1 + _DRAFTED * drafts
    with decoder.session():
        fill(decoder, start)
        for at in range(start, context - rows + 1, rows):
            for drafted in range(rows - 1):
                decoder.forward(Step.of([at % 97], at + drafted, draft=True, flush=drafted == 0))
            decoder.forward(Step.of([(at + i) % 97 for i in range(rows)], at))
    return {
        "kind": request["kind"],
        "context": context,
        "k_chunk": k_chunk,
        "drafts": drafts,
        "weight_bytes": decoder.weight_bytes,
        "residual_bytes": sum(map(math.prod, shapes)) * RESIDUAL_BITS // 8 if k_chunk else 0,
        "kv_bytes": decoder.kv_bytes,
        "loaded_bytes": loaded,
        "peak_bytes": peak_memory_bytes(),
    }


def timed(tokens: int, python: str | None) -> dict[str, Any]:
    """Decoding behind so many tokens over every kind of cache, beside llama.cpp, in turns."""
    command = (sys.executable, "-m", "tests.lab.caches", "--worker", str(tokens), *ORDER)
    programs = {"": Worker(*command)}
    for kind in PEER_TYPES if python else ():
        assert python is not None
        programs[f"llama.cpp {kind}"] = peer(
            python, str(_slim(python)), str(tokens + STEPS), str(default_threads()), kind
        )
    with closing_all(programs) as workers:
        ways = {kind: lambda k=kind: statistics.median(workers[""].ask(k, STEPS)) for kind in ORDER}
        ways |= {
            name: lambda w=worker: statistics.median(job(w, "behind", tokens, STEPS))
            for name, worker in workers.items()
            if name
        }
        times = in_turns(ways, ROUNDS)
        about = workers[""].about
    rows = [
        {"kind": name, "p50": statistics.median(each), "best": min(each), **about["kinds"].get(name, {})}
        for name, each in times.items()
    ]
    return {"tokens": tokens, "rounds": ROUNDS, "weight_bytes": about["weight_bytes"], "rows": rows}


def _slim(python: str) -> Path:
    """llama.cpp's model of the shape."""
    from tests.models.gguf.making import random_model, write_gguf

    file, source = BUILD / "slim.gguf", BUILD / "slim-f16.gguf"
    if not file.is_file():
        BUILD.mkdir(parents=True, exist_ok=True)
        sizes = {
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "vocab_size": 2048,
            "max_position_embeddings": 65536,
        }
        write_gguf(source, random_model("Llama", **sizes), kind="F16")
        with closing_all({"llama.cpp": peer(python)}) as workers:
            job(workers["llama.cpp"], "quantize", str(source), str(file), "Q4_0")
    return file


def worker(tokens: int, kinds: Sequence[str]) -> None:
    """Answer lines `KIND N` with the seconds of N tokens behind so many."""
    model, decoders = RandomModel(llama(**SLIM), 4, residuals=False), {}
    about: dict[str, Any] = {"kinds": {}}
    for kind in kinds:
        decoder = CpuDecoder(model, DecoderOptions(kv=kind, context=tokens + 128))  # type: ignore[arg-type]
        with decoder.session():
            fill(decoder, tokens)
        decoders[kind] = decoder
        about["weight_bytes"] = decoder.weight_bytes
        about["kinds"][kind] = {"kv_bytes": decoder.cache.slot_bytes(0)}
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        kind, count = line.split()
        times = []
        with decoders[kind].session():
            for at in range(tokens, tokens + int(count)):
                begin = time.perf_counter()
                decoders[kind].forward(Step.of([at % 97], at))
                times.append(time.perf_counter() - begin)
        print(json.dumps(times), flush=True)


def main() -> None:
    """Measure what is missing, and print it; or be one of the processes that are measured."""
    if sys.argv[1:2] == ["--worker"]:
        worker(int(sys.argv[2]), sys.argv[3:])
        return
    if sys.argv[1:2] == ["--peak"]:
        print(json.dumps(_peak(json.loads(sys.argv[2]))))
        return
    options = parser(__doc__, "caches")
    options.add_argument("--smollm2", type=Path, default=SMOLLM2, help="Hugging Face folder of SmolLM2-135M-Instruct")
    options.add_argument("--gemma", type=Path, help="Gemma 3 270M's GGUF file, which is fetched if it is not given")
    options.add_argument("--only", type=listed, default=PARTS, help=f"some of {', '.join(PARTS)}")
    options.add_argument("--again", action="store_true", help="measure even what this code has measured")
    options.add_argument("--peer-python", help="interpreter that has llama-cpp-python")
    given = options.parse_args()
    entries, tell = Entries(given.out, given.only if given.again else ()), teller()
    entries.about = about_run("python -m tests.lab.caches")

    def measure(section: str, identity: Sequence[object], act: Any) -> None:
        tell(f"{section} {identity}")
        attempt(tell, f"{section} {identity}", lambda: entries.known(section, identity, act))

    for case in cases(given.smollm2) if "perplexity" in given.only else ():
        for kind in ORDER if case.window == 1024 else LONG:
            measure("perplexity", [case.name, kind], lambda c=case, k=KINDS[kind]: scored(c, k))
    for own, about in steps() if "steps" in given.only else ():
        case = cases(given.smollm2)[0]
        measure("steps", list(about.values()), lambda c=case, k=own, a=about: {**a, **scored(c, k)})
    for name in CHECKED if "checks" in given.only else ():
        measure("checks", [name], lambda n=name: checked(n, given))
    entries.keep("checks", [[name] for name in CHECKED])
    for head_dim in (64, 128) if "size" in given.only else ():
        for kind in ORDER:
            measure("size", [head_dim, kind], lambda d=head_dim, k=kind: sized(k, d))
    for context in (1024, 8192) if "memory" in given.only else ():
        for kind in ORDER:
            request = {"stored": str(low_bit(cases(given.smollm2)[0]).path), "kind": kind, "context": context}
            measure("memory", [context, kind], lambda r=request: {"model": "smollm2", **peak(r)})
    for tokens in CONTEXTS if "speed" in given.only else ():
        measure("speed", [tokens, bool(given.peer_python)], lambda t=tokens: timed(t, given.peer_python))
    entries.finish()
    for section in given.only:
        found = entries.all(section)
        print(section, columns([row for one in found for row in one.get("rows", [one])]), sep="\n")


if __name__ == "__main__":
    main()
