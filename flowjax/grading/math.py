"""Answers to problems of mathematics: the last number of a reply, and whether two answers are equal.

A grader that computes would solve the problem for a reply that only repeats it, `12+34` for `12+34=?`: so where the
gold answer is a number, the answer has to be a number, too. Numbers and words are compared here; everything else by
math-verify (extra `math`), which gets both answers as LaTeX, since it reads plain formulas such as 2*sqrt(2) only in
part. A signal ends computations that take too long: call `equal` from a main thread, or through
`flowjax.grading.processes`. The limit is processor time, so that no verdict depends on what else the machine does;
math-verify's own limits, on wall-clock time, are off.
"""

import contextlib
import logging
import math
import re
import signal
import time
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from flowjax.grading.answers import last_boxed

MAX_CHARACTERS = 1000  # of an answer; a longer one is wrong
MAX_EXPONENT = 1000  # of a number in a whole reply; see `anywhere`
MAX_FACTORIAL = 200
MAX_DIGITS = 500
MAX_TOWER = 100  # nested powers without braces, as in 2^3^4
MAX_BITS = 1 << 15  # of a number in a formula; a larger one is not computed
MAX_TERMS = 200  # of an expanded power of a sum
DECIMALS = 6  # to which decimal fractions are rounded, as math-verify does

