"""Descriptions of models that can be downloaded, and the recommendation among them."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from app import paths
from app.amounts import byte_count, duration
from app.language import _

if TYPE_CHECKING:
    from runtime.wire.device import Prospect

READABLE = 10.0
"""Tokens per second of reading speed; slower models are not recommended."""
_MAX_READY_S = 20 * 60
"""Maximum time in seconds to download and quantize a recommended model."""
RECOMMENDED = _("Recommended: the largest that needs no login, is ready in 20 minutes and writes faster than you read.")
"""Why `recommended` takes the one that it takes."""
_LARGE_BYTES = 2e9
"""Size from which a checkpoint on this machine is not quantized without a question."""
_LINE_BYTES_S = 12.5e6
"""Speed of the line for which downloads are estimated: 100 Mbit/s."""


def recommended(found: Sequence[Prospect]) -> Prospect | None:
    """The best model that fits well, needs no login, reaches reading speed and is quickly downloaded and quantized.

    The best is the largest; a mixture of experts counts as the geometric mean of its weights and those that a token
    reads. None if there is none, or if speeds are not known yet.
    """
    free = [one for one in found if one.fits == "yes" and one.leads and not one.gated]
    good = [one for one in free if (one.tokens_per_s or 0) >= READABLE]
    fast = [one for one in good if one.download_bytes / _LINE_BYTES_S + one.making_s <= _MAX_READY_S]
    return max(fast, key=lambda one: one.parameters * math.sqrt(one.active_share), default=None)


def words(one: Prospect) -> str:
    """A model's origin, licence and requirements."""
    effort = _(
        "{form}, {size} to download, about {time} to quantize",
        form=one.form,
        size=byte_count(one.download_bytes),
        time=duration(one.making_s),
    )
    made = _("{source} by {maker}", source=one.source, maker=one.maker)
    parts = [made, one.license, effort, room(one), _(one.good_for)]
    if one.active_share < 1:
        parts.append(_("a token reads {share:.0%} of its weights", share=one.active_share))
    if not one.verified:
        parts.append(_("its entry was not checked on the hub"))
    if one.gated:
        parts.append(_("needs a login: accept the licence on the hub, then run `hf auth login`"))
    return " · ".join(parts)


def room(one: Prospect) -> str:
    """A model's memory needs, and whether they are met."""
    if one.bits is None:
        return _("needs {size}, more than is free now", size=byte_count(one.needed_bytes))
    taken = _(
        "takes {size} at {bits:g} bits with {context:,} tokens of context",
        size=byte_count(one.needed_bytes),
        bits=one.bits,
        context=one.context,
    )
    if one.blocks is None:
        return taken
    return _("{taken}, {blocks} on the card and the others by the processor", taken=taken, blocks=one.blocks)


def size_at(one: Prospect, bits: float) -> int:
    """Device memory in bytes of its weights at so many bits."""
    return one.sizes[min(2, max(0, round(2 * bits) - 6))]


def question(source: str, bits: float, found: Sequence[Prospect]) -> str | None:
    """The question to ask before a model is made: its size, the time and the disk it takes; None if it is small."""
    one = next((one for one in found if one.source == source), None)
    on_disk = 0 if one is not None else _bytes_in(Path(source))
    if one is not None:
        told = _(
            "Download {title}, {size}, and quantize it to {bits:g} bits? It takes about {download_time} at 100 Mbit/s, "
            "and {time} to quantize.",
            title=one.title,
            size=byte_count(one.download_bytes),
            bits=bits,
            download_time=duration(one.download_bytes / _LINE_BYTES_S),
            time=duration(one.making_s),
        )
        needed = one.download_bytes + one.residual_bytes + size_at(one, bits)
    elif on_disk is None:
        unknown = _("Download {source} and quantize it to {bits:g} bits? Its size shows once it is asked for.",
                    source=source, bits=bits)  # fmt: skip
        told, needed = unknown, 0
    elif on_disk < _LARGE_BYTES:
        return None
    else:
        rate = max((one.making_s / one.parameters for one in found), default=0)
        told = _("Quantize {source}, {size}, to {bits:g} bits?", source=source, size=byte_count(on_disk), bits=bits)
        if rate:
            told = f"{told} {_('It takes about {time}.', time=duration(rate * on_disk / 2))}"
        needed = on_disk // 2
    free = byte_count(_free_bytes())
    if not needed:
        return f"{told} {_('{size} of disk are free.', size=free)}"
    return f"{told} {_('It needs {size} of disk; {free} of disk are free.', size=byte_count(needed), free=free)}"


def _bytes_in(path: Path) -> int | None:
    """Size of a file or of a folder's files; None if it is not on this machine."""
    if not path.exists():
        return None
    return sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]) if file.is_file())


def _free_bytes() -> int:
    """Free bytes on the disk of the stored models."""
    folder = paths.store_root()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
