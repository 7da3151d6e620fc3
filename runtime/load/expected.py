"""Expected decoding speed of a model on a card or a processor, without compensation."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from models.part import part_of
from models.spec import LAYER_KINDS, MLP_TYPES, MixtureSpec, ModelSpec
from models.store import StoredModel
from runtime.load.memory import MemoryPlan
from tuner.bandwidth import read_bandwidth
from tuner.devices import DeviceSpec
from tuner.shapes import LayerShape
from tuner.simulate import card_named, card_tokens_per_s, processor_tokens_per_s


def layer_shapes(spec: ModelSpec) -> list[LayerShape]:
    """The linear layers that a token passes; a part of a model may have no head."""
    counts = {kind: spec.products(kind) for kind in LAYER_KINDS}
    return [LayerShape(kind, *spec.linear_shape(kind), count) for kind, count in counts.items() if count]


def missed_share(mixture: MixtureSpec, on_device: int) -> float:
    """Share of the experts that a token goes to that are not on the device, which has those used last.

    Args:
        mixture: Shared experts are on the device first.
        on_device: Experts of a block that are.
    """
    room = max(0, on_device - mixture.shared)
    even = 1 - room / mixture.experts
    rest = max(0, mixture.shared - on_device) + mixture.chosen * even * (1 - _again(room / mixture.chosen))
    return rest / mixture.experts_per_token


def _again(tokens: float) -> float:
    """Share of choices that are found although others would be as likely, where so many tokens' experts have room.

    Linear between what public traces of text had: the next token takes 45 % of the last one's experts again, of
    Qwen3-30B-A3B's 128 (imp, pull request 1359); of 512, of which a token goes to 10, the last 64 are 67 % and the last
    128 are 81 % of what is chosen (llama.cpp, pull request 27861).
    """
    return float(np.interp(tokens, (0, 1, 6.4, 12.8), (0, 0.41, 0.62, 0.75)))


def on_card(
    spec: ModelSpec, bits: float, card: DeviceSpec, *, missed: float = 0.0, link_gb_s: float | None = None
) -> float:
    """Tokens per second on a card; see `tuner.simulate.card_tokens_per_s`.

    Args:
        spec: The model.
        bits: Bits per weight: 3, 3.5 or 4.
        card: The card.
        missed: Of a mixture, the share of the experts that a token goes to that are not on the card.
        link_gb_s: Measured bandwidth of the card's link, in 10^9 bytes per second; None: that of the data sheet.
    """
    of_experts = dict.fromkeys(MLP_TYPES, missed)
    return card_tokens_per_s(layer_shapes(spec), card, bits, missed=of_experts, link_gb_s=link_gb_s)


def on_processor(spec: ModelSpec, active_bytes: int, read_gb_s: float) -> float:
    """Tokens per second on a processor; a token reads `active_bytes`, at `read_gb_s`."""
    return processor_tokens_per_s(active_bytes, sum(layer.count for layer in layer_shapes(spec)), read_gb_s)


def on_both(spec: ModelSpec, bits: float, card: DeviceSpec | None, seam: int, active_bytes: int, gb_s: float) -> float:
    """Tokens per second of a model whose first `seam` blocks are on a card, while a processor runs the others.

    Args:
        spec: The model.
        bits: Bits per weight: 3, 3.5 or 4.
        card: The card; None: unknown, so only the processor's time counts.
        seam: Blocks on the card.
        active_bytes: Bytes that a token reads of all blocks and the head.
        gb_s: Read bandwidth of main memory, in 10^9 bytes per second.
    """
    front, rear = part_of(spec, 0, seam), part_of(spec, seam, spec.num_layers)
    rest = on_processor(rear, round(active_bytes * _read(rear) / _read(spec)), gb_s)
    return rest if card is None else 1 / (1 / rest + 1 / on_card(front, bits, card))


def _read(spec: ModelSpec) -> int:
    """Weights that a token reads."""
    return sum(layer.count * layer.weights for layer in layer_shapes(spec))


def why_faster(
    model: StoredModel,
    planned: MemoryPlan,
    other: MemoryPlan,
    label: str,
    card: str,
    link_gb_s: float | None,
    measurements: Path | None,
) -> str | None:
    """Why the processor, alone or with a card, is expected to be faster than a card that some experts do not fit.

    None if it is not. Of a card whose data sheet is unknown only the link counts.

    Args:
        model: The stored model.
        planned: The plan of loading it on the card.
        other: The plan of loading it there.
        label: What runs it there, within a sentence.
        card: The card's name.
        link_gb_s: Measured bandwidth of its link, in 10^9 bytes per second; None: that of its data sheet.
        measurements: Folder where the memory's measured bandwidth is stored, see `tuner.bandwidth.read_bandwidth`.
    """
    device, spec, summary = card_named(card), model.spec, model.info.summary
    if not planned.host_bytes or spec.mixture is None or (device is None and link_gb_s is None):
        return None
    missed = missed_share(spec.mixture, planned.experts_on_device)
    if device is not None:
        ours = on_card(spec, model.recipe.bits, device, missed=missed, link_gb_s=link_gb_s)
    else:
        each = planned.host_bytes / (planned.experts - planned.experts_on_device)
        ours = 1e9 * (link_gb_s or 0.0) / max(1.0, missed * spec.mixture.experts_per_token * each)
    active, gb_s = summary.active_bytes or summary.gpu_bytes, read_bandwidth(measurements).gb_s
    if other.layers_on_device is None:
        others = on_processor(spec, active, gb_s)
    else:
        others = on_both(spec, model.recipe.bits, device, other.layers_on_device, active, gb_s)
    if ours >= others:
        return None
    return (
        f"{planned.experts_on_device} of {planned.experts} experts of each block fit {card}, which would read the "
        f"others from main memory: {ours:.0f} tokens/s are expected there, {others:.0f} of {label}"
    )
