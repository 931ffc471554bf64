"""Answers in replies: finding them, scoring short ones by exact match and word F1, and the option of multiple choice.

Normalisation and both scores of short answers are those of the SQuAD evaluation (Rajpurkar et al. 2016, arXiv
1606.05250), except that "yes" and "no" get no partial score, as in HotpotQA's (Yang et al. 2018, arXiv 1809.09600).
Several gold answers may be given; the best one counts.
"""

import itertools
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
# The contents may not have another `<answer>`, so that the search takes linear time.
_PAIR = r"<answer>((?:(?!<answer>).)*?)</answer>"
_ANSWER = re.compile(_PAIR, re.DOTALL | re.IGNORECASE)
_AUGMENTED_SHARE = 0.3
_WHOLE = ("yes", "no", "noanswer")
MAX_OPEN_BOXES = 16  # boxes without an end that are tried before the search is given up
_BOX, _BRACE = re.compile(r"\\boxed\s*\{"), re.compile(r"\\.|[{}]", re.DOTALL)  # `\{` is no brace


def without_thoughts(reply: str) -> str:
    """A reply without the model's thoughts before it; "" where a `<think>` has no end."""
    after = reply.rpartition("</think>")[2]
    return "" if "<think>" in after else after.strip()


def between_tags(text: str, tag: str) -> str | None:
    """Contents of the last pair of tags, in any case; the whole text where it has no tag, None where it has no pair."""
    # The last pair: reasoning before it may mention the tags, or consider other actions in them.
    tags = list(re.finditer(rf"<(/?){tag}>", text, re.IGNORECASE))
    if not tags:
        return text
    pairs = (text[a.end() : b.start()] for b, a in itertools.pairwise(reversed(tags)) if b[1] and not a[1])
    return next(pairs, None)


def last_boxed(text: str) -> str | None:
    r"""Contents of the last complete `\boxed{...}`, braces inside it balanced; None where there is none."""
    end = len(text)
    for _ in range(MAX_OPEN_BOXES):
        if (start := text.rfind("\\boxed", 0, end)) < 0:
            break
        if opening := _BOX.match(text, start):
            depth = 1
            for brace in _BRACE.finditer(text, opening.end()):
                depth += (brace[0] == "{") - (brace[0] == "}")
                if depth == 0:
                    return text[opening.end() : brace.start()].strip()
        end = start
    return None


