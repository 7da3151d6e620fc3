"""What tables judge by turns against a result that was made worse on purpose."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pytest

from models.recipe import Recipe
from tests.lab.measurements import SECTIONS
from tests.lab.models import REAL
from tests.lab.quality import ALL_RESIDUALS
from tests.lab.tasks import Way

Made = dict[str, list[dict[str, Any]]]
POINT = {"model": REAL, "residual_bits": 4, "select": "approx", "prompt_k_chunk": 0, "as_chat": False, "recall": 0.9}
CODES = {"method": "trellis", "bits": 3}
CHAT = {**POINT, **CODES, "as_chat": True}
MADE = {"model": REAL, "gpu_bytes": 5e7, "residual_bits": 4, "seconds": 60.0, "peak_bytes": 2**30}
WAYS = [asdict(Way(bits=4, kv=kv)) for kv in ("fp16", "int4")]
LOSSES = {"backend": "cpu", "weights": "4-bit", "model": REAL}
CLOSE = {"gpu_bytes": 5e7, "kl": 0.1, "same": 80.0}


def full(**sections: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Results in which full precision has a perplexity of 20."""
    known: dict[str, Any] = {
        "full": [{"model": REAL, "as_chat": True, "perplexity": 20.0}],
        "budgets": [],
        "peers": [{"model": REAL, "rows": []}],
    }
    stored = [{**MADE, "method": method, "bits": bits} for method in ("trellis", "gptq", "rtn") for bits in (3, 4)]
    return {
        "sections": {**known, "stored": stored, "points": [], "closeness": [{"model": REAL, "rows": []}], **sections}
    }


def chat(perplexity: float) -> Any:
    point = {**CHAT, "k_chunk": 64, "prompt_k_chunk": ALL_RESIDUALS, "perplexity": perplexity}
    return full(points=[point])


def close(kl: float) -> Any:
    return full(closeness=[{"model": REAL, "rows": [{**CODES, "k_chunk": 16, **CLOSE, "kl": kl}]}])


def budget(perplexity: float) -> Any:
    slow = {"slowdown_percent": 4.0, "prompt_slowdown_percent": 9.0}
    return full(budgets=[{"model": REAL, **CODES, "budget_percent": 5.0, **slow, "perplexity": perplexity}])


def points(perplexity: float, **changed: Any) -> Any:
    """The compared points, of which one has this perplexity."""
    point, selectors = {**POINT, "bits": 3, "perplexity": 20.0}, ("approx", "exact", "static", "random")
    residuals = {2: (32, 128), 8: (8, 32), 16: (4, 16)}
    own: list[dict[str, Any]] = []
    for method in ("rtn", "trellis"):
        ways = [{"k_chunk": k_chunk, "select": select} for k_chunk in (0, 16, 64) for select in selectors]
        ways += [{"residual_bits": bits, "k_chunk": k_chunk} for bits, both in residuals.items() for k_chunk in both]
        own += [{**point, "method": method, **way} for way in ways]
    for one in own:
        if all(one[name] == value for name, value in {"method": "trellis", **changed}.items()):
            one["perplexity"] = perplexity
    return full(points=own)


def qoq(perplexity: float) -> Any:
    recipe = Recipe.usual("qoq", group_size=128).to_json()
    made = {"model": REAL, "kv": "int4", "recipe": recipe, "perplexity": perplexity}
    return {"sections": {"qoq": [{**made, "as_chat": False}, {**made, "as_chat": True}]}}


def caches(perplexity: float, kl: float = 0.01) -> Any:
    sections = {
        "perplexity": [
            {**LOSSES, "kind": "fp16", "perplexity": 20.0},
            {**LOSSES, "kind": "int4", "perplexity": perplexity},
        ],
        "size": [],
        "speed": [{"tokens": 32768, "rows": []}],
        "checks": [{"model": REAL, "int4": {"kl": kl, "same_percent": 90.0}}],
    }
    return {"sections": sections}


def keys(task: str, nats: Sequence[float], right: Sequence[int] = (1, 1, 1, 1)) -> Any:
    """Keys over fp16, and what another kind makes of them."""
    about = {"task": task, "tokens": 1000 if task in ("pass-key", "retrieval") else 0}
    entries = [
        {**WAYS[0], **about, "nats": [0.1, 0.2, 0.1, 0.2], "right": [1, 1, 1, 1]},
        {**WAYS[1], **about, "nats": list(nats), "right": list(right)},
    ]
    return {"sections": {"keys": entries}}