_POWER_OF_TEN = r"[eE](?:\d{1,3}|\+\d\d\d?|-\d\d\d?)(?!\d)"  # as programs print it; `2e-3` may be a formula with e
_NUMBER = rf"(?:(?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d+)?|\.\d+)(?:{_POWER_OF_TEN})?"
_LAST_NUMBER = re.compile(rf"(?<![\w.])[-+]?(?:\d+ (?=\d+/\d))?(?:{_NUMBER})(?:[eE]-\d(?!\d))?(?:/\d+(?!\d|\.\d))?%?")
_PLAIN_NUMBER = re.compile(rf"([-+]?)({_NUMBER})(?:/([-+]?\d+))?(%?)")
_MIXED = re.compile(r"([-+]?)(\d+) (\d+)/(\d+)")
_BASED = re.compile(r"\(?([0-9A-Za-z]+)\)?_\{?(\d+)\}?")
_WORDS = re.compile(r"[^\W\d_]{2,}(?:[\s'-]+[^\W\d_]+)*")
_FRACTION = re.compile(r"\\[cdt]?frac\s*(?:\{([-+]?[\d,]+)\}|(\d))\s*(?:\{([-+]?\d+)\}|(\d))")
_SIGNED = re.compile(r"([-+]?)(?:\(([^(),]*)\)|\{([^{},]*)\}|-(-.*))")  # `-(12)`, `{3/4}`
_SCIENTIFIC = re.compile(
    rf"([-+]?{_NUMBER}) ?(?:\\times|\\cdot|\*|x) ?10 ?\^ ?(?:\{{([-+]?\d{{1,3}})\}}|(-?\d{{1,3}}))"
)
# Brackets around one number, `(5)`, `\{5\}`, and what is said to equal it: `x = 5`, `12 + 34 = 46`.
_WRAPPED = re.compile(r"(?:\\?\{|[(\[])([^(){}\[\],\\]*)(?:\\?\}|[)\]])")
_SAID_EQUAL = re.compile(r"(?<![<>!:])(?<!\\not)=|\\approx(?![a-z])|≈")
_NAMED = re.compile(r"[a-zA-Z]\s*=\s*(.+)")
_OTHER_NAME = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]|[,;]")
_SEVERAL = re.compile(r"[,;]|\b(?:or|and)\b")
# Operations that are still to be carried out: no answer may have them, unless the gold answer has them, too.
_UNDONE = re.compile(
    r"\\(?:sum|prod|i*nt|lim|gcd|det|max|min|cap|partial)(?![a-z])|\\\}\s*\\cup\s*\\\{"
    r"|\\frac\s*\{d\}\s*\{d\s*[a-z]\}|\bd/d[a-z]\b"  # derivatives, and below determinants and products of matrices
    r"|\\begin\{[vV]matrix\}|\|\s*\\begin|\\end\{\w*matrix\}\s*(?:\^|\*|\\cdot|\\times|\\begin)"
)
_CHAIN = re.compile(r"([^<>=]+)(<=|<)([a-zA-Z])(<=|<)([^<>=]+)")
_ONE_SIDED = re.compile(r"([a-zA-Z])(<=|<|>=|>)([^<>=]+)")
_RELATION = re.compile(r"(<=|>=|<|>)")
_QUOTES = [(mark, mark) for mark in ('"', "'", "`", "**")]
_CONSTANTS = ("pi", "oo", "inf", "infty", "infinity")
_SMALL = Fraction(1, 10**4)
_MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_COUNTS = ("hundred", "thousand", "million", "billion", "trillion", "dozen")
_PARTS = ("third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "hundredth", "thousandth")
# Words after a number that change its value: a text with one of them is no unit.
NO_UNITS = {"percent", "pi", "and", "or", "plus", "minus", "half", "halves", *_COUNTS, *_PARTS}
NO_UNITS |= {f"{word}s" for word in (*_COUNTS, *_PARTS)}
# Words in roman type behind a number, at the end, with their power: `5\,\text{cm}^2`, `5 \mathrm{~m/s}`.
_NO_UNIT = rf"(?![^{{}}]*\b(?:{'|'.join(NO_UNITS)})\b)(?!(?:squared|cubed|[ap]m|[abdeiknpqrtuxyzπ])\b)"  # or a variable
_END_OF_UNIT = r"(?:\s*\^\s*(?:\d|\{\s*\d\s*\}))?[.\s]*$"
_UNIT = re.compile(
    r"(?:(?<=[\d)}])|(?<=\\pi)|(?<=\\circ))(?:\\[,;:! ]|[~\s])*\\(?:text|textrm|mathrm|mbox)\s*\{[~\s]*"
    rf"{_NO_UNIT}([a-zA-Z][^{{}}\d]*?)(?:\^\d)?\}}{_END_OF_UNIT}",
    re.IGNORECASE,
)
_PLAIN_UNIT = re.compile(  # `18 dollars`, `12cm`, `25 °C`
    r"(?<=\d)(?:\s+|\s*°\s*|(?=(?:[cmk]m|[mk]g|ml|ft|mph|min|hrs?)\b))"
    rf"{_NO_UNIT}([a-zA-Z][a-zA-Z /-]*){_END_OF_UNIT}",
    re.IGNORECASE,
)
_LARGE_BINOMIAL = re.compile(r"\\[dt]?binom\s*\{?\s*(?:\d{5}|[^{}]*\^)")  # binomials are computed while they are read
_POWER = r"(\w+|\{[^{}]*\}|[\ue000-\uf8ff])"
_FORMULA = re.compile(r"[-+*/^_=<>\\]")  # a text with none of these is prose: "A cat and a dog"
_SYMBOL = re.compile(r"\\(?:begin|end)\{\w+\}|\\[a-zA-Z]+|[a-zA-Z]")
_FREE = "abcklmnpqrstuvwxyz"  # letters that name no function, constant or unit of LaTeX's readers
_TOWER = re.compile(rf"\^{_POWER}\^{_POWER}(?!\^)")
_INTERVAL = re.compile(r"[\[(][^\[\]]*,[^\[\]]*[\])](?:\s*\\cup\s*[\[(][^\[\]]*,[^\[\]]*[\])])*")
_SHORT_FRACTION = re.compile(r"\\[dt]?frac\s*(\\pi|\{[^{}]*\}|\w)\s*(\\pi|\{[^{}]*\}|\w)")  # `\frac ab`, `\frac\pi4`
_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln"


def last_number(text: str) -> str | None:
    """The last number of a text, with its sign, thousands separators, denominator and percent sign."""
    found = [match.group() for match in _LAST_NUMBER.finditer(text.replace("−", "-"))]
    return found[-1] if found else None


def equal(answer: str, gold: str, cpu_s: float = 5.0) -> bool:
    """Compare an answer with the gold answer: the same number, formula, set, interval or words.

    Where the gold answer is a number, a formula of that value is not equal. A gold number in another base than ten
    equals only its own digits, with the base or without. A percentage equals its number with and without the division
    by 100. Several solutions may be in any order; in parentheses they are a tuple, whose order counts. A unit that only
    one of the two names is ignored. Formulas that take more than `cpu_s` seconds of processor time to read and compare,
    or are nested too deeply for that, are not equal.

    Raises:
        ImportError: a formula is to be compared and math-verify is not installed.
        ValueError: a formula is to be compared outside a main thread.
    """
    if max(len(answer), len(gold)) > MAX_CHARACTERS:
        return False
    said, true = _bare(answer), _bare(gold)
    if not said or not true:
        return False
    if _squeezed(said) == _squeezed(true):
        return True
    said, true = (_bare(text) for text in without_unit(answer, gold))
    based, wanted = _in_base(said), _in_base(true)
    if based or wanted:
        return based == wanted or (not based and wanted.startswith(f"{_squeezed(said)}_"))
    number = _alone(said)
    if numbers := _values(true):
        rounded = "." in number or "." in true
        return any(_same(a, b, rounded) for a in _values(number) for b in numbers)
    if (named := _NAMED.fullmatch(true)) and _values(named[1]) and not _values(number):  # `x=5` wants a number, too
        return False
    # Different words are not equal: math-verify would read them as products of their letters, and "ab" as "ba".
    if any(_WORDS.fullmatch(text) and text not in _CONSTANTS for text in (said, true)):
        return False
    if _LARGE_BINOMIAL.search(said) or _LARGE_BINOMIAL.search(true):
        return False
    if set(_UNDONE.findall(said)) - set(_UNDONE.findall(true)):
        return False
    intervals = _as_interval(said), _as_interval(true)
    if any(map(_INTERVAL.fullmatch, intervals)):
        said, true = intervals
    said, true = _in_one_case(_latex(said), _latex(true))
    return _verified(said, true, cpu_s)


def is_number(text: str) -> bool:
    """True for a text that is one number and nothing else, apart from boxes, currencies and percent signs."""
    bare = _bare(text)
    return bool(_values(bare) or _in_base(bare))


def plain_form(answer: str) -> str:
    """A text that is the same for answers that are the same number or text. Quick: formulas are taken as written."""
    bare = _bare(answer)
    values = _values(bare)
    if not values:
        return _in_base(bare) or _squeezed(bare) or _squeezed(answer)
    value = values[0]
    if "." in bare:
        value = round(value, DECIMALS) if abs(value) >= _SMALL else Fraction(f"{float(value):.3g}")
    return f"{value}%" if len(values) > 1 else str(value)


def anywhere(reply: str, gold: str, cpu_s: float = 5.0) -> bool:
    """The verdict of math-verify on a whole reply, as in AstraFlow's recipes: it takes whatever answer it finds there.

    Raises:
        ImportError, ValueError: as `equal`.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    if _explodes(reply):
        return False
    with contextlib.suppress(_TooLong, RecursionError), _bounded(cpu_s):
        true = parse(rf"\boxed{{{gold}}}", [LatexExtractionConfig()], parsing_timeout=0)
        said = parse(reply, [ExprExtractionConfig(), LatexExtractionConfig()], parsing_timeout=0)
        if not true or not said or any(_bits(tree) > MAX_BITS for tree in (*true, *said)):
            return False
        return verify(true, said, float_rounding=DECIMALS, timeout_seconds=0)
    return False


class _TooLong(BaseException):
    """Not derived from Exception: sympy and math-verify catch those and go on."""


@contextlib.contextmanager
def _bounded(cpu_s: float) -> Iterator[None]:
    """Raises `_TooLong` in a computation of more than `cpu_s` of this thread's processor time. Main thread only."""

    def look(*_: object) -> None:
        if time.thread_time() > end_s:  # the timer counts the processor time of all threads together: not yet, perhaps
            raise _TooLong

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own limits are off
    end_s, before = time.thread_time() + cpu_s, signal.signal(signal.SIGVTALRM, look)
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s, min(cpu_s, 1.0))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def _verified(said: str, true: str, cpu_s: float) -> bool:
    from math_verify import LatexExtractionConfig, parse, verify  # half a second, and an extra

    config = [LatexExtractionConfig()]
    with contextlib.suppress(_TooLong, RecursionError), _bounded(cpu_s):
        parsed = [parse(f"${text}$", config, fallback_mode="no_fallback", parsing_timeout=0) for text in (true, said)]
        if not all(parsed):
            return False
        if any(_bits(tree) > MAX_BITS for trees in parsed for tree in trees):
            return parsed[0][0] == parsed[1][0]  # the same formula, written otherwise
        return verify(*parsed, float_rounding=DECIMALS, timeout_seconds=0)
    return False