def normalise_answer(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles, words one space apart."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> bool:
    """True if the prediction equals one of the gold answers, both normalised; never for an empty prediction."""
    said = normalise_answer(prediction)
    return bool(said) and any(said == normalise_answer(answer) for answer in answers)


def f1_score(prediction: str, answers: Sequence[str], *, unique: bool = False) -> float:
    """Harmonic mean of precision and recall over words, for the best gold answer; 0 where there is none.

    Args:
        unique: count each word once, as ASearcher does; SQuAD counts repetitions. Words are normalised alike in both.
    """
    return max((_f1(prediction, answer, unique) for answer in answers), default=0.0)


def augmented_f1(prediction: str, answers: Sequence[str], augmented: Sequence[str]) -> float:
    """ASearcher's score with rewordings of the gold answers: 0.7 f + 0.3 max(f, g), f the F1 of the gold answers and g
    that of the rewordings, both over distinct words."""
    score = f1_score(prediction, answers, unique=True)
    best = max(score, f1_score(prediction, augmented, unique=True))
    return (1 - _AUGMENTED_SHARE) * score + _AUGMENTED_SHARE * best


def last_answer(text: str) -> str | None:
    """Contents of the last `<answer>` pair in a text, None where there is none."""
    found = _ANSWER.findall(text)
    return found[-1].strip() if found else None


def _f1(prediction: str, answer: str, unique: bool) -> float:
    texts = normalise_answer(prediction), normalise_answer(answer)
    if texts[0] != texts[1] and not set(texts).isdisjoint(_WHOLE):  # else "yes no" gets 2/3, whichever is right
        return 0.0
    said, gold = (Counter(text.split()) for text in texts)
    if unique:
        said, gold = Counter(set(said)), Counter(set(gold))
    common = (said & gold).total()
    return 2 * common / (said.total() + gold.total()) if common else 0.0


# An option begins its line, or follows another on the same line: "A. wood", "(B) stone", "C) iron", "D: clay".
_OPTION = re.compile(r"(?:^|(?<=\s))(?:\(([A-J])\)|([A-J])[.):])\s+(?=\S)", re.MULTILINE)
_GOES_ON = "and|as|because|but|by|for|given|if|is|it|not|or|over|since|so|then|which|with"
_LETTER = (
    r"(?:option |choice )?[*(\[{\"'$]*([A-J])(?![\w'])"
    # Bare, and before a word that does not go on about the option, A is an article and I a pronoun: "Answer: A cat".
    rf"(?!(?<=[AI])(?<!option .)(?<!choice .) (?!(?:{_GOES_ON})\b)(?-i:[a-z]))"
)
# The first of these forms that a reply has counts. The reply's blanks have been reduced to single spaces.
_DECLARED = (
    re.compile(rf"answer ?(?:is)? ?[:=]? ?(?:I think )?{_LETTER}", re.IGNORECASE),
    re.compile(rf"(?:choose|pick|select|think|(?:choice|option) ?(?:is|[:=])) ?{_LETTER}", re.IGNORECASE),
    re.compile(rf"(?=option|choice){_LETTER}[)\]}}\"'*$]* is (?:the )?(?:correct|right|best)", re.IGNORECASE),
)
_ALONE = re.compile(r"(?:[Oo]ption|[Cc]hoice)?[*(\[{\"'$\s]*(?:\\(?:text|math)\w*\{)?\(?([A-Ja-j])[)\]}.:\"'*$\s]*")
_ARTICLE = re.compile(r"(?:an?|the) ")
_LEADING = re.compile(r"(?:[Oo]ption |[Cc]hoice )?[*(\[]*([A-J])(?:[.;:)\]*]+|,?(?= because| since)) \S")


def options_of(question: str) -> dict[str, str]:
    """Letter -> text of the options that a question lists, empty where it lists none.

    Options are A, B and so on without a gap, each followed by a full stop, a colon or a closing parenthesis and then by
    text; the first begins a line, or follows a question mark, colon or other punctuation. One option alone, as in f(a)
    or "plan a.", does not count.
    """
    found: list[re.Match[str]] = []
    for match in _OPTION.finditer(question):
        letter = match.group(1) or match.group(2)
        if letter == "A" and _begins_list(question, match.start()):
            found = [match]
        elif found and letter == chr(ord("A") + len(found)):
            found.append(match)
    if len(found) < 2:
        return {}
    ends = [match.start() for match in found[1:]] + [len(question)]
    texts = [question[match.end() : end].strip(" \t\n;,") for match, end in zip(found, ends, strict=True)]
    return {chr(ord("A") + i): text for i, text in enumerate(texts)}


def _begins_list(question: str, start: int) -> bool:
    before = question[:start].rstrip(" \t")
    return not before or before[-1] in "\n?:.;,"


def chosen(reply: str, options: Mapping[str, str]) -> str | None:
    r"""The letter that a reply chooses, None where it names none or none that is offered.

    The reply is the last `\boxed{}` or else `<answer>` pair, or else all of it. It names a letter, in this order: by
    being one; by its last "answer is X", or else its last "I choose X", "choice: X" or "option X is correct", of the
    offered letters; by beginning with one as options do, or with one and a reason; by being the text of exactly one
    option, apart from an article before it. Letters in words, and articles, do not count.
    """
    marked = (last_boxed(reply), last_answer(reply), reply)
    reply = " ".join(next(text for text in marked if text is not None).split())
    alone = _ALONE.fullmatch(reply)
    said = ([match[1] for match in form.finditer(reply) if match[1] in options] for form in _DECLARED)
    declared = next(filter(None, said), [])
    leading = _LEADING.match(reply)
    if alone:
        letter = alone.group(1).upper()
    elif declared:
        letter = declared[-1]
    elif leading:
        letter = leading.group(1)
    else:
        same = _letters_of(_plain(reply), options) or _letters_of(_ARTICLE.sub("", _plain(reply)), options)
        letter = same[0] if len(same) == 1 else None
    return letter if letter in options else None


def right_choice(reply: str, gold: str, options: Mapping[str, str]) -> bool:
    """True if a reply chooses the gold option, which is given by its letter or its text."""
    right = chosen(gold, options)
    return right is not None and chosen(reply, options) == right


def _letters_of(words: str, options: Mapping[str, str]) -> list[str]:
    return [letter for letter, text in options.items() if _plain(text) == words]


def _plain(text: str) -> str:
    return " ".join(text.casefold().strip(" .\n\t\"'$").split())
