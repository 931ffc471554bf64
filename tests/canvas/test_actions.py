import re

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from flowjax.canvas.actions import (
    Action,
    Add,
    Delete,
    Finish,
    Modify,
    SetPrompt,
    Unreadable,
    apply,
    parse,
    parse_compact,
    show,
    show_compact,
)
from flowjax.canvas.edits import EditError
from flowjax.canvas.graph import Call, Conditional, Loop, Parallel, Sequence, Workflow
from flowjax.canvas.text import parse as workflow
from flowjax.canvas.text import show as text_of
from tests.canvas.graphs import LIBRARY, NODES

A, B = Call("A"), Call("B")


def tagged(**tags: str) -> str:
    return "".join(f"<{tag.rstrip('_')}>{value}</{tag.rstrip('_')}>" for tag, value in tags.items())


ADD = tagged(action="add", operator="Custom")

# what each form means, and how it is written
FORMS: list[tuple[str, Action]] = [
    (ADD, Add(Call("Custom"))),
    (
        tagged(action="add", operator="A", backend="small", into="n3", position="0", prompt="if x &lt; 3 &amp; y"),
        Add(Call("A", "if x < 3 & y", "small"), "n3", 0),
    ),
    (tagged(action="add", structure="parallel", operators="A, B"), Add(Parallel((A, B)))),
    (
        tagged(action="add", structure="parallel", operators="A, B", into="n4.false", prompt="one", prompt_="two"),
        Add(Parallel((Call("A", "one"), Call("B", "two"))), "n4.false"),
    ),
    (
        tagged(action="add", structure="conditional", condition="A", true="done", false="B"),
        Add(Conditional(A, None, B)),
    ),
    (
        tagged(action="add", structure="conditional", condition="A", true="B", false="done", prompt="x", prompt_="y"),
        Add(Conditional(Call("A", "x"), Call("B", "y"), None)),
    ),
    (tagged(action="add", structure="loop", operators="A", count="10"), Add(Loop(A, 10))),
    (tagged(action="add", structure="loop", operators="A, B", count="2"), Add(Loop(Sequence((A, B)), 2))),
    (
        tagged(action="add", workflow='[A, (B) * 2] -> A{"x &lt; y"}', position="1"),
        Add(Sequence((Parallel((A, Loop(B, 2))), Call("A", "x < y"))), "", 1),
    ),
    (tagged(action="delete", target="n3"), Delete("n3")),
    (
        tagged(action="modify", target="n3", operator="A", backend="small", prompt="go"),
        Modify("n3", "A", "small", prompt="go"),
    ),
    (tagged(action="modify", target="n3", backend="gpt-4.1"), Modify("n3", backend="gpt-4.1")),
    (tagged(action="modify", target="n3", count="4"), Modify("n3", count=4)),
    (tagged(action="set_prompt", target="n3", prompt="line\nline"), SetPrompt("n3", "line\nline")),
    (tagged(action="finish"), Finish()),
    (tagged(action="finish", answer="a < b"), Finish("a < b")),
]


@pytest.mark.parametrize(("text", "action"), FORMS)
def test_every_form_is_read_and_written(text: str, action: Action):
    assert parse(text) == action
    assert parse(show(action)) == action
    assert parse("<think>\nI could <action>finish</action>.\n</think>\n\n" + text + "\n") == action
    assert parse("I add a step.\n" + text.replace("><", ">\n  <")) == action


def test_what_may_be_left_out():
    assert parse(tagged(action="add", structure="conditional", condition="A", true="B")) == Add(Conditional(A, B, None))
    assert parse(tagged(action="add", structure="loop", operators="A")) == Add(Loop(A, 3))
    assert parse("thought that the template had opened</think>" + ADD) == Add(Call("Custom"))
    assert parse(f"<think>so</think>Hm. <think>or {ADD}?</think>{ADD}") == Add(Call("Custom"))


