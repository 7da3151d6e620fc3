"""Kernels that a decoded token launches on a GPU, by model, counted without a card.

    python -m tests.lab.launches             numbers of launches, a block and a token
    python -m tests.lab.launches --list      and what they are

Models have the shapes of real ones and no numbers; kernels do nothing. Copies of a step's inputs, which are none of
these, are two or three more a token, and torch adds up the logits in one.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass
from unittest import mock

from models.architecture import Graph, block_graph, step_graph
from models.spec import LAYER_TYPES
from runtime.backends.decoder import CompensationMode, DecoderOptions
from tests.lab.store import table


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """Of a decoded token."""

    blocks: tuple[tuple[str, ...], ...]  # Kernels of each block, in their order
    token: int  # All of them


def launches_of(case: str, k_chunk: int = 0) -> Launches:
    """What a token of a case of `tests.runtime.backends.triton.shapes` launches, compensated if k_chunk is not 0."""
    from runtime.backends.triton.decoder import TritonDecoder
    from runtime.backends.triton.forward import Pass
    from tests.runtime.backends.triton.counting import META, counted
    from tests.runtime.backends.triton.shapes import MODELS, Shapes, residuals, without_numbers

    spec, recipe = MODELS[case]
    way: CompensationMode = "rows" if k_chunk else "none"
    room = "runtime.backends.triton.model"
    loads = mock.patch(f"{room}.repack", without_numbers), mock.patch(f"{room}.load_residuals", residuals)
    with loads[0], loads[1], counted() as card:
        options = DecoderOptions(context=256, max_rows=16, k_chunk=dict.fromkeys(LAYER_TYPES, k_chunk))
        decoder = TritonDecoder(Shapes(spec, recipe), options, META)
        decoder.buffers.alone = None  # as on a card, where programs wait for each other

        def run(graph: Graph) -> tuple[str, ...]:
            card.launches.clear()
            Pass(decoder.model, decoder.buffers, M=1, R=1, way=way, draft=False, side=None).run(graph)
            return tuple(card.launches)

        blocks = tuple(run(block_graph(spec, layer)) for layer in range(spec.num_layers))
        return Launches(blocks=blocks, token=len(run(step_graph(spec))))


def main() -> None:
    """Count and print."""
    from tests.runtime.backends.triton.shapes import MODELS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the kernels of each kind of block")
    given = parser.parse_args()
    rows = []
    for case in MODELS:
        found = [launches_of(case, k_chunk) for k_chunk in (0, 16)]
        each = (" and ".join(str(n) for n in sorted({len(block) for block in one.blocks})) for one in found)
        rows.append((case, *each, *(one.token for one in found)))
        if given.list:
            for block, count in Counter(found[0].blocks).items():
                print(f"{case}, {count} blocks: {' '.join(block)}")
    print(table(("model", "a block", "compensated", "a token", "compensated"), rows))


if __name__ == "__main__":
    main()