def _bits(tree: Any) -> float:
    """Upper bound on the bits of the numbers that occur when a formula is computed; infinite where that is too many.

    Reading a formula computes no power (sympy's `evaluate=False`), so what computing it would cost is known before.
    A power of a sum with variables counts as too large where it has more than `MAX_TERMS` terms.
    """
    if not getattr(tree, "args", ()):
        return _bits_of_leaf(tree)
    parts = [_bits(part) for part in tree.args]
    kind = type(tree).__name__
    if max(parts) > MAX_BITS:
        return math.inf
    if kind == "Pow":
        base, exponent = tree.args
        times = _most(exponent, parts[1])
        if base.is_Add and base.free_symbols and exponent.is_number and times > 1:
            terms = math.comb(int(min(times, MAX_TERMS)) + len(base.args) - 1, len(base.args) - 1)
            if terms > MAX_TERMS:
                return math.inf
        return max(1.0, parts[0]) * max(1.0, times) if exponent.is_number else sum(parts)
    if kind in ("factorial", "factorial2", "gamma", "loggamma", "subfactorial", "RisingFactorial", "FallingFactorial"):
        most = _most(tree.args[0], parts[0])
        return most * math.log2(most + 2)
    if kind == "binomial":
        return _most(tree.args[0], parts[0])
    return sum(parts) if kind == "Mul" else max(parts) + math.log2(len(parts) + 1)