def by_bits(section: str, **changed: Any) -> Any:
    known: dict[str, dict[str, Any]] = {
        "chats": {"agreed": [100, 90], "kl": [0.1, 0.1], "same": [90.0, 90.0]},
        "forms": {f"{name} {what}": [1, 1] for name in ("free", "grammar") for what in ("valid", "right")}
        | {f"call {what}": [1, 1] for what in ("valid", "tool", "right")},
    }
    return {"sections": {section: [{**WAYS[0], **known[section], **changed}]}}


def drift(late: float) -> Any:
    return {"sections": {"drift": [{**WAYS[1], "kl": [[0.01], [0.01], [0.01], [late]]}]}}


@pytest.mark.parametrize(
    ("title", "make", "good", "bad"),
    [
        ("Quality of a chat", chat, (20.2, "| 20.20 |  | 1.010 |"), (30.0, "| 30.00 |  | 1.500 |")),
        ("Quality of a chat", close, (0.1, "0.100 · 80 %"), (0.9, "0.900 · 80 %")),
        ("Token by token", close, (0.1, "k_chunk 16 | 50.0 | 0.100"), (0.9, "k_chunk 16 | 50.0 | 0.900")),
        ("What a budget buys", budget, (20.2, "1.010 | 4.0 %"), (30.0, "1.500 | 4.0 %")),
        *(
            (title, lambda value, own=changed: points(value, **own), (20.0, good), (30.0, bad))
            for title, changed, good, bad in (
                ("Methods at 3 bits", {"k_chunk": 0}, "| trellis | 20.00 | 20.00", "| trellis | 30.00 | 20.00"),
                (
                    *("How salient channels are chosen", {"select": "approx", "k_chunk": 64, "residual_bits": 4}),
                    *("| trellis | 64 | 20.00 | 20.00", "| trellis | 64 | 30.00 | 20.00"),
                ),
                (
                    *("Bits of the residuals at equal bytes", {"residual_bits": 4, "k_chunk": 16, "select": "approx"}),
                    *("20.00 (32) | 20.00 (16) | 20.00 (8)", "20.00 (32) | 30.00 (16) | 20.00 (8)"),
                ),
            )
        ),
        ("W4A8KV4", qoq, (20.0, "clip | 20.00 | 20.00 |"), (30.0, "clip | 30.00 | 30.00 |")),
        ("KV caches", caches, (20.0, "| int4 |  | +0.00 % |"), (22.0, "| int4 |  | +10.00 % |")),
        ("KV caches", lambda kl: caches(20.0, kl), (0.01, "0.010 · 90 %"), (0.4, "0.400 · 90 %")),
        (
            *("Tasks, by cache", lambda nats: keys("retrieval", nats)),
            ((0.1, 0.3, 0.0, 0.2), "0.00 ± 0.08"),  # a tie
            ((1.1, 1.3, 1.0, 1.2), "1.00 ± 0.08"),
        ),
        *(
            (
                *("Tasks, by cache", lambda right, own=task: keys(own, (0.1,) * 4, right)),
                *(((1, 1, 1, 1), "| int4 |"), ((0, 1, 0, 1), "2 of 4")),
            )
            for task in ("pass-key", "retrieval", "sums", "objects")
        ),
        ("Tasks, by cache", drift, (0.01, "| 0.010 |"), (0.5, "| 0.500 |")),
        (
            *("Tasks, by bits", lambda agreed: by_bits("chats", agreed=agreed)),
            *(((100, 90), "95.00 ± 9.80"), ((10, 0), "| 5.00 ± 9.80")),
        ),
        (
            *("Tasks, by bits", lambda kl: by_bits("chats", kl=kl)),
            *(([0.1, 0.1], "0.10 ± 0.00"), ([0.9, 0.9], "0.90 ± 0.00")),
        ),
        *(
            (
                *("Tasks, by bits", lambda judged, own=field: by_bits("forms", **{own: judged})),
                *(([1, 1], "| 2 of 2 | 2 of 2 |"), ([0, 0], "0 of 2")),
            )
            for field in by_bits("forms")["sections"]["forms"][0]
            if " " in field
        ),
    ],
)  # fmt: skip
def test_a_table_turns(title: str, make: Callable[[Any], Any], good: tuple[Any, str], bad: tuple[Any, str]) -> None:
    (section,) = (one for one in SECTIONS if one.title == title)
    tables = [section.make(make(value)) for value, _ in (good, bad)]
    assert good[1] in tables[0]
    assert bad[1] in tables[1]
    assert bad[1] not in tables[0]
