"""Gain of speculation: acceptance by draft, target and sensitive layers, memory and step durations by context, speed.

    make bench-speculation SMOLLM2="smollm2-3=FOLDER smollm2-4=FOLDER"
    python -m tests.bench.speculation --stored NAME=FOLDER --only acceptance --out FILE

Acceptance does not depend on the machine; costs and speed do, and are measured in turns. The shape's weights are
random: what its steps cost does not depend on them, what is accepted would.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from assets import evaluation_text
from models.store import StoredModel
from models.weights import Weights
from runtime.backends.decoder import Decoder, DecoderOptions
from runtime.engine.speculation.costs import measure_costs
from runtime.engine.speculation.gamma import AdaptiveGamma, Costs, FixedGamma, best_gamma, break_even, speedup
from runtime.engine.speculation.measure import continued
from runtime.engine.speculation.sensitivity import sensitivities
from runtime.kv.kinds import KVKind
from runtime.load.open import open_decoder
from runtime.measure.speed import fill
from runtime.text.sampling import SamplingOptions
from runtime.text.tokenizer import Tokenizer
from tests.bench.caches.peak import asked
from tests.bench.copied import copied, copied_table
from tests.bench.reporting.cases import ROOT
from tests.bench.reporting.markdown import table
from tests.bench.reporting.run import about_run, write_report
from tests.peers.shape import RandomModel, llama_1b

TARGETS = {"residual": 1024, "compensated": 64, "base": 0}
"""k_chunk of each target."""
DRAFTS, GAMMAS, TEMPERATURES = (0, 16, 64), (1, 3, 6), (0.0, 1.0)
"""What acceptance is measured by: k_chunk of the draft, tokens of a round, and how they are drawn."""
QUESTIONS = (
    "Explain how a bicycle stays upright.",
    "Write a short story about a lighthouse keeper.",
    "What is photosynthesis, and why does it matter?",
)
LONG_PROMPT, ANSWER = 1000, 128
"""Tokens of the long prompt, and of an answer."""
COST_CONTEXTS, SHAPE_CONTEXTS = (1024, 8000), (1024, 8192, 32768)
SENSITIVE_GAMMA, SENSITIVE_PROMPTS = 3, ("1k text",)
"""How sensitive layers are measured: tokens of a round, and prompts, which must be long enough to lie in pages."""
MEMORY_WAYS: tuple[tuple[KVKind, int, bool], ...] = (
    ("fp16", 0, False),
    ("int4", 0, False),
    ("hierarchical", 0, True),
    ("fp16", 1024, False),
    ("hierarchical", 1024, True),
)
"""Ways to decode whose memory is compared: kind of cache, k_chunk, and whether the model drafts."""
_ROOM, _TURNS = 32, 3
"""Positions behind a context, and how often all ways are timed there in turns; the fastest of each counts."""
DOCUMENT, RESULTS = ROOT / "docs" / "speculation.md", ROOT / "tests" / "bench" / "results" / "speculation.json"
Rows = list[dict[str, Any]]


def prompts_of(model: StoredModel) -> dict[str, list[list[int]]]:
    """Questions as a chat asks them, and a long text."""
    tokenizer = Tokenizer(model.tokenizer_path)
    chats = [tokenizer.chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    return {"chat": chats, "1k text": [tokenizer.encode(evaluation_text())[:LONG_PROMPT]]}


def decoder_of(model: Weights, context: int, kv: KVKind = "hierarchical") -> Decoder:
    """A model on the CPU, its prompts not compensated."""
    return open_decoder(model, DecoderOptions(kv=kv, context=context, max_rows=128), "cpu")[0]


def acceptance(name: str, model: StoredModel) -> Iterator[dict[str, Any]]:
    """What is accepted, by target, draft, gamma, temperature and prompt."""
    decoder, prompts = decoder_of(model, LONG_PROMPT + ANSWER), prompts_of(model)
    ways = [
        (where, target, draft, gamma, temperature)
        for where in prompts
        for target in TARGETS
        for draft in DRAFTS
        if draft < TARGETS[target] or draft == 0
        for gamma in GAMMAS
        for temperature in TEMPERATURES
    ]
    for where, target, draft, gamma, temperature in ways:
        decoder.set_k_chunk(TARGETS[target])
        decoder.set_draft_k_chunk(draft)
        drafted = accepted = rounds = 0.0
        for seed, prompt in enumerate(prompts[where]):
            sampling = SamplingOptions(temperature=temperature, top_p=0.95, seed=seed)
            did = continued(decoder, prompt, ANSWER, sampling, FixedGamma(gamma)).speculation
            drafted, rounds = drafted + did.drafted, rounds + did.rounds
            accepted += did.acceptance_rate * did.drafted
        yield {
            "model": name,
            "prompt": where,
            "target": target,
            "draft_k_chunk": draft,
            "gamma": gamma,
            "temperature": temperature,
            "acceptance_rate": accepted / drafted,
            "tokens_per_verify": (accepted + rounds) / rounds,
        }
    decoder.close()


def costs(name: str, model: Weights, contexts: Sequence[int], targets: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What steps cost by context and target; of the residual target also what the draft of each half would.

    `both` drafts by low-bit weights and the upper plane, `weights` by low-bit weights from a cache of 8 bits without
    planes, `kv` by the target's weights and the upper plane (QuantSpec, Fig. 5).
    """
    kinds: dict[KVKind, list[tuple[str, str]]] = {
        "hierarchical": [*(("both", target) for target in targets), ("kv", "residual")],
        "int8": [("weights", "residual")],
    }
    for kv, ways in kinds.items():
        decoder = decoder_of(model, max(contexts) + _ROOM, kv)
        for context in contexts:
            fill(decoder, context)
            found: dict[tuple[str, str], list[Costs]] = {way: [] for way in ways}
            for _ in range(_TURNS):
                for (way, target), own in found.items():
                    decoder.set_k_chunk(TARGETS[target])
                    decoder.set_draft_k_chunk(TARGETS[target] if way == "kv" else 0)
                    own.append(measure_costs(decoder, position=context))
            for (way, target), own in found.items():
                yield {
                    "model": name,
                    "context": context,
                    "target": target,
                    "draft": way,
                    "plain_ms": 1e3 * min(each.plain for each in own),
                    "draft_ms": 1e3 * min(each.draft for each in own),
                    "verify_ms": [1e3 * min(each) for each in zip(*(cost.verify for cost in own), strict=True)],
                }
        decoder.close()