PLACES = st.sampled_from(("", "n3", "n12.true"))
WORDS = st.text(max_size=30).map(str.strip)
ACTIONS = st.one_of(
    st.builds(Add, NODES, PLACES, st.none() | st.integers(0, 999)),
    st.builds(Delete, st.just("n7")),
    st.builds(Modify, st.just("n7"), st.just("Custom"), st.sampled_from(("", "small")), prompt=WORDS),
    st.builds(SetPrompt, st.just("n7"), WORDS.filter(bool)),
    st.builds(Finish, WORDS),
)


@given(ACTIONS)
@settings(max_examples=300)
def test_round_trip(action: Action):
    well_written = parse(show(action))
    if isinstance(well_written, Unreadable):  # counts out of bounds can be shown, for they are only checked later
        assert "<count>" in well_written.reason
    else:
        assert well_written == stripped(action)


def stripped(action: Action) -> Action:
    """Space around a call's own instruction is not kept by tags."""
    match action:
        case Add(piece, into, position):
            again = parse(show(action))
            assert isinstance(again, Add)
            assert [line.strip() for line in _instructions(piece)] == [
                line.strip() for line in _instructions(again.piece)
            ]
            return Add(again.piece, into, position)
    return action


def _instructions(piece) -> list[str]:
    return [call.instruction for call in Workflow(Sequence((piece,))).calls()]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "response is empty: write one action"),
        ("I plan", "There is no action: write exactly one"),
        ("<think>still thinking", "close it with `</think>`"),
        ("<think>so</think>Hm. <think>perhaps " + ADD, "close it with `</think>`"),
        ("<think>so</think>\n", "Nothing comes after the thinking: write one action after `</think>`."),
        (ADD + "<think>was that right?</think>", "Nothing comes after the thinking"),
        ("[action]add[/action][operator]A[/operator]", "angle brackets, not square ones"),
        ("<ACTION>ADD</ACTION>", "lower case"),
        (ADD + ADD, "several actions: write exactly one"),
        (ADD + " Done.", "Nothing may come after the action: end with `</operator>`, without `Done.`"),
        ("```\n" + ADD + "\n```", "without `\u0060\u0060\u0060`"),
        ("<operator>A</operator>" + tagged(action="add"), "`<operator>` stands before `<action>`"),
        ("<action>add<operator>A</operator>", "`<action>` is not closed: write `</action>` before `</operator>"),
        ("<action>add</action><operator>A", "`<operator>` is not closed: write `</operator>`."),
        (tagged(action="ad"), "no action `ad`: use add, delete, modify, set_prompt or finish"),
        (tagged(action="parallel"), "no action `parallel`"),
        (tagged(action="add"), "`add` needs `<structure>`, `<workflow>` or `<operator>`"),
        (tagged(action="add", opertor="A"), "no tag `<opertor>`: did you mean `<operator>`?"),
        (tagged(action="add", operator="A", count="2"), "`<count>` is one too many or in the wrong place: write"),
        (tagged(action="add", operator="A", position="0", into="n3"), "`<into>` is one too many or in the wrong place"),
        (tagged(action="add", operator="A", prompt="a", prompt_="b"), "`<prompt>` is one too many"),
        (tagged(action="add", operator="A -> B"), "`<operator>` takes one operator's name, not `A -> B`"),
        (tagged(action="add", operator="A", prompt=" "), "`<prompt>` takes an instruction"),
        (tagged(action="add", operator="A", position="-1"), "`<position>` takes a number from 0 to 999, not `-1`"),
        (tagged(action="add", operator="A", into="n3.then"), "or n3.true of a conditional"),
        (tagged(action="add", operator="A", backend="a b"), "`<backend>` takes a backend's name"),
        (tagged(action="add", structure="parallel"), "`<operators>` is missing: write"),
        (tagged(action="add", structure="parallel", operators="A B"), "with commas between them"),
        (tagged(action="add", structure="parallel", operators="A, B", prompt="x"), "1 `<prompt>` for 2 operators (A"),
        (tagged(action="add", structure="conditional", condition="[A]", true="B"), "is written as `<workflow>`"),
        (tagged(action="add", structure="loop", operators="A", count="99"), "a number from 1 to 10, not `99`"),
        (tagged(action="add", workflow="A -> "), "In `<workflow>`: Character 5, at the end"),
        (tagged(action="delete"), "`<target>` is missing: write `<action>delete</action><target>...</target>`"),
        (tagged(action="delete", target="the last"), "a node's id, such as n3, not `the last`"),
        (tagged(action="modify", target="n1"), "`modify` needs `<operator>`, `<backend>` or `<count>`"),
        (tagged(action="set_prompt", prompt="go"), "`<target>` is missing where `<prompt>` stands"),
        (tagged(action="finish", answer="a <"), "ends with `<`"),
    ],
)  # fmt: skip
def test_what_is_unreadable_says_what_would_be_right(text: str, says: str):
    result = parse(text)
    assert isinstance(result, Unreadable)
    assert says in result.reason


