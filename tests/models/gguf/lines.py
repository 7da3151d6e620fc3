"""Lines of mixed text for tokenizers: prose, code, digits, emoji, scripts of the world, and noise."""

from __future__ import annotations

import random

_NAMES = ["x", "rows", "k_chunk", "_SPARE_BYTES", "HTTPServer", "readLine", "__init__", "n2", "Ŵ", "café_au_lait"]
_CODE = [
    "def {0}(self, {1}: int = 0x{2:x}, *, {3}: str | None = None) -> list[{0}]:",
    "return {0}[{1}:{2}, ...] @ {3}.T  # [{2}, K]",
    'raise {0}Error(f"{{{1}!r}} isn\'t in {3}: {{{2}:>8.3f}}") from None',
    "for (size_t {0} = 0; {0} < {1}->{3}; ++{0}) {{ *{1}++ |= {3}[{0}] << {2}; }}",
    "#include <{0}/{1}.h>",
    "const {0} = async ({{ {1}, ...{3} }}) => `${{{1}}}/${{await {3}?.({2})}}`;",
    "SELECT {0}.*, COUNT(*) FROM {1} WHERE {3} <> '{2}' GROUP BY 1;",
    "<{0} class=\"{1}-{2}\" href='#{3}'>&nbsp;</{0}>",
    '{0}: {{ {1}: [{2}, -{2}e-{2}], "{3}": null }},',
    "if ! {0} --{1}={2} 2>/dev/null | grep -q '^{3}$'; then exit $?; fi",
    "impl<'a, {0}: {1}> {3}<'a> for Vec<[{0}; {2}]> {{}}",
    "\\frac{{\\partial {0}}}{{\\partial {1}_{{{2}}}}} \\leq {3}",
    "",
]
_WORDS = [
    "naïve",
    "café",
    "Zwölf",
    "don't",
    "I'LL",
    "we've",
    "x²",
    "½",
    "3.14159",
    "1,000,000",
    "0x7f",
    "e-mail",
    "ﬁ",
    "ŀ",
]
_RANGES = {
    "cjk": (0x4E00, 0x9FFF),
    "kana": (0x3041, 0x30FE),
    "hangul": (0xAC00, 0xD7A3),
    "emoji": (0x1F600, 0x1F64F),
    "arabic": (0x0621, 0x064A),
    "devanagari": (0x0905, 0x0939),
    "cyrillic": (0x0410, 0x044F),
    "symbols": (0x2190, 0x22FF),
}
_SPACES = [" ", "  ", "\t", "    ", "\n", "\r\n", "\n\n", "\u00a0", "\u3000", " \n"]


def mixed_lines(count: int, prose: str = "") -> list[str]:
    """So many different lines, the same at every call.

    Args:
        count: How many.
        prose: Text of which about a quarter of the lines is taken; without it there are more of the others.
    """
    generator = random.Random(0)
    kinds = [lambda: _code(generator), lambda: _digits(generator), lambda: _mixture(generator)]
    if prose:
        written = [line for line in prose.splitlines() if line.strip()]
        kinds.append(lambda: generator.choice(written)[:300])
    lines: dict[str, None] = {}
    while len(lines) < count:
        for kind in kinds:
            lines[kind()] = None
    return list(lines)[:count]


def _code(generator: random.Random) -> str:
    first, second, third = generator.sample(_NAMES, 3)
    line = generator.choice(_CODE).format(first, second, generator.randrange(10 ** generator.randrange(1, 6)), third)
    return generator.choice(["", "    ", "\t"]) * generator.randrange(5) + line


def _digits(generator: random.Random) -> str:
    parts = [str(generator.randrange(10 ** generator.randrange(1, 12))) for _ in range(generator.randrange(1, 6))]
    return generator.choice([" ", ", ", ".", "-", "", "/", " + ", "\n"]).join(parts)


def _mixture(generator: random.Random) -> str:
    pieces = []
    for _ in range(generator.randrange(1, 9)):
        kind = generator.choice([*_RANGES, "word", "space", "zwj", "ascii", "ascii"])
        if kind == "word":
            pieces.append(generator.choice(_WORDS))
        elif kind == "space":
            pieces.append(generator.choice(_SPACES))
        elif kind == "zwj":
            pieces.append(generator.choice(["👩‍👩‍👧", "🏳️‍🌈", "e\u0301", "👍🏽", "क्षि"]))
        elif kind == "ascii":
            pieces.append("".join(chr(generator.randrange(32, 127)) for _ in range(generator.randrange(1, 12))))
        else:
            low, high = _RANGES[kind]
            pieces.append("".join(chr(generator.randrange(low, high + 1)) for _ in range(generator.randrange(1, 6))))
    return generator.choice(["", " "]).join(pieces)