def _bits_of_leaf(leaf: Any) -> float:
    if getattr(leaf, "is_Rational", False):
        return float(int(leaf.p).bit_length() + int(leaf.q).bit_length())
    if getattr(leaf, "is_Float", False):
        return float(leaf._prec) + abs(math.log2(abs(leaf) or 1))
    return 2.0  # pi, e, a variable


def _most(exponent: Any, bits: float) -> float:
    """Upper bound on the magnitude of a number of so many bits."""
    if getattr(exponent, "is_Number", False) and exponent.is_finite:
        return float(abs(exponent)) if bits < 1000 else math.inf
    return 2.0**bits if bits < 1000 else math.inf


def without_unit(one: str, other: str) -> tuple[str, str]:
    """Both answers, one of them without its unit where the other has none and does not hold those letters."""
    one, other = _unwrapped(one), _unwrapped(other)
    found = [_UNIT.search(text) or _PLAIN_UNIT.search(text) for text in (one, other)]
    if found[0] and not found[1] and found[0][1].strip() not in other:
        one = one[: found[0].start()]
    elif found[1] and not found[0] and found[1][1].strip() not in one:
        other = other[: found[1].start()]
    return one, other


def _bare(text: str) -> str:
    """The answer without delimiters of LaTeX, a box, a currency or a full stop around it; symbols in one spelling."""
    text = _unwrapped(text)
    text = re.sub(r"\\text(?:bf|rm|it)?\{([^{}]*)\}|\\math(?:rm|bf)\{([^{}]*)\}", lambda m: m[1] or m[2] or "", text)
    text = re.sub(r"(?<!\\)\\ |~", " ", re.sub(r"\^\s*(?:\\circ(?![a-z])|\{\s*\\circ\s*\})|°", "", text))
    text = text.replace(r"\%", "%").replace("−", "-").replace("–", "-").replace("π", r"\pi ").replace("≤", "<=")
    text = text.replace(r"\varnothing", r"\emptyset").replace("∅", r"\emptyset")
    text = text.replace("≥", ">=").replace("×", "*").replace("·", "*")
    text = text.replace("∞", r"\infty ").replace("∪", r"\cup ").replace("∈", r"\in ").replace("{,}", ",")
    text = re.sub(r"√\s*(\w+)", r"\\sqrt{\1}", text).replace("√", r"\sqrt")
    text = re.sub(r"\\[!,;:]|\\left(?![a-z])|\\right(?![a-z])|\\(?:q?quad|displaystyle)(?![a-z])", "", text)
    text = re.sub(r"^\s*(?:US)?\\?[$€£¥₹]\s*(?=[-\d.])|(?<=\d)\s*\\?[$€£¥₹¢]\s*$", "", text)
    text = re.sub(r"(?<=\d)\s*\^?\{?(?:st|nd|rd|th)\}?(?=[.\s]*$)", "", text)
    text = re.sub(r"(?<=\d)\s*percent$", "%", text.rstrip(". ").strip())
    return re.sub(r"^([-+]?\d+) and (?:a|one) half$", r"\1 1/2", text)


