"""Specifications of graphics cards for simulations.

The five cards of the paper's Table 2 come first, with its figures for memory size, memory bandwidth, SMs and PCIe.
"""

from __future__ import annotations

from dataclasses import dataclass

from tuner.errors import UnknownDeviceError

_TABLE_2 = "QDEC Table 2; boost clock as published for the "
_DESKTOP = "reference card"
_LAPTOP = "highest power limit of laptops"
_LAPTOP_40 = "Published figures of the AD107 chip: active SMs, 16 Gbit/s on 128 bits; PCIe 4.0 x8; boost clock at the "
_LAPTOP_50 = (
    "Published figures of the GB206 chip: active SMs, 24 Gbit/s on 128 bits; PCIe 5.0 x8, where the laptop wires it "
    "so; boost clock "
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """The data sheet of a graphics card."""

    id: str
    """Name on the command line."""
    name: str
    """Its full name."""
    memory_bytes: int
    """Its memory."""
    memory_gb_s: float
    """Bandwidth of its memory, in 10^9 bytes per second."""
    sm_count: int
    """Streaming multiprocessors."""
    pcie_gb_s: float
    """Bandwidth of its link to main memory, one direction, in 10^9 bytes per second."""
    clock_ghz: float
    """Boost clock."""
    shared_bytes_per_block: int
    """Default shared memory of a block."""
    source: str
    """The source of the figures."""

    def __post_init__(self) -> None:
        sizes = (self.memory_bytes, self.memory_gb_s, self.sm_count, self.pcie_gb_s, self.clock_ghz)
        if not all(size > 0 for size in (*sizes, self.shared_bytes_per_block)):
            raise ValueError(f"not the specification of a device: {self}")


def device_of(device_id: str) -> DeviceSpec:
    """The specification of a device by name.

    Raises:
        UnknownDeviceError: no device has that name.
    """
    if device_id not in DEVICES:
        raise UnknownDeviceError(f"unknown device {device_id!r}; known: {', '.join(DEVICES)}")
    return DEVICES[device_id]


def _device(
    id: str,  # noqa: A002 - the field's name
    name: str,
    *,
    memory_gb: int,
    memory_gb_s: float,
    sms: int,
    pcie_gb_s: float,
    clock_ghz: float,
    source: str,
) -> DeviceSpec:
    return DeviceSpec(
        id=id,
        name=f"NVIDIA GeForce {name}",
        memory_bytes=memory_gb << 30,
        memory_gb_s=memory_gb_s,
        sm_count=sms,
        pcie_gb_s=pcie_gb_s,
        clock_ghz=clock_ghz,
        shared_bytes_per_block=48 << 10,
        source=source,
    )


DEVICES = {
    spec.id: spec
    for spec in (
        _device("rtx-4090", "RTX 4090", memory_gb=24, memory_gb_s=1008, sms=128, pcie_gb_s=32, clock_ghz=2.52,
                source=_TABLE_2 + _DESKTOP),
        _device("rtx-4080s", "RTX 4080 SUPER", memory_gb=16, memory_gb_s=736, sms=80, pcie_gb_s=32, clock_ghz=2.55,
                source=_TABLE_2 + _DESKTOP),
        _device("rtx-4070s", "RTX 4070 SUPER", memory_gb=12, memory_gb_s=504, sms=56, pcie_gb_s=32, clock_ghz=2.475,
                source=_TABLE_2 + _DESKTOP),
        _device("rtx-4070m", "RTX 4070 Laptop GPU", memory_gb=8, memory_gb_s=256, sms=36, pcie_gb_s=16,
                clock_ghz=2.175, source=_TABLE_2 + _LAPTOP),
        _device("rtx-4050m", "RTX 4050 Laptop GPU", memory_gb=6, memory_gb_s=192, sms=20, pcie_gb_s=16,
                clock_ghz=2.37, source=_TABLE_2 + _LAPTOP),
        _device("rtx-4060m", "RTX 4060 Laptop GPU", memory_gb=8, memory_gb_s=256, sms=24, pcie_gb_s=16,
                clock_ghz=2.37, source=_LAPTOP_40 + _LAPTOP),
        _device("rtx-5060m", "RTX 5060 Laptop GPU", memory_gb=8, memory_gb_s=384, sms=26, pcie_gb_s=32,
                clock_ghz=2.01, source=_LAPTOP_50 + "of the 60 W variant"),
        _device("rtx-5070m", "RTX 5070 Laptop GPU", memory_gb=8, memory_gb_s=384, sms=36, pcie_gb_s=32,
                clock_ghz=2.347, source=_LAPTOP_50 + "at the " + _LAPTOP),
    )
}  # fmt: skip
"""The devices that can be simulated, by name."""
