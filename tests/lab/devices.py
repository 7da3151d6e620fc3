"""Tables of docs/measurements.md that are computed: what cards that are not here would do."""

from __future__ import annotations

from models.catalogue import CATALOGUE
from runtime.load.expected import on_processor
from runtime.load.prospects import Room, prospects
from tests.lab.store import table
from tests.tuner import table_3
from tuner.devices import DEVICES


def simulated(_found: object) -> str:
    """Simulated devices beside the paper's Table 3."""
    rows = []
    for method in ("awq", "squeezellm"):
        own = table_3.simulate(method)
        shares = (f"{100 * table_3.quantile(own, share):.1f} %" for share in (0.5, 0.9, 1))
        rows.append((method, *shares, len(table_3.order_breaks(own))))
    return table(("", "median difference", "nine in ten within", "largest", "places where the order is another"), rows)


CARDS, FREE, MAIN_GB_S = ("rtx-4050m", "rtx-4060m", "rtx-4070s"), 0.95, 60.0
"""Cards of 6, 8 and 12 GB, the share of their memory that is free, and the bandwidth of main memory in GB/s."""
ON_CARDS = ("Llama 3.1 8B", "Qwen3 14B", "gpt-oss 20B", "Qwen3 30B-A3B", "Gemma 4 31B", "Qwen3.5 35B-A3B")


def on_cards(_found: object) -> str:
    """What cards would do with models, by the program's own plans and its cost model."""
    models, rows = [model for model in CATALOGUE if model.title in ON_CARDS], []
    for card in map(DEVICES.__getitem__, CARDS):
        free, main = int(FREE * card.memory_bytes), 48 << 30
        room = Room(
            backend="triton", available_bytes=free, main_bytes=main, cores=8, read_gb_s=MAIN_GB_S, card=card
        )  # fmt: skip
        for model, found in zip(models, prospects(models, room), strict=True):
            bits = found.bits or 3.0
            active = found.active_share * found.sizes[round(2 * bits) - 6]
            alone = on_processor(model.spec, round(active), MAIN_GB_S)
            where = "all" if found.fits == "yes" or model.spec.mixture is None else "all blocks, some experts"
            speed = (f"{each:.1f}" for each in (found.tokens_per_s or 0.0, alone))
            rows.append((f"{card.memory_bytes >> 30} GB", model.title, f"{bits:g}", found.blocks or where, *speed))
    return table(("card", "model", "bits", "on the card", "tokens/s", "processor alone"), rows)