def _unwrapped(text: str) -> str:
    """The answer without a box, and without delimiters of LaTeX around it."""
    text = text.strip().rpartition("####")[2].strip()
    boxed = last_boxed(text)
    text = (boxed if boxed is not None else text).strip()
    for left, right in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), *_QUOTES):
        if text.startswith(left) and text.endswith(right) and len(text) >= len(left) + len(right):
            text = text[len(left) : len(text) - len(right)].strip()
    return text


def _squeezed(text: str) -> str:
    """The text without blanks, except between digits of two numbers: groups of three digits are one number, `1 000`."""
    text = re.sub(r"(?<=\d) (?=\d{3}(?![\d/]))", "", " ".join(text.split()))
    return re.sub(r"(?<!\d) | (?!\d)", "", _cased(text))


def _cased(text: str) -> str:
    """The text in lower case, except commands and letters that a formula has in both cases: R - r is not 0."""
    if not _FORMULA.search(text):
        return text.casefold()
    kept = _capitals(text)
    return re.sub(
        r"\\[a-zA-Z]+|[^\W\d_]+", lambda m: m[0] if m[0][0] == "\\" or m[0] in kept else m[0].casefold(), text
    )


def _capitals(text: str) -> set[str]:
    r"""Capitals that a formula has in lower case, too: R beside r, `\Delta` beside `\delta`."""
    found = set(_SYMBOL.findall(text))
    return {symbol for symbol in found if symbol.lower() in found - {symbol}}


def _in_one_case(*texts: str) -> list[str]:
    """Formulas in which capitals that differ in meaning from their lower case are replaced by letters that no formula
    has, since math-verify reads both cases as one. A letter that each formula has in only one case is left as it is."""
    together = " ".join(texts)
    capitals = {symbol for symbol in _capitals(together) if symbol[0] == "\\"}.union(*map(_capitals, texts))
    used = {symbol.lower() for symbol in _SYMBOL.findall(together)}
    new = dict(zip(sorted(capitals), (letter for letter in _FREE if letter not in used), strict=False))
    return [_SYMBOL.sub(lambda found: new.get(found[0], found[0]), text) for text in texts]


