"""A simulated device, built from its data sheet, and the expected speed of a model before it is downloaded.

`docs/tuner.md` describes the model and the origin of its constants, which are the same for every device, model and
width. For a processor the cost model has two terms: every weight is read once at a share of the memory's measured
bandwidth, and every product has a fixed overhead. Both constants were solved from the decoding times in docs/speed.md
(SmolLM2 and a Llama shape of 1.1 billion parameters at 4 bits, k_chunk 0); at 3 bits they predict the times measured
there within 10 %.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuner.candidates import chunks
from tuner.devices import DEVICES, DeviceSpec, device_of
from tuner.errors import ShapeError, TimerError
from tuner.search import Configuration, tune
from tuner.shapes import LayerShape, shape_of

_LEVELS = {3.0: 8.0, 3.5: 12.0, 4.0: 16.0}
"""Codebook entries by bits; at 3.5 bits half of the blocks have 3 bits and half 4."""
_GROUP_SIZE = 128
_GROUP_BITS = 32
_RESIDUAL_BYTES = 0.5
_SCALE_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The constants of the cost model. Fitted to the paper's Table 3: see `docs/tuner.md`."""

    memory_efficiency: float = 0.8
    """Share of the memory bandwidth that a product with uniform weights reaches; set, not fitted."""
    codebook_efficiency: float = 0.9
    """The same for weights with a codebook."""
    sm_bytes_per_cycle: float = 7.72
    """Weight bytes that one multiprocessor processes per cycle: the limit when the product has too few of them."""
    pcie_efficiency: float = 0.7
    """Share of the link's bandwidth that single requests reach."""
    block_gb_s: float = 1.14
    """Bandwidth that one thread block draws from an unsaturated link, in 10^9 bytes per second."""
    chunk_cycles: float = 1840.0
    """Time in microseconds in which one block selects from one chunk of 1024 channels."""
    start_us: float = 9.17
    """Concurrent launch, grid barrier and synchronization of both streams, in microseconds."""
    interference: float = 0.00992
    """Delay of the product per time of fetching."""


FITTED = Constants()
"""The constants that simulations use."""


class SimulatedTimer:
    """A `Timer` that computes instead of measuring.

    Args:
        spec: The device.
        layers: Layer types that can be timed.
        bits: Bits per weight: 3, 3.5 or 4.
        codebook: Whether each output has a codebook (SqueezeLLM) instead of scales and zeros of groups (AWQ).
        constants: Constants of the cost model.

    Raises:
        ShapeError: bits that can't be simulated.
    """

    measured = False

    def __init__(
        self,
        spec: DeviceSpec,
        layers: Sequence[LayerShape],
        bits: float,
        *,
        codebook: bool = False,
        constants: Constants = FITTED,
    ) -> None:
        if bits not in _LEVELS:
            raise ShapeError(f"{bits:g} bits can't be simulated; give 3, 3.5 or 4")
        self._spec = spec
        self._layers = {layer.kind: layer for layer in layers}
        self._bits = float(bits)
        self._codebook = codebook
        self._constants = constants

    def seconds(self, kind: str, n_tb: int, k_chunk: int) -> float:
        """Time of one product (see `Timer`).

        Raises:
            TimerError: the layer type is unknown, or there are no thread blocks for the compensation.
        """
        if kind not in self._layers:
            raise TimerError(f"the simulated device has no layer {kind!r}, only {', '.join(self._layers)}")
        layer = self._layers[kind]
        if k_chunk == 0:
            return self._product_us(layer, self._spec.sm_count) / 1e6
        if n_tb < 1 or k_chunk < 0:
            raise TimerError(f"{n_tb} thread blocks can't compensate {k_chunk} channels of every 1024")
        fetch = self._fetch_us(layer, n_tb, k_chunk)
        selection = -(-chunks(layer.k) // n_tb) * self._constants.chunk_cycles / (self._spec.clock_ghz * 1e3)
        product = self._product_us(layer, self._spec.sm_count - n_tb) + self._constants.interference * fetch
        return max(product, self._constants.start_us + selection + fetch) / 1e6

    def weight_bytes(self, layer: LayerShape) -> float:
        """Bytes that one product reads: codes, and scales and zeros of groups or a codebook of each output."""
        if self._codebook:
            return layer.weights * self._bits / 8 + layer.n * _LEVELS[self._bits] * 2
        return layer.weights * (self._bits + _GROUP_BITS / _GROUP_SIZE) / 8

    def _product_us(self, layer: LayerShape, sms: int) -> float:
        c = self._constants
        efficiency = c.codebook_efficiency if self._codebook else c.memory_efficiency
        memory = self._spec.memory_gb_s * efficiency
        multiprocessors = max(sms, 1) * self._spec.clock_ghz * c.sm_bytes_per_cycle
        return self.weight_bytes(layer) / (min(memory, multiprocessors) * 1e3)

    def _fetch_us(self, layer: LayerShape, n_tb: int, k_chunk: int) -> float:
        c = self._constants
        size = k_chunk * chunks(layer.k) * layer.n * _RESIDUAL_BYTES + layer.n * _SCALE_BYTES
        return size / (min(self._spec.pcie_gb_s * c.pcie_efficiency, n_tb * c.block_gb_s) * 1e3)


def tune_simulated(
    device_id: str, shape_name: str, bits: float, budget_percent: float, *, codebook: bool = False
) -> tuple[Configuration, tuple[LayerShape, ...], SimulatedTimer]:
    """Run the search on a simulated device.

    Args:
        device_id: A name in `tuner.devices.DEVICES`.
        shape_name: A name in `tuner.shapes.SHAPES`.
        bits: 3, 3.5 or 4.
        budget_percent: Allowed slowdown, above 0 and at most 100 percent.
        codebook: As for `SimulatedTimer`.

    Returns:
        The configuration, the layers, and the timer (for curves).

    Raises:
        UnknownDeviceError: the device is unknown.
        ShapeError: the shape is unknown, or the bits can't be simulated.
        BudgetError: the budget is out of range.
    """
    spec, layers = device_of(device_id), shape_of(shape_name).layers
    timer = SimulatedTimer(spec, layers, bits, codebook=codebook)
    found = tune(
        layers, timer, budget_percent=budget_percent, sm_count=spec.sm_count, limit=spec.shared_bytes_per_block
    )
    return found, layers, timer


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
