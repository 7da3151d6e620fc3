"""Tables of docs/measurements.md that are computed: what cards that are not here would do."""

from __future__ import annotations

import math

from models.catalogue import CATALOGUE
from models.recipe import Recipe, chosen_method
from models.store.layout import sizes
from runtime.backends import ModelSizes, backend
from runtime.load.expected import missed_share, on_card, on_processor
from runtime.load.memory import plan
from runtime.load.prospects import Room, prospects
from tests.lab.store import table
from tests.tuner import table_3
from tuner.detect import MemoryInfo
from tuner.devices import DEVICES
from tuner.simulate import FITTED, READ_SHARE, START_US


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


CROSSING_US, RESUMING_US = 10.0, 10.0
"""Assumed microseconds in which a row crosses the link and is noticed, and in which the rest of a graph starts."""


def missed_on_processor(_found: object) -> str:
    """What it would gain that missed experts are multiplied by the processor, instead of crossing the link.

    Every block with experts is handed over, for a graph does not know whether it misses any: a row each way, the rest
    of the graph, and two products there. Nothing runs side by side.
    """
    chosen = [model for model in CATALOGUE if model.title in ON_CARDS and model.spec.mixture is not None]
    runner, main, rows = backend("triton"), 48 << 30, []
    for card in map(DEVICES.__getitem__, CARDS):
        free = int(FREE * card.memory_bytes)
        room = Room(
            backend="triton", available_bytes=free, main_bytes=main, cores=8, read_gb_s=MAIN_GB_S, card=card
        )  # fmt: skip
        for model, today in zip(chosen, prospects(chosen, room), strict=True):
            spec, recipe = model.spec, Recipe(method=chosen_method("auto"), bits=4)
            assert spec.mixture is not None
            taken = sizes(spec, recipe)
            own = ModelSizes(weight_bytes=taken.device, residual_bytes=taken.residuals, recipe=recipe)
            memory, beside = (
                MemoryInfo(total_bytes=size, available_bytes=size, limit_bytes=None) for size in (free, main)
            )
            footprint = runner.footprint(spec, own, compensated=True)
            planned = plan(spec, footprint, shared=True, rows=runner.step_rows[-1], memory=memory, main=beside)
            if not planned.host_bytes:
                continue
            missed = missed_share(spec.mixture, planned.experts_on_device)
            link = card.pcie_gb_s * FITTED.pcie_efficiency
            across, here = (1 / on_card(spec, 4, card, missed=missed, link_gb_s=own) for own in (link, math.inf))
            crossing = 1e9 * link * (across - here)
            blocks = sum(map(spec.has_experts, range(spec.num_layers)))
            there = here + crossing / (1e9 * MAIN_GB_S * READ_SHARE)
            handed = there + blocks * (2 * CROSSING_US + RESUMING_US + 2 * START_US) / 1e6
            usual = today.tokens_per_s or math.inf
            speeds = (f"{each:.1f}" for each in (1 / across, usual, 1 / handed))
            last = f"{1 / handed / usual:.2f}", f"{1e6 * (across - there) / blocks:.0f}"
            name = f"{card.memory_bytes >> 30} GB"
            rows.append((name, model.title, f"{100 * missed:.0f} %", f"{crossing / 1e6:.0f}", *speeds, *last))
    head = "card", "model", "missed", "MB", "over the link", "as planned", "by the processor", "times", "µs a block"
    return table(head, rows)