def speed(name: str, model: StoredModel, rounds: int) -> Iterator[dict[str, Any]]:
    """Tokens a second with adapted speculation and without, in turns, of the same prompts."""
    decoder, prompts = decoder_of(model, LONG_PROMPT + ANSWER), prompts_of(model)
    for target, k_chunk in TARGETS.items():
        decoder.set_k_chunk(k_chunk)
        gamma = AdaptiveGamma(_costs_of_chats(decoder, prompts["chat"]))
        for temperature in (0.0, 0.7):
            plain, speculated, ratios, rates, alike = [], [], [], [], True
            for turn in range(rounds):
                for prompt in prompts["chat"]:
                    sampling = SamplingOptions(temperature=temperature, top_p=0.95, seed=turn)
                    alone = continued(decoder, prompt, ANSWER, sampling, FixedGamma(0))
                    drafted = continued(decoder, prompt, ANSWER, sampling, gamma)
                    alike = alike and list(alone.tokens) == list(drafted.tokens)
                    plain.append(alone.tokens_per_s)
                    speculated.append(drafted.tokens_per_s)
                    ratios.append(drafted.tokens_per_s / alone.tokens_per_s)
                    rates.append(drafted.speculation.acceptance_rate)
            yield {
                "model": name,
                "target": target,
                "temperature": temperature,
                "plain_tokens_per_s": statistics.median(plain),
                "tokens_per_s": statistics.median(speculated),
                "speedup": statistics.median(ratios),
                "acceptance_rate": statistics.mean(rates),
                "gamma": gamma.current,
                "same_tokens": alike if temperature == 0 else None,
            }
    decoder.close()


def _costs_of_chats(decoder: Decoder, prompts: Sequence[Sequence[int]]) -> Costs:
    """Costs of steps in the middle of an answer, where they are used."""
    position = max(map(len, prompts)) + ANSWER // 2
    fill(decoder, position)
    return measure_costs(decoder, position=position)


