"""Expected decoding speed of a model before it is downloaded, from its sizes and the device's bandwidths.

For a processor the cost model has two terms: every weight is read once at a share of the memory's measured bandwidth,
and every product has a fixed overhead. Both constants were solved from the decoding times in docs/speed.md (SmolLM2
and a Llama shape of 1.1 billion parameters at 4 bits, k_chunk 0); at 3 bits they predict the times measured there
within 10 %. A graphics card uses the model of `tuner.simulate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tuner.devices import DEVICES, DeviceSpec
from tuner.shapes import LayerShape
from tuner.simulate import FITTED, SimulatedTimer

READ_SHARE = 0.82
"""Share of the measured read bandwidth that products reach."""
START_US = 5.3
"""Overhead of a product besides reading its weights, in microseconds."""


def processor_tokens_per_s(weight_bytes: int, products: int, read_gb_s: float) -> float:
    """Decoding speed on a processor, without compensation.

    Args:
        weight_bytes: Bytes of the weights read per token.
        products: Number of linear layers per token.
        read_gb_s: Measured read bandwidth of the memory, in 10^9 bytes per second.
    """
    return 1 / (weight_bytes / (1e9 * read_gb_s * READ_SHARE) + products * START_US / 1e6)


def card_tokens_per_s(
    layers: Sequence[LayerShape],
    spec: DeviceSpec,
    bits: float,
    *,
    missed: Mapping[str, float],
    link_gb_s: float | None = None,
) -> float:
    """Decoding speed on a graphics card, without compensation.

    Args:
        layers: All types of linear layers.
        spec: The card.
        bits: Bits per weight: 3, 3.5 or 4.
        missed: By layer type, the share of what a token reads that is not on the card, but read over its link; none
            of other types.
        link_gb_s: Measured bandwidth of the link, in 10^9 bytes per second; None: that of the data sheet, of which
            single requests reach a share (`tuner.simulate.Constants.pcie_efficiency`).
    """
    timer = SimulatedTimer(spec, layers, bits)
    link = link_gb_s or spec.pcie_gb_s * FITTED.pcie_efficiency
    total = 0.0
    for layer in layers:
        over = missed.get(layer.type, 0.0)
        one = (1 - over) * timer.seconds(layer.kind, 0, 0) + over * timer.weight_bytes(layer) / (1e9 * link)
        total += layer.count * one
    return 1 / total


def card_named(name: str) -> DeviceSpec | None:
    """The specification of a card by its driver's name; None if unknown."""
    return next((spec for spec in DEVICES.values() if spec.name == name), None)