def test_sequence_is_no_structure():
    """Defect: `structure=sequence` was answered with "no operator tag"."""
    result = parse(tagged(action="add", structure="sequence", operators="A, B"))
    assert isinstance(result, Unreadable)
    assert "no structure `sequence`: use parallel, conditional or loop" in result.reason
    assert "<workflow>A -> B</workflow>" in result.reason


def done(text: str, start: str = "") -> str:
    action = parse(text)
    assert not isinstance(action, Unreadable), action.reason
    return text_of(apply(action, workflow(start), LIBRARY, ("small",)))


def test_actions_are_carried_out():
    assert done(ADD, "Plan") == "Plan -> Custom"
    assert done(tagged(action="delete", target="n2"), "Plan -> Custom") == "Plan"
    assert done(tagged(action="finish"), "Plan") == "Plan"
    assert done(tagged(action="modify", target="n1", backend="small"), "Plan") == "Plan@small"
    assert done(tagged(action="modify", target="n1", count="4"), "(Revise) * 2") == "(Revise) * 4"
    assert done(tagged(action="set_prompt", target="n2", prompt="go"), "[Plan, Plan]") == '[Plan{"go"}, Plan]'


def test_an_inline_prompt_is_the_instruction():
    """Defect: a prompt inside `add` was parsed and ignored."""
    assert done(tagged(action="add", operator="Custom", prompt="Be brief.")) == 'Custom{"Be brief."}'
    structure = tagged(action="add", structure="loop", operators="Review, Revise", prompt="look", prompt_="mend")
    assert done(structure) == '(Review{"look"} -> Revise{"mend"}) * 3'
    assert done(tagged(action="modify", target="n1", operator="Plan", prompt="go"), "Custom") == 'Plan{"go"}'


def test_workflows_are_added_nested_and_anywhere():
    """Defect: the graph had two levels, so that a structure could hold operators only."""
    piece = "[Custom -> (Verify ? done : Revise), (Programmer -> [Test, Review]) * 2] -> ScEnsemble"
    edited = done(tagged(action="add", workflow=piece, into="n2.false"), "Custom -> (Verify ? done : Revise)")
    assert edited == f"Custom -> (Verify ? done : (Revise -> {piece}))"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (tagged(action="add", operator="programmer"), "no operator `programmer`. Did you mean `Programmer`?"),
        (tagged(action="modify", target="n1", operator="verify"), "no operator `verify`. Did you mean `Verify`?"),
        (tagged(action="add", structure="conditional", condition="Verify", true="Done"), "no operator `Done`"),
        (tagged(action="modify", target="n2", operator="Custom"), "n2 `[Custom, Plan]` is a parallel, no operator"),
        (tagged(action="modify", target="n5", operator="Custom"), "is a conditional, no operator"),
        (tagged(action="modify", target="n8", operator="Custom"), "is a loop, no operator"),
        (tagged(action="modify", target="n3", operator="ScEnsemble"), "n3 `ScEnsemble` is a branch"),
        (tagged(action="add", operator="Custom", backend="large"), "no backend `large`. There are: small."),
        (tagged(action="add", workflow="[Custom, Plan] -> (Verify) * 20"), "1 to 10 times, not 20"),
        (tagged(action="add", structure="parallel", operators="Plan"), "needs two branches or more"),
    ],
)
def test_bad_edits_are_refused_at_once(text: str, says: str):
    """Defect: unknown or wrong-case names, and modifying a structure, led to a state that no input could leave."""
    action = parse(text)
    assert not isinstance(action, Unreadable)
    with pytest.raises(EditError, match=re.escape(says)):
        apply(
            action,
            workflow("Custom -> [Custom, Plan] -> (Verify ? done : Revise) -> (Revise) * 2"),
            LIBRARY,
            ("small",),
        )


