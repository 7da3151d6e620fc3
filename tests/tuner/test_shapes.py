from __future__ import annotations

import pytest

from tuner.devices import DEVICES, device_of
from tuner.errors import ShapeError, UnknownDeviceError
from tuner.shapes import SHAPES, LayerShape, check_layers, shape_of


def test_llama_3_8b_has_the_papers_matrices() -> None:
    sizes = {layer.kind: (layer.k, layer.n) for layer in SHAPES["llama-3-8b"].layers}
    assert sizes == {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)}
    assert {layer.count for layer in SHAPES["llama-3-8b"].layers} == {32}


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-3-8b", 6.98), ("phi-3-medium", 13.63), ("llama-3.2-1b", 0.97), ("llama-3.2-3b", 2.82),
     ("phi-3-mini", 3.62), ("qwen-2.5-7b", 6.53), ("qwen-3-8b", 6.95)],
)  # fmt: skip
def test_shapes_have_their_models_weights(name: str, billions: float) -> None:
    weights = sum(layer.weights * layer.count for layer in shape_of(name).layers)
    assert weights / 1e9 == pytest.approx(billions, rel=0.005)
    check_layers(shape_of(name).layers)


def test_an_unknown_shape_names_the_known() -> None:
    with pytest.raises(ShapeError, match="unknown shape 'llama-9'; known: llama-3-8b"):
        shape_of("llama-9")


@pytest.mark.parametrize(("kind", "n", "k", "count"), [("", 1, 1, 1), ("o", 0, 1, 1), ("o", 1, -1, 1), ("o", 1, 1, 0)])
def test_a_layer_that_cannot_be_is_refused(kind: str, n: int, k: int, count: int) -> None:
    with pytest.raises(ShapeError):
        LayerShape(kind, n, k, count)


def test_a_type_stands_once() -> None:
    with pytest.raises(ShapeError, match="occurs twice in o, o"):
        check_layers([LayerShape("o", 8, 8, 1), LayerShape("o", 8, 16, 1)])


def test_table_2() -> None:
    table = {
        "rtx-4090": (24, 1008, 128, 32),
        "rtx-4080s": (16, 736, 80, 32),
        "rtx-4070s": (12, 504, 56, 32),
        "rtx-4070m": (8, 256, 36, 16),
        "rtx-4050m": (6, 192, 20, 16),
    }
    found = {
        name: (spec.memory_bytes >> 30, spec.memory_gb_s, spec.sm_count, spec.pcie_gb_s)
        for name, spec in DEVICES.items()
        if name in table
    }
    assert found == table
    assert list(DEVICES)[:5] == list(table)


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_says_where_its_figures_are_from(name: str) -> None:
    spec = device_of(name)
    assert spec.id == name
    assert spec.source.startswith(("QDEC Table 2", "Published figures"))
    assert 0.5 < spec.clock_ghz < 3.5


def test_an_unknown_device_names_the_known() -> None:
    with pytest.raises(UnknownDeviceError, match="unknown device 'gtx-1'; known: rtx-4090"):
        device_of("gtx-1")


def test_a_specification_without_bandwidth_is_refused() -> None:
    import dataclasses

    with pytest.raises(ValueError, match="not the specification"):
        dataclasses.replace(DEVICES["rtx-4090"], memory_gb_s=0)
