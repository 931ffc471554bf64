"""Porter's stemmer as Lucene runs it: the 1980 algorithm, with "bli" and "logi" in step 2 and short words left alone.

M. F. Porter, "An algorithm for suffix stripping", Program 14(3), 1980. The departures are those of the author's own
later code, which Lucene's PorterStemFilter follows: abli -> able became bli -> ble, logi -> log was added, and words of
one or two letters stay as they are.
"""

from functools import lru_cache
from itertools import pairwise

_VOWELS = frozenset("aeiou")
# Longest first among suffixes that end alike; only the first that fits is tried, whether or not its condition holds.
_STEP_2 = (
    ("ational", "ate"),
    ("tional", "tion"),
    ("enci", "ence"),
    ("anci", "ance"),
    ("izer", "ize"),
    ("bli", "ble"),
    ("alli", "al"),
    ("entli", "ent"),
    ("eli", "e"),
    ("ousli", "ous"),
    ("ization", "ize"),
    ("ation", "ate"),
    ("ator", "ate"),
    ("alism", "al"),
    ("iveness", "ive"),
    ("fulness", "ful"),
    ("ousness", "ous"),
    ("aliti", "al"),
    ("iviti", "ive"),
    ("biliti", "ble"),
    ("logi", "log"),
)
_STEP_3 = (
    ("icate", "ic"),
    ("ative", ""),
    ("alize", "al"),
    ("iciti", "ic"),
    ("ical", "ic"),
    ("ful", ""),
    ("ness", ""),
)
_STEP_4 = (
    *("al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent"),
    *("sion", "tion", "ou", "ism", "ate", "iti", "ous", "ive", "ize"),
)


@lru_cache(maxsize=1 << 16)
def stem(word: str) -> str:
    """The stem of a lower-case word. Characters that are no letters count as consonants."""
    if len(word) <= 2:
        return word
    word = _step_1(word)
    word = _replace(word, _STEP_2)
    word = _replace(word, _STEP_3)
    word = _step_4(word)
    return _step_5(word)


def _is_consonant(word: str, i: int) -> bool:
    if word[i] in _VOWELS:
        return False
    return not (word[i] == "y" and i > 0 and _is_consonant(word, i - 1))


def _measure(base: str) -> int:
    """How often a vowel is followed by a consonant."""
    kinds = [_is_consonant(base, i) for i in range(len(base))]
    return sum(after and not before for before, after in pairwise(kinds))


def _has_vowel(base: str) -> bool:
    return not all(_is_consonant(base, i) for i in range(len(base)))


def _ends_double(word: str) -> bool:
    return len(word) > 1 and word[-1] == word[-2] and _is_consonant(word, len(word) - 1)


def _ends_short(word: str) -> bool:
    """Consonant, vowel, consonant, the last not w, x or y."""
    last = len(word) - 1
    if last < 2 or word[-1] in "wxy" or not _is_consonant(word, last):
        return False
    return not _is_consonant(word, last - 1) and _is_consonant(word, last - 2)


def _step_1(word: str) -> str:
    if word.endswith(("sses", "ies")):
        word = word[:-2]
    elif word.endswith("s") and not word.endswith("ss"):
        word = word[:-1]
    if word.endswith("eed"):
        word = word[:-1] if _measure(word[:-3]) > 0 else word
    else:
        for suffix in ("ed", "ing"):
            if word.endswith(suffix):
                base = word[: -len(suffix)]
                word = _mend(base) if _has_vowel(base) else word
                break
    if word.endswith("y") and _has_vowel(word[:-1]):
        word = word[:-1] + "i"
    return word


def _mend(base: str) -> str:
    if base.endswith(("at", "bl", "iz")):
        return base + "e"
    if _ends_double(base):
        return base if base[-1] in "lsz" else base[:-1]
    return base + "e" if _measure(base) == 1 and _ends_short(base) else base


def _replace(word: str, rules: tuple[tuple[str, str], ...]) -> str:
    for suffix, replacement in rules:
        if word.endswith(suffix):
            base = word[: -len(suffix)]
            return base + replacement if _measure(base) > 0 else word
    return word


def _step_4(word: str) -> str:
    for suffix in _STEP_4:
        if word.endswith(suffix):
            base = word[: -len(suffix)]
            if suffix in ("sion", "tion"):
                base += suffix[0]
            return base if _measure(base) > 1 else word
    return word


def _step_5(word: str) -> str:
    if word.endswith("e"):
        base = word[:-1]
        measure = _measure(base)
        if measure > 1 or (measure == 1 and not _ends_short(base)):
            word = base
    if word.endswith("ll") and _measure(word) > 1:
        word = word[:-1]
    return word