def _alone(text: str) -> str:
    """The number in an answer that names it, as in `x = 5` and `12 + 34 = 46`, or has brackets around it."""
    *before, last = _SAID_EQUAL.split(text)  # what comes first may be named anything: `f(x) = 2 + 3 = 5`
    first = re.sub(r"\([^()]*\)", "", "".join(before[:1]))
    if not any(map(_OTHER_NAME.search, before[1:])) and not _SEVERAL.search(first):
        text = last.strip()
    wrapped = _WRAPPED.fullmatch(text)
    return wrapped[1] if wrapped else text


def _in_base(text: str) -> str:
    """A number in another base than ten, such as `101_2`; "" for everything else."""
    based = _BASED.fullmatch(text)
    base = int(based[2]) if based and len(based[2]) < 3 else 0
    if not based or not 2 <= base <= 36 or base == 10:
        return ""
    digits = based[1].casefold()
    return f"{digits}_{base}" if all(int(digit, 36) < base for digit in digits) else ""


def _values(text: str) -> list[Fraction]:
    """The number that a text is; for a percentage, the number and a hundredth of it; empty where it is none."""
    if len(text) > MAX_DIGITS:
        return []
    text = re.sub(r"\s*([/{}%])\s*", r"\1", " ".join(text.split()))
    text = re.sub(r"^\(?([^()]*?)\)?_\{?10\}?$", r"\1", text)
    text = _FRACTION.sub(r"\1\2/\3\4", re.sub(r"(?<=\d)(?=\\[cdt]?frac)", " ", text))
    while signed := _SIGNED.fullmatch(text):
        text = signed[1] + (signed[4][1:] if signed[4] else signed[2] or signed[3] or "")
    if (mixed := _MIXED.fullmatch(text)) and int(mixed[4]):
        return [(int(mixed[2]) + Fraction(int(mixed[3]), int(mixed[4]))) * (-1 if mixed[1] == "-" else 1)]
    if scientific := _SCIENTIFIC.fullmatch(text):
        return [Fraction(scientific[1].replace(",", "")) * Fraction(10) ** int(scientific[2] or scientific[3])]
    plain = _PLAIN_NUMBER.fullmatch(text)
    if plain is None:
        return []
    sign, digits, denominator, percent = plain.groups()
    if denominator is not None and int(denominator) == 0:
        return []
    value = Fraction(digits.replace(",", "")) / int(denominator or 1) * (-1 if sign == "-" else 1)
    return [value, value / 100] if percent else [value]


def _same(a: Fraction, b: Fraction, rounded: bool) -> bool:
    """Equal; rounded ones to six decimals and also to half a per cent: else every small number would equal 0."""
    off = abs(a - b)
    return off == 0 or (rounded and off <= min(Fraction(1, 2 * 10**DECIMALS), max(abs(a), abs(b)) / 200))


def _explodes(text: str) -> bool:
    """True if reading the plain formulas in a text could take for ever: unlike LaTeX, those are computed as read."""
    if re.search(r"!\s*[)}]*\s*!|(?:\^|\*\*)[^,;=]{0,40}!|\d{31}", text):
        return True
    if any(int(n) > MAX_EXPONENT for n in re.findall(r"(?:\^|\*\*)\s*[{(]?\s*[-+]?(\d+)", text)):
        return True
    if any(int(n) > MAX_FACTORIAL for n in re.findall(r"(\d+)\s*[)}]?\s*!", text)):
        return True
    nested = re.search(r"(?:\^|\*\*)\s*[{(][^})]{0,40}(?:\^|\*\*)|(?:\^|\*\*)\s*\w+\s*(?:\^|\*\*)", text)
    return bool(nested) and any(int(n) > 3 for n in re.findall(r"\d+", text))


