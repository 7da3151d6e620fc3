"""The step graph, and who runs it."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

import pytest

from models.architecture import Kind, block_graph, step_graph
from models.oracle import _Operations
from models.part import part_of
from runtime.backends.cpu.plan import PlanOperations
from runtime.backends.reference.decoder import _Pass
from tests.runtime.backends.triton.conftest import DEVICE
from tests.runtime.conftest import SHARED, STREAMS, make_spec

DENSE = Counter(read=5, linear=9, attend=2, gate=2, add=4, embed=1, rows=1)


def test_a_dense_model_has_ten_nodes_a_block() -> None:
    graph = step_graph(make_spec())
    assert Counter(node.kind for node in graph.nodes) == DENSE
    assert len(block_graph(make_spec(), 1).nodes) == 10 + 1, "and one that enters"
    assert step_graph(make_spec()) is graph, "made once"


def test_every_node_is_read_once_but_the_stream_the_last_and_what_every_block_reads() -> None:
    for spec in (make_spec(), make_spec(**SHARED), make_spec(**STREAMS)):
        graph = step_graph(spec)
        for node in graph.nodes[:-1]:
            several = node.kind in ("embed", "tokens", "add", "predict", "correct")
            several |= node.kind == "read" and spec.altup is not None
            assert len(graph.readers[node]) == 1 or (several and len(graph.readers[node]) > 1), node
        assert graph.reader(graph.nodes[-1]) is None
        dropped = [own for ended in graph.ends.values() for own in ended]
        assert Counter(dropped) == Counter(graph.nodes[:-1]), "each once, where it is read last"


def test_parts_begin_and_end_at_the_stream() -> None:
    spec = make_spec(num_layers=3, logit_cap=3.0)
    kinds = [[node.kind for node in step_graph(part_of(spec, *own)).nodes] for own in ((0, 1), (1, 3))]
    assert (kinds[0][0], kinds[0][-1], kinds[1][0], kinds[1][-1]) == ("embed", "leave", "enter", "cap")
    assert [node.norm for node in step_graph(spec, hidden=True).nodes][-1] == "norm"


def test_a_graph_is_printed_as_it_runs() -> None:
    first = """
    0  embed
    1  read layers.0.input_norm  of 0
    2  linear layers.0.qkv  of 1
    3  attend block 0  of 2
    4  linear layers.0.o  of 3
    5  add  of 0, 4
    6  read layers.0.post_norm  of 5
    7  linear layers.0.gate_up  of 6
    8  gate block 0  of 7
    9  linear layers.0.down  of 8
   10  add  of 5, 9
"""
    assert str(step_graph(make_spec())).startswith(first.strip("\n"))


@pytest.mark.parametrize("name", ["oracle", "reference", "cpu", "triton"])
def test_who_runs_a_graph_knows_every_kind_of_node(name: str) -> None:
    """The oracle's are whole models and blocks.

    The GPU backend loads no block that predicts further tokens, and no stream that is several.
    """
    from runtime.backends.triton.forward import Pass

    runs: dict[str, Any] = {"oracle": _Operations, "reference": _Pass, "cpu": PlanOperations, "triton": Pass}
    lacking = [kind for kind in get_args(Kind) if not callable(getattr(runs[name], kind, None))]
    assert lacking == (["join", "spread", "predict", "correct", "merge"] if name == "triton" else [])
    assert DEVICE