def sensitive(name: str, model: StoredModel) -> Iterator[dict[str, Any]]:
    """What is accepted where drafts read some layers' cache as the target does (QuantSpec, Algorithm 1: L_S)."""
    decoder, prompts = decoder_of(model, LONG_PROMPT + ANSWER), prompts_of(model)
    text = Tokenizer(model.tokenizer_path).encode(evaluation_text())
    moved = sensitivities(decoder, text)
    order = sorted(range(len(moved)), key=lambda layer: -moved[layer])
    halves = [0, 1, 2, 4, 8, len(moved)]
    for target, where in itertools.product(("residual", "base"), SENSITIVE_PROMPTS):
        decoder.set_k_chunk(TARGETS[target])
        for count in halves:
            decoder.set_sensitive_layers(order[:count])
            drafted = accepted = rounds = 0.0
            for prompt, temperature in itertools.product(prompts[where], TEMPERATURES):
                sampling = SamplingOptions(temperature=temperature, top_p=0.95, seed=0)
                did = continued(decoder, prompt, ANSWER, sampling, FixedGamma(SENSITIVE_GAMMA)).speculation
                drafted, rounds = drafted + did.drafted, rounds + did.rounds
                accepted += did.acceptance_rate * did.drafted
            yield {
                "model": name,
                "target": target,
                "prompt": where,
                "sensitive_layers": sorted(order[:count]),
                "layers": len(moved),
                "kl_at_4_bits": sum(moved[layer] for layer in order[count:]),
                "gamma": SENSITIVE_GAMMA,
                "acceptance_rate": accepted / drafted,
                "tokens_per_verify": (accepted + rounds) / rounds,
            }
    decoder.close()


