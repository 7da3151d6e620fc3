r"""LaTeX formulas as Unicode text: `\frac{x^2}{2} \leq \alpha_i` becomes `x²/2 ≤ αᵢ`.

A formula with anything that has no such form (an environment, an unknown command) is left as it is written.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from html.entities import html5

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[ \t\r\n]+|.", re.DOTALL)
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_SYMBOLS = {
    "cdot": "·", "circ": "∘", "star": "⋆", "ast": "∗", "bullet": "•", "dots": "…", "ldots": "…", "cdots": "⋯",
    "vdots": "⋮", "to": "→", "gets": "←", "iff": "⇔", "implies": "⇒", "mapsto": "↦", "infty": "∞", "partial": "∂",
    "neq": "≠", "land": "∧", "lor": "∨", "neg": "¬", "lnot": "¬", "exists": "∃", "emptyset": "∅", "setminus": "∖",
    "mid": "∣", "ll": "≪", "gg": "≫", "phi": "ϕ", "varphi": "φ", "epsilon": "ϵ", "varepsilon": "ε", "Vert": "‖",
    "prime": "′", "degree": "°", "hbar": "ℏ", "top": "⊤", "bot": "⊥", "colon": ":",
    "not": "", "lbrace": "{", "rbrace": "}",
    ",": " ", ";": " ", ":": " ", " ": " ", "!": "", "quad": "  ", "qquad": "    ", "|": "‖",
    **{mark: mark for mark in "{}%$&#_"},
}  # fmt: skip
"""Symbols that HTML's entities, which share most of their names with LaTeX, lack or mean otherwise."""
_FUNCTIONS = re.compile(
    "a?(sin|cos|tan)h?|arc(sin|cos|tan)|arg|cot|coth|csc|deg|det|dim|exp|gcd|hom|inf|ker|lg|lim|liminf|limsup|ln|log|max|"
    "min|Pr|sec|sup"
)
_ACCENTS = {
    "hat": "\u0302", "widehat": "\u0302", "bar": "\u0304", "overline": "\u0305", "tilde": "\u0303", "vec": "\u20d7",
    "dot": "\u0307", "ddot": "\u0308", "widetilde": "\u0303",
}  # fmt: skip
_ALPHABETS = {"mathbb": "DOUBLE-STRUCK", "mathcal": "SCRIPT", "mathscr": "SCRIPT", "mathfrak": "FRAKTUR"}
_PLAIN = re.compile("text(rm|bf|it|style)?|math(rm|bf|it|sf)|boldsymbol|bm|operatorname|mbox|displaystyle|(no)?limits|"
                    "[bB]igg?[lr]?|left|right")  # fmt: skip
