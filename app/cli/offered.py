"""Offers within a budget: the ways to decode a model, with their quality and speed, as text and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from app.cli.interrupt import Interrupt
from app.cli.load import LoadChoices, load_plan
from app.cli.output import Output
from app.cli.services import Services

if TYPE_CHECKING:
    from models.store import StoredModel
    from tuner.offers import Offers


def offered(
    stored: StoredModel,
    backend: str,
    k_chunk: Mapping[str, int],
    budget: float,
    choices: LoadChoices,
    services: Services,
    output: Output,
    *,
    force: bool,
) -> Offers | None:
    """The ways to decode a model that the budget chooses from; None if drafts are not supported.

    Raises:
        RuntimeFailure, ModelError: the measurement failed.
        KeyboardInterrupt: the user stopped it.
    """
    from assets import evaluation_text
    from runtime.budget.offering import WINDOW, full_precision, known, offers
    from runtime.kv.kinds import SPECULATIVE_KV
    from runtime.text.tokenizer import Tokenizer

    found = None if force else known(backend, stored, budget_percent=budget, profiles=services.profiles())
    if found is not None or (choices.context or 0) < WINDOW:
        return found
    plan = load_plan(stored, replace(choices, kv=SPECULATIVE_KV), services, output)
    with output.progress() as progress:
        decoder = plan.open_decoder(progress)
    try:
        decoder.set_k_chunk(k_chunk)
        with Interrupt() as interrupt, output.progress() as progress:
            return offers(
                decoder,
                stored,
                Tokenizer(stored.tokenizer_path).encode(evaluation_text()),
                budget_percent=budget,
                full=full_precision(stored, evaluation_text()),
                profiles=services.profiles(),
                progress=progress,
                cancelled=interrupt.cancelled,
            )
    finally:
        decoder.close()


def as_json(offers: Offers) -> dict[str, Any]:
    """The best way to decode within the budget, and all measured ones."""
    chosen = offers.chosen
    ways = [{**asdict(way), "words": offers.words(way)} for way in offers.ways]
    return {"target": chosen.target, "gamma": chosen.gamma, "words": offers.words(chosen), "ways": ways}


def lines(offers: Offers) -> Iterator[str]:
    """For the user: the best way first."""
    yield f"best within the budget: {offers.words(offers.chosen)}"
    for way in offers.ways:
        if way != offers.chosen:
            yield f"  also measured: {offers.words(way)}"
