"""Random workflows, as few nodes as their meaning takes, for the tests of what reads and writes them."""

import hypothesis.strategies as st

from flowjax.canvas.graph import Call, Conditional, Loop, Node, Parallel, Sequence, Workflow

OPERATORS = ("Custom", "Programmer", "Verify", "Revise", "Review", "Plan")
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
BINDINGS = st.tuples(st.sampled_from(("answer", "feedback")), st.sampled_from(("n1.answer", "n2.code", "x.y")))
CALLS = st.builds(
    Call,
    st.sampled_from(OPERATORS),
    TEXTS,
    TEXTS | st.sampled_from(("small", "gpt-4.1-mini", "a/b")),
    st.lists(BINDINGS, max_size=2).map(tuple),
)


def _structures(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    def dissolved(steps: list[Node]) -> Sequence:
        flat = [step for node in steps for step in (node.steps if isinstance(node, Sequence) else (node,))]
        return Sequence(tuple(flat))

    branch = st.none() | inner
    return st.one_of(
        st.lists(inner, min_size=2, max_size=3).map(dissolved),
        st.lists(inner, min_size=1, max_size=3).map(lambda branches: Parallel(tuple(branches))),
        st.builds(Conditional, inner, branch, branch),
        st.builds(Loop, inner, st.integers(0, 12)),
    )


NODES = st.recursive(CALLS, _structures, max_leaves=12)
WORKFLOWS = st.lists(NODES.filter(lambda node: not isinstance(node, Sequence)), max_size=4).map(
    lambda steps: Workflow(Sequence(tuple(steps))).numbered()
)
