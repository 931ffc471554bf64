"""Short answers to questions: exact match and token F1 after normalisation.

Normalisation and both scores are those of the SQuAD evaluation (Rajpurkar et al. 2016, arXiv 1606.05250). Several gold
answers may be given; the best one counts.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_AUGMENTED_SHARE = 0.3


def normalise_answer(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles, words one space apart."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> bool:
    """True if the prediction equals one of the gold answers, both normalised. An empty prediction never does."""
    said = normalise_answer(prediction)
    return bool(said) and any(said == normalise_answer(answer) for answer in answers)


def f1_score(prediction: str, answers: Sequence[str], *, unique: bool = False) -> float:
    """Harmonic mean of precision and recall over words, of the best gold answer; 0 where there is none.

    Args:
        unique: count each word once, as ASearcher does; SQuAD counts repetitions. Words are normalised alike in both.
    """
    return max((_f1(prediction, answer, unique) for answer in answers), default=0.0)


def augmented_f1(prediction: str, answers: Sequence[str], augmented: Sequence[str]) -> float:
    """ASearcher's score where rewordings of the gold answers are known: 0.7 f + 0.3 max(f, f of the rewordings)."""
    score = f1_score(prediction, answers, unique=True)
    best = max(score, f1_score(prediction, augmented, unique=True))
    return (1 - _AUGMENTED_SHARE) * score + _AUGMENTED_SHARE * best


def last_answer(text: str) -> str | None:
    """Contents of the last `<answer>` pair in a text, None where there is none."""
    found = _ANSWER.findall(text)
    return found[-1].strip() if found else None


def _f1(prediction: str, answer: str, unique: bool) -> float:
    said, gold = Counter(normalise_answer(prediction).split()), Counter(normalise_answer(answer).split())
    if unique:
        said, gold = Counter(set(said)), Counter(set(gold))
    common = (said & gold).total()
    return 2 * common / (said.total() + gold.total()) if common else 0.0