def memory(name: str, about: dict[str, Any], contexts: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Peak memory by context, of plain decoding and of drafts (QuantSpec, Tables 4 and 5)."""
    for context in contexts:
        for kind, k_chunk, drafts in MEMORY_WAYS:
            yield {
                "model": name,
                **asked({**about, "kind": kind, "context": context, "k_chunk": k_chunk, "drafts": drafts}),
            }


def read_costs(row: dict[str, Any]) -> Costs:
    """The costs of a row."""
    verify = [each / 1e3 for each in row["verify_ms"]]
    return Costs(plain=row["plain_ms"] / 1e3, draft=row["draft_ms"] / 1e3, verify=verify)


def acceptance_table(rows: Rows) -> str:
    """As the paper's Table 6: what is accepted, and tokens a verification."""
    columns = [(gamma, temperature) for temperature in TEMPERATURES for gamma in GAMMAS]
    cells: dict[tuple[str, ...], dict[tuple[int, float], str]] = {}
    for row in rows:
        names = (row["model"], row["prompt"], row["target"], str(row["draft_k_chunk"]))
        found = f"{100 * row['acceptance_rate']:.0f} % · {row['tokens_per_verify']:.2f}"
        cells.setdefault(names, {})[row["gamma"], row["temperature"]] = found
    head = [f"γ {gamma}, T {temperature:g}" for gamma, temperature in columns]
    body = ((*names, *(own.get(column, "") for column in columns)) for names, own in cells.items())
    return table(("model", "prompt", "target", "draft's k_chunk", *head), body)


def costs_table(rows: Rows) -> str:
    """Costs, at which acceptance rounds begin to pay, and what they bring at some."""
    body = []
    for row in rows:
        own, edge = read_costs(row), break_even(read_costs(row))
        gains = []
        for accepted in (0.7, 0.9, 1.0):
            gamma = best_gamma(own, accepted)
            gains.append(f"{speedup(own, gamma, accepted):.2f} (γ {gamma})" if gamma else "–")
        times = (row["plain_ms"], row["draft_ms"], row["verify_ms"][2], row["verify_ms"][6])
        pays = "never" if edge is None else f"{100 * edge:.0f} %"
        names = (row["model"], f"{row['context']:,}", row["target"], row["draft"])
        body.append((*names, *(f"{each:.1f}" for each in times), pays, *gains))
    head = ("model", "context", "target", "cheap in the draft", "plain ms", "draft ms", "verify 4 ms", "verify 8 ms")
    return table((*head, "pays from", "at 70 %", "at 90 %", "at 100 %"), body)


def speed_table(rows: Rows) -> str:
    """Measured speed."""
    return table(
        ("model", "target", "temperature", "plain tok/s", "speculated tok/s", "speedup", "accepted", "γ at the end"),
        (
            (
                row["model"],
                row["target"],
                f"{row['temperature']:g}",
                f"{row['plain_tokens_per_s']:.1f}",
                f"{row['tokens_per_s']:.1f}",
                f"{row['speedup']:.2f}",
                f"{100 * row['acceptance_rate']:.0f} %",
                row["gamma"],
            )
            for row in rows
        ),
    )


def sensitive_table(rows: Rows) -> str:
    """What sensitive layers do to acceptance."""
    head = ("model", "prompt", "target", "layers at 8 bits", "accepted", "tokens a verify", "which")
    return table(
        head,
        (
            (
                row["model"],
                row["prompt"],
                row["target"],
                f"{len(row['sensitive_layers'])} of {row['layers']}",
                f"{100 * row['acceptance_rate']:.1f} %",
                f"{row['tokens_per_verify']:.2f}",
                "" if len(row["sensitive_layers"]) == row["layers"] else ", ".join(map(str, row["sensitive_layers"])),
            )
            for row in rows
        ),
    )


def memory_table(rows: Rows) -> str:
    """Peak memory by context."""
    targets = {k_chunk: target for target, k_chunk in TARGETS.items()}
    head = ("model", "context", "cache", "target", "drafts", "weights MB", "residuals MB", "cache MB", "peak MB")
    sizes = ("weight_bytes", "residual_bytes", "kv_bytes", "peak_bytes")
    return table(
        head,
        (
            (
                row["model"],
                f"{row['context']:,}",
                row["kind"],
                targets[row["k_chunk"]],
                "yes" if row["drafts"] else "no",
                *(f"{row[size] / 1e6:.0f}" for size in sizes),
            )
            for row in rows
        ),
    )


TABLES = {
    "acceptance": acceptance_table,
    "sensitive": sensitive_table,
    "memory": memory_table,
    "costs": costs_table,
    "speed": speed_table,
    "copied": copied_table,
}


def measure(
    part: str, stored: Sequence[tuple[str, StoredModel]], shape_bits: Sequence[int], rounds: int, *, one_thread: bool
) -> Rows:
    """All rows of a part."""
    rows: Rows = []
    for name, model in stored:
        if part == "acceptance":
            rows += acceptance(name, model)
        elif part == "speed":
            rows += speed(name, model, rounds)
        elif part == "sensitive":
            rows += sensitive(name, model)
        elif part == "memory":
            rows += memory(name, {"stored": str(model.path)}, COST_CONTEXTS)
        elif part == "copied":
            rows += copied(name, model, rounds, one_thread=one_thread)
        else:
            rows += costs(name, model, COST_CONTEXTS, tuple(TARGETS))
    for bits in shape_bits if part == "memory" else ():
        rows += memory(f"1.1 B shape, {bits} bits", {"shape": bits}, SHAPE_CONTEXTS)
    if part == "costs":
        for bits in shape_bits:
            spec = replace(llama_1b(), max_context=SHAPE_CONTEXTS[-1] + _ROOM)
            shape = RandomModel(spec, bits, residuals=True)
            rows += costs(f"1.1 B shape, {bits} bits", shape, SHAPE_CONTEXTS, ("residual", "base"))
    return rows


def main() -> None:
    """Measure, print tables, and write rows and tables down where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stored", nargs="*", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--only", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--shape-bits", nargs="*", type=int, default=[3], help="of the shape; none: not it")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--one-thread", action="store_true", help="time copied drafts by a thread's processor time")
    parser.add_argument("--out", type=Path, help="a JSON file, whose other parts are kept")
    parser.add_argument("--write", action="store_true", help=f"write the tables of {RESULTS.name} into {DOCUMENT.name}")
    asked = parser.parse_args()
    stored = [
        (name, StoredModel.open_folder(Path(folder), name))
        for name, _, folder in (text.partition("=") for text in asked.stored)
    ]
    report = json.loads(asked.out.read_text(encoding="utf-8")) if asked.out and asked.out.exists() else {}
    for part in asked.only:
        rows = measure(part, stored, asked.shape_bits, asked.rounds, one_thread=asked.one_thread)
        report[part] = {"about": about_run("python -m tests.bench.speculation"), "rows": rows}
        print(TABLES[part](rows), flush=True)
        write_report(asked.out, report)
    if asked.write:
        from tests.bench import pages

        pages.write(*TABLES)


if __name__ == "__main__":
    main()