def test_faults_that_were_there_before_do_not_stop_an_edit():
    broken = workflow("gone -> Custom")
    assert text_of(apply(Add(Call("Verify")), broken, LIBRARY)) == "gone -> Custom -> Verify"


COMPACT: list[tuple[str, Action]] = [
    ("add Custom", Add(Call("Custom"))),
    ("add [ Custom , Custom ]", Add(Parallel((Call("Custom"), Call("Custom"))))),
    ("add Verify ? done : Revise", Add(Conditional(Call("Verify"), None, Call("Revise")))),
    ("add ( Review -> Revise ) * 2", Add(Loop(Sequence((Call("Review"), Call("Revise"))), 2))),
    ("add Custom at 0", Add(Call("Custom"), "", 0)),
    ("add Custom into n4.true at 12", Add(Call("Custom"), "n4.true", 12)),
    ('add Custom {"go into n3 at 0"}', Add(Call("Custom", "go into n3 at 0"))),
    ("delete n3", Delete("n3")),
    ("modify n2 Programmer", Modify("n2", "Programmer")),
    ('modify n2 Programmer{"go"}@small', Modify("n2", "Programmer", "small", prompt="go")),
    ("modify n2 @small", Modify("n2", backend="small")),
    ("modify n2 * 3", Modify("n2", count=3)),
    ("prompt n2 Name the units.", SetPrompt("n2", "Name the units.")),
    ("finish", Finish()),
    ("finish 42 apples", Finish("42 apples")),
]


@pytest.mark.parametrize(("line", "action"), COMPACT)
def test_compact_form(line: str, action: Action):
    assert parse_compact(line) == action
    assert parse_compact(f"<think>add Plan</think>\n{line}\n") == action
    assert parse_compact(show_compact(action)) == action
    assert parse_compact(show_compact(action, spaced=True)) == action


def test_compact_form_with_a_word_for_every_sign():
    piece = Sequence((Parallel((Call("Custom"), Call("Plan"))), Loop(Call("Revise"), 2)))
    assert show_compact(Add(piece, "n3"), spaced=True) == "add [ Custom , Plan ] -> ( Revise ) * 2 into n3"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "The response is empty: start with add, delete"),
        ("ad Custom", "no action `ad`: did you mean `add`?"),
        ("zzz", "no action `zzz`: start with add, delete, modify, prompt or finish"),
        ("add", "nothing to add"),
        ("add [ Custom", "expected `->` or `,` or `]`"),
        ("add Custom at first", "`at` takes a number from 0 to 999, not `first`"),
        ("add Custom into n3.left", "`into` takes a node's id, such as n3, or n3.true, not `n3.left`"),
        ("delete", "`delete` takes a node's id, such as n3, not ``"),
        ("delete n1 n2", "not `n1 n2`"),
        ("modify n2", "`modify` takes a node's id and an operator"),
        ("modify n2 A -> B", "`modify` takes a node's id and an operator"),
        ("prompt n2", "and an instruction"),
        ("add Custom\nfinish", "one action on one line"),
    ],
)
def test_compact_lines_that_are_unreadable(line: str, says: str):
    result = parse_compact(line)
    assert isinstance(result, Unreadable)
    assert says in result.reason
