"""What mixtures of experts do on cards that do not hold all of them: computed, on no device.

    python -m tests.bench.placement            prints the table
    python -m tests.bench.placement --write    docs/models.md's table

Which experts are on the card follows from the memory plan of a load; tokens per second from the cost model of simulated
devices (docs/tuner.md) and the bandwidth of their link, for tokens that go to all experts alike, and for some that are
served more often by what is on the card. A processor is one whose memory is read at 60 GB/s: two channels of DDR5.
"""

from __future__ import annotations

import argparse

from models.catalogue import CATALOGUE
from models.recipe import Recipe
from models.spec import ModelSpec
from models.store.layout import sizes
from runtime.backends import ModelSizes, backend
from runtime.errors import BackendError, OutOfMemoryError
from runtime.load.expected import missed_share, on_card, on_processor
from runtime.load.memory import MemoryPlan, plan
from tests.bench.reporting.cases import ROOT
from tests.bench.reporting.markdown import between, table
from tuner.detect import MemoryInfo
from tuner.devices import DEVICES

DOCUMENT = ROOT / "docs" / "models.md"
MODELS = ("Qwen3 30B-A3B", "gpt-oss 20B", "Qwen3.5 35B-A3B")
CARDS = ("rtx-4050m", "rtx-4070m", "rtx-4070s", "rtx-4090")
"""Of 6, 8, 12 and 24 GB."""
BITS = (4.0, 3.0)
HITS = (0.75, 0.9)
"""Shares of a token's experts on the card."""
_TAKEN = 600 << 20
"""Bytes of a card that the system takes before any model is loaded."""
_PROCESSOR_GB_S = 60.0
_MAIN = 48 << 30
"""Free main memory."""
_HEADING = ("model", "card", "bits", "experts on the card", "in main memory", "all alike", "75 %", "90 %", "processor")


def planned(spec: ModelSpec, bits: float, card: str) -> MemoryPlan:
    """The plan of a load on an otherwise empty card, with the defaults.

    Raises:
        BackendError: the backend does not run such models.
        OutOfMemoryError: it does not fit, even with all experts in main memory.
    """
    recipe, free = Recipe(bits=bits), DEVICES[card].memory_bytes - _TAKEN
    own = sizes(spec, recipe)
    weights = ModelSizes(weight_bytes=own.device, residual_bytes=own.residuals, recipe=recipe)
    footprint = backend("triton").footprint(spec, weights, compensated=True)
    memory, main = (MemoryInfo(total_bytes=size, available_bytes=size, limit_bytes=None) for size in (free, _MAIN))
    return plan(spec, footprint, shared=True, slots=4, rows=128, memory=memory, main=main)


def rows_of(title: str, spec: ModelSpec) -> list[tuple[str, ...]]:
    """A model's rows of the table."""
    mixture = spec.mixture
    assert mixture is not None
    found = []
    for card in CARDS:
        device = DEVICES[card]
        for bits in BITS:
            name = f"{device.name.removeprefix('NVIDIA GeForce ')}, {device.memory_bytes >> 30} GB"
            slow = on_processor(spec, sizes(spec, Recipe(bits=bits)).active, _PROCESSOR_GB_S)
            row: tuple[str, ...] = (title, name, f"{bits:g}")
            try:
                own = planned(spec, bits, card)
            except (BackendError, OutOfMemoryError) as error:
                found.append((*row, str(error).partition(":")[0], "", "", "", "", f"{slow:.0f}"))
                continue
            missed = missed_share(mixture, own.experts_on_device)
            shares = (missed, *(min(missed, 1 - hit) for hit in HITS))
            speeds = (f"{on_card(spec, bits, device, missed=share):.0f}" for share in shares)
            here = f"{own.experts_on_device} of {own.experts}"
            found.append((*row, here, f"{own.host_bytes / 1e9:.1f} GB", *speeds, f"{slow:.0f}"))
    return found


def main() -> None:
    """Print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table into docs/models.md")
    write = parser.parse_args().write
    specs = {model.title: model.spec for model in CATALOGUE}
    rows = [row for title in MODELS for row in rows_of(title, specs[title])]
    found = table(_HEADING, rows)
    if not write:
        print(found)
        return
    DOCUMENT.write_text(between(DOCUMENT.read_text(encoding="utf-8"), "placement", found), encoding="utf-8")


if __name__ == "__main__":
    main()