def _as_interval(text: str) -> str:
    """Chains of inequalities about one variable as the intervals of its solutions; other texts as they are."""
    parts = [_as_interval(part) for part in text.split(" or ")] if " or " in text else []
    if parts and all(map(_INTERVAL.fullmatch, parts)):
        return r"\cup ".join(parts)
    text = re.sub(r"^\s*[a-zA-Z]\s*\\in(?![a-z])", "", text)
    plain = "".join(text.split()).replace(r"\leq", "<=").replace(r"\le", "<=").replace(r"\geq", ">=")
    plain = plain.replace(r"\ge", ">=").replace(r"\lt", "<").replace(r"\gt", ">")
    mirrored = "".join(_MIRRORED.get(part, part) for part in reversed(_RELATION.split(plain)))  # `x>3` for `3<x`
    if chain := _CHAIN.fullmatch(plain) or _CHAIN.fullmatch(mirrored):
        low, left, _, right, high = chain.groups()
        return f"{'[' if left == '<=' else '('}{low},{high}{']' if right == '<=' else ')'}"
    if bound := _ONE_SIDED.fullmatch(plain) or _ONE_SIDED.fullmatch(mirrored):
        _, relation, value = bound.groups()
        if relation.startswith("<"):
            return rf"(-\infty,{value}{']' if '=' in relation else ')'}"
        return rf"{'[' if '=' in relation else '('}{value},\infty)"
    return text


def _latex(text: str) -> str:
    """A formula as LaTeX: the notation of programs and calculators (`sqrt(2)`, `**`, `pi`) becomes commands."""
    text = _SHORT_FRACTION.sub(lambda m: rf"\frac{{{m[1].strip('{}')}}}{{{m[2].strip('{}')}}}", text)
    text = _braced(text.replace("**", "^"), "^")
    text = _right_associative(text)
    text = _braced(re.sub(r"(?<![\\a-zA-Z])sqrt\s*(?=\()", r"\\sqrt", text), r"\sqrt")
    text = re.sub(rf"(?<![\\a-zA-Z])({_FUNCTIONS})(?![a-zA-Z])", r"\\\1", text)
    text = re.sub(r"(?<![\\a-zA-Z])(pi|infty|infinity|oo|inf)(?![a-zA-Z])", _constant, text)
    text = re.sub(r"(?<=\d)\s*\*\s*(?=\d)", r" \\cdot ", text)
    text = text.replace("*", " ").replace("<=", r"\le ").replace(">=", r"\ge ").replace("%", r"\%")
    return re.sub(r"^\s*(\{?)\s*|\s+$", r"\1", text)


def _right_associative(text: str) -> str:
    """`2^3^4` as `2^{3^4}`, innermost power first, as Python reads it; LaTeX has no such form."""
    upper: list[str] = []  # the powers that were put in braces; a private-use character stands for each meanwhile
    while len(upper) < MAX_TOWER and (found := _TOWER.search(text)):
        text = f"{text[: found.start()]}^{chr(0xE000 + len(upper))}{text[found.end() :]}"
        upper.append(f"{{{found[1]}^{found[2]}}}")
    for number in reversed(range(len(upper))):
        text = text.replace(chr(0xE000 + number), upper[number])
    return text


def _constant(match: re.Match[str]) -> str:
    return r"\pi " if match.group(1) == "pi" else r"\infty "


def _braced(text: str, after: str) -> str:
    """Turn parentheses that follow `after` into braces, as LaTeX has them there."""
    place = text.find(after + "(")
    while place >= 0:
        start, depth = place + len(after), 0
        for end in range(start, len(text)):
            depth += (text[end] == "(") - (text[end] == ")")
            if depth == 0:
                text = f"{text[:start]}{{{text[start + 1 : end]}}}{text[end + 1 :]}"
                break
        place = text.find(after + "(", place + len(after))
    return text
