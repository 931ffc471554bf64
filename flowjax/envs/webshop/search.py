"""BM25 that ranks as Lucene under Anserini does: the same analysis, the same rounding, the same order of ties.

Scores are Lucene's BM25Similarity (Robertson and Zaragoza 2009, with the idf that is never negative), computed in
float32 with document lengths rounded to one byte. Tokens are those of the standard tokenizer for Latin text; each
ideograph is a token, and so is a run of katakana; emoji are not tokens.

The stemmer is Porter's as Lucene runs it: M. F. Porter, "An algorithm for suffix stripping", Program 14(3), 1980, with
the departures of the author's later code: abli -> able became bli -> ble, logi -> log was added, and words of one or
two letters stay as they are.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

_STOP_WORDS = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with"
)
STOP_WORDS = frozenset(_STOP_WORDS.split())
_K1, _B = 0.9, 0.4  # as Anserini sets them
MAX_TOKEN_CHARACTERS = 255  # longer ones are cut into pieces

# Word breaks of Unicode's annex 29: letters and digits hold together; a few marks join two letters or two digits.
_MARKS = "\u0300-\u036f\u200d\ufe00-\ufe0f"
_IDEOGRAPH = "\u3005-\u3007\u3040-\u309f\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_KATAKANA = "\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\uff66-\uff9d"
_CHARACTER = rf"[^\W{_IDEOGRAPH}{_KATAKANA}][{_MARKS}]*"
_LETTER = rf"[^\W\d_{_IDEOGRAPH}{_KATAKANA}]"
_WORD = rf"(?:{_CHARACTER}|(?<={_LETTER})[.:'’‘·](?={_LETTER})|(?<=\d)[.,;'’‘](?=\d))+"
_TOKEN = re.compile(rf"{_WORD}|[{_IDEOGRAPH}][{_MARKS}]*|(?:[{_KATAKANA}][{_MARKS}]*)+")


def tokens(text: str) -> list[str]:
    """Words, lower case, without possessive 's and stop words, stemmed."""
    found: list[str] = []
    for match in _TOKEN.finditer(text):
        whole = match[0]
        for start in range(0, len(whole), MAX_TOKEN_CHARACTERS):
            word = whole[start : start + MAX_TOKEN_CHARACTERS]
            if word.strip("_") == "":
                continue
            if len(word) >= 2 and word[-1] in "sS" and word[-2] in "'’＇":
                word = word[:-2]
            word = word.lower()
            if word not in STOP_WORDS:
                found.append(stem(word))
    return found


def query_key(query: str) -> str:
    """The sorted terms of a query: queries with the same key have the same results."""
    return " ".join(sorted(tokens(query)))


def rounded_length(length: int) -> int:
    """A document length as Lucene stores it in one byte: exact below 40, then three bits after the leading one."""
    exact = 24  # codes of the byte that Lucene's small float leaves free: they store lengths below 24 exactly
    if length < exact:
        return length
    rest = length - exact
    shift = max(rest.bit_length() - 4, 0)
    return exact + ((rest >> shift) << shift)


class LuceneIndex:
    """Postings of a list of documents. Equal scores are ordered by `ids`, as strings; without ids, by position."""

    def __init__(self, documents: Sequence[str], ids: Sequence[str] | None = None):
        self._size = len(documents)
        order = range(self._size) if ids is None else sorted(range(self._size), key=lambda i: ids[i])
        self._tie = np.empty(self._size, np.int64)
        self._tie[list(order)] = np.arange(self._size)
        postings: dict[str, tuple[list[int], list[int]]] = {}
        lengths = np.zeros(self._size, np.int64)
        for number, document in enumerate(documents):
            terms = tokens(document)
            lengths[number] = len(terms)
            for term, count in Counter(terms).items():
                where, counts = postings.setdefault(term, ([], []))
                where.append(number)
                counts.append(count)
        filled = int(np.count_nonzero(lengths))  # Lucene counts only documents with at least one term
        mean = np.float32(lengths.sum() / max(filled, 1))
        rounded = np.array([rounded_length(int(n)) for n in lengths], np.float32)
        one, k1, b = np.float32(1), np.float32(_K1), np.float32(_B)
        inverse_norm = one / (k1 * ((one - b) + b * rounded / mean)) if filled else rounded
        # term -> documents [hits], 1 + frequency / norm [hits] in float32, idf
        self._terms: dict[str, tuple[np.ndarray, np.ndarray, np.float32]] = {}
        for term, (where, counts) in postings.items():
            numbers = np.array(where)
            saturation = one + np.array(counts, np.float32) * inverse_norm[numbers]
            idf = np.float32(math.log(1 + (filled - len(where) + 0.5) / (len(where) + 0.5)))
            self._terms[term] = (numbers, saturation, idf)

    def search(self, query: str, limit: int = 50) -> list[int]:
        """Positions of the best documents, best first; none where no document shares a term."""
        return self.rank(tokens(query), limit)

    def rank(self, terms: Sequence[str], limit: int) -> list[int]:
        """As `search`, for terms that `tokens` made."""
        scores = np.zeros(self._size)
        for term, count in sorted(Counter(terms).items()):
            if term in self._terms:
                numbers, saturation, idf = self._terms[term]
                weight = np.float32(count) * idf
                # Equals weight * tf / (tf + norm), computed in Lucene's order, so that it rounds as Lucene does.
                scores[numbers] += weight - weight / saturation
        hits = np.flatnonzero(scores)
        rounded = scores[hits].astype(np.float32)
        best = np.lexsort((self._tie[hits], -rounded))[:limit]
        return hits[best].tolist()


_VOWELS = frozenset("aeiou")
# Of suffixes with a common end the longer is first: only the first that matches is tried, even if its condition fails.
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
    """Number of times that a vowel is followed by a consonant."""
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
            if suffix in ("sion", "tion"):  # "ion" goes only after s or t, which stays
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