"""What changes only how its argument looks."""
_ABOVE = dict(
    zip(
        "0123456789+−=()abcdefghijklmnoprstuvwxyzABDEGHIJKLMNOPRTUVW′∗",
        "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻᴬᴮᴰᴱᴳᴴᴵᴶᴷᴸᴹᴺᴼᴾᴿᵀᵁⱽᵂ′*",
        strict=True,
    )
)
_BELOW = dict(zip("0123456789+−=()aehijklmnoprstuvxβγρϕχ", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓᵦᵧᵨᵩᵪ", strict=True))
_ROOTS = {"2": "√", "3": "∛", "4": "∜", "": "√"}
_PRICE = re.compile(r"[A-Za-z]{2}|^[\d\s.,/-]+$")
"""Between single dollars: words, or nothing but numbers, which are no formula for certain."""


class _Verbatim(Exception):
    """The formula has no form in Unicode."""


def unicode_of(formula: str) -> str:
    """A formula with its delimiters as Unicode text without them; as it is written if that can't be."""
    opening, closing = next((pair for pair in _DELIMITERS if formula.startswith(pair[0])), ("", ""))
    inside = formula.removeprefix(opening).removesuffix(closing)
    if not opening or len(formula) < len(opening + closing) or not formula.endswith(closing):
        return formula
    if opening[0] == "$" and _PRICE.search(re.sub(r"\\[A-Za-z]+(\{[^{}]*\})?", "", inside) or "x"):
        return formula
    try:
        return re.sub(r"(?<=\S)  +", " ", _Reader(inside).text()).strip() or formula
    except (_Verbatim, RecursionError):
        return formula


class _Reader:
    """Reads a formula from left to right."""

    def __init__(self, formula: str) -> None:
        self._tokens = _TOKEN.findall(formula)
        self._at = 0

    def text(self) -> str:
        """All of it.

        Raises:
            _Verbatim: a part has no form in Unicode.
        """
        text = "".join(self._parts(""))
        if self._at < len(self._tokens):
            raise _Verbatim
        return text

    def _parts(self, end: str) -> Iterator[str]:
        """What stands before a token, or before the end."""
        before = ""
        while self._at < len(self._tokens) and self._tokens[self._at] != end:
            fraction = self._tokens[self._at] in ("\\frac", "\\dfrac", "\\tfrac")
            part = self._part()
            if fraction and (before[-1:].isalnum() or self._goes_on()):
                part = f"({part})"
            if part:
                before = part
            yield part

    def _goes_on(self) -> bool:
        """Whether what follows would read as a part of a denominator."""
        rest = [token for token in self._tokens[self._at :] if not token.isspace()]
        return bool(rest) and (rest[0].isalnum() or rest[0] in "([^_" or rest[0][1:] in ("frac", "sqrt", "left"))

    def _part(self) -> str:
        """The next symbol, group or command with its arguments."""
        next_ = self._tokens[self._at]
        self._at += 1
        if next_ == "{":
            inside = "".join(self._parts("}"))
            self._at += 1
            if self._at > len(self._tokens):
                raise _Verbatim
            return inside
        if next_ in "^_":
            return self._script(_ABOVE if next_ == "^" else _BELOW, next_)
        if next_[0] == "\\":
            return self._command(next_[1:])
        if next_ in "}&~%#$":
            raise _Verbatim
        return " " if next_.isspace() else "−" if next_ == "-" else "′" if next_ == "'" else next_

    def _skip_space(self) -> None:
        while self._at < len(self._tokens) and self._tokens[self._at].isspace():
            self._at += 1

    def _argument(self) -> str:
        """The argument of a command or the script that follows."""
        self._skip_space()
        if self._at == len(self._tokens):
            raise _Verbatim
        return self._part()

    def _script(self, forms: dict[str, str], mark: str) -> str:
        script = self._argument()
        if script == "∘" and mark == "^":
            return "°"
        if all(letter in forms for letter in script):
            return "".join(forms[letter] for letter in script)
        return f"{mark}{_grouped(script)}"

    def _command(self, name: str) -> str:
        if name in ("frac", "dfrac", "tfrac"):
            over = _grouped(self._argument())
            return f"{over}/{_grouped(self._argument())}"
        if name == "sqrt":
            return self._root()
        if _PLAIN.fullmatch(name):
            return self._plain(name)
        if _FUNCTIONS.fullmatch(name):
            bare = self._at == len(self._tokens) or not self._tokens[self._at].isalnum()
            return name if bare else f"{name} "
        if name in _ACCENTS and len(letter := self._argument()) == 1:
            return unicodedata.normalize("NFC", letter + _ACCENTS[name])
        if name in _ALPHABETS:
            return "".join(_lettered(_ALPHABETS[name], letter) for letter in self._argument())
        symbol = _SYMBOLS.get(name, html5.get(f"{name};", "") if len(name) > 1 else "")
        if not symbol and name != "!":
            raise _Verbatim
        if (symbol.isalpha() or symbol in "∂∇") and "".join(self._tokens[self._at : self._at + 2]).strip().isalnum():
            self._skip_space()  # it ends the name of a letter, and is none in the formula
        return symbol

    def _root(self) -> str:
        degree = ""
        if self._tokens[self._at : self._at + 1] == ["["]:
            self._at += 1
            degree = "".join(self._parts("]"))
            self._at += 1
        inside = _grouped(self._argument())
        if degree in _ROOTS:
            return _ROOTS[degree] + inside
        if not all(letter in _ABOVE for letter in degree):
            raise _Verbatim
        return "".join(_ABOVE[letter] for letter in degree) + "√" + inside

    def _plain(self, name: str) -> str:
        """The argument of a command that changes its looks; of text, with its spaces."""
        if name in ("left", "right") and self._tokens[self._at : self._at + 1] == ["."]:
            self._at += 1
            return ""
        if name.startswith(("text", "mbox", "operator", "mathrm")) and self._tokens[self._at : self._at + 1] == ["{"]:
            end = self._tokens.index("}", self._at) if "}" in self._tokens[self._at :] else len(self._tokens)
            inside = "".join(self._tokens[self._at + 1 : end])
            if "\\" in inside or "{" in inside:
                raise _Verbatim
            self._at = end + 1
            return inside
        return ""  # what follows is read as it is


def _grouped(text: str) -> str:
    """A text that something binds to as one, in brackets unless it is a single one already."""
    text = text.strip()
    single = len(text) == 1 or re.fullmatch(r"[\d.]+|\w[\u0300-\u036f\u20d7′]?[⁰-ₜ²³¹]*|[√∛∜]\w", text)
    return text if single or (text[:1] == "(" and text.find(")") == len(text) - 1) else f"({text})"


def _lettered(alphabet: str, letter: str) -> str:
    """A letter of another alphabet."""
    case = "CAPITAL" if letter.isupper() else "SMALL"
    for prefix in ("", "MATHEMATICAL ", "BLACK-LETTER "):
        style = "" if prefix.startswith("BLACK") else f"{alphabet} "
        try:
            return unicodedata.lookup(f"{prefix}{style}{case} {letter.upper()}")
        except KeyError:
            continue
    raise _Verbatim
