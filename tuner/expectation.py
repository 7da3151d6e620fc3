"""How fast a model that is not here yet would decode: from its sizes and what is known of the device.

For a processor the cost model has two terms: every weight is read once at a share of the memory's measured bandwidth,
and every product has to be started. Both constants were solved for from the decoding times of docs/speed.md (SmolLM2
and a Llama shape of 1.1 billion parameters at 4 bits, k_chunk 0); at 3 bits they come out within a tenth of what was
measured there. For a card it is that of `tuner.simulate`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tuner.devices import DEVICES, DeviceSpec
from tuner.shapes import LayerShape
from tuner.simulate import SimulatedTimer

READ_SHARE = 0.82
"""Part of the measured read bandwidth that products reach."""
START_US = 5.3
"""What a product takes beside reading its weights, in microseconds."""


def processor_tokens_per_s(weight_bytes: int, products: int, read_gb_s: float) -> float:
    """Decoding speed on a processor, without compensation.

    Args:
        weight_bytes: Bytes of the weights that a token reads.
        products: Linear layers that a token passes.
        read_gb_s: Measured read bandwidth of the memory, in 10^9 bytes per second.
    """
    return 1 / (weight_bytes / (1e9 * read_gb_s * READ_SHARE) + products * START_US / 1e6)


def card_tokens_per_s(layers: Sequence[LayerShape], spec: DeviceSpec, bits: float) -> float:
    """Decoding speed on a graphics card, without compensation.

    Args:
        layers: All types of linear layers.
        spec: The card.
        bits: Bits of a weight: 3, 3.5 or 4.
    """
    timer = SimulatedTimer(spec, layers, bits)
    return 1 / sum(layer.count * timer.seconds(layer.kind, 0, 0) for layer in layers)


def card_named(name: str) -> DeviceSpec | None:
    """The specification of a card that its driver calls so; None where none is known."""
    return next((spec for spec in DEVICES.values() if spec.name == name), None)
