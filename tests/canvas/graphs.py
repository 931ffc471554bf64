"""Operators that only declare, and random workflows of as few nodes as their meaning takes."""

from collections.abc import Mapping

import hypothesis.strategies as st

from flowjax.canvas.graph import Call, Conditional, Loop, Node, Parallel, Sequence, Workflow
from flowjax.canvas.operators import Context, Operator, Role
from flowjax.canvas.values import Field, State, Value


def operator(name: str, role: Role, inputs: tuple[Field, ...], outputs: tuple[str, ...]) -> type[Operator]:
    """An operator that reads and writes as told, and does nothing."""

    class Declared(Operator):
        async def run(self, inputs: State, context: Context) -> Mapping[str, Value]:
            return {}

    Declared.name, Declared.role, Declared.description, Declared.instruction = name, role, f"{name} works", ""
    Declared.inputs = (Field("problem"), *inputs)
    Declared.outputs = tuple(Field(output, "flag" if output == "passed" else "text") for output in outputs)
    return Declared


_ANSWER = Field("answer", required=False)
_CODE = Field("code", "code", required=False)
LIBRARY = {
    each.name: each
    for each in (
        operator("Plan", "planner", (), ("plan",)),
        operator("Custom", "solver", (Field("plan", required=False),), ("answer",)),
        operator("Programmer", "solver", (Field("plan", required=False),), ("code", "answer")),
        operator("Verify", "checker", (_ANSWER, _CODE), ("passed", "feedback")),
        operator("Test", "checker", (Field("code", "code"),), ("passed", "feedback")),
        operator("Review", "checker", (_ANSWER, _CODE), ("passed", "feedback")),
        operator("Revise", "reviser", (_ANSWER, _CODE, Field("feedback", required=False)), ("answer",)),
        operator("ScEnsemble", "combiner", (Field("candidates", "texts"),), ("answer",)),
        operator("Aggregate", "combiner", (Field("candidates", "texts"),), ("answer",)),
        operator("Format", "formatter", (_ANSWER,), ("answer",)),
    )
}

OPERATORS = ("Custom", "Programmer", "Verify", "Revise", "Review", "Plan")
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
BINDINGS = st.tuples(st.sampled_from(("answer", "feedback")), st.sampled_from(("n1.answer", "n2.code", "x.y")))
CALLS = st.builds(
    Call,
    st.sampled_from(OPERATORS),
    TEXTS,
    TEXTS | st.sampled_from(("small", "gpt-4.1-mini", "a/b")),
    st.lists(BINDINGS, max_size=3).map(tuple),  # a field may be bound several times
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
