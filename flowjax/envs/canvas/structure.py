"""How much different work really went into a workflow's answer, measured on its graph and the trace of its run.

A step counts where the answer was made from what it wrote: directly, through other steps, or by deciding what ran. What
only stands in the workflow, failed, or was overwritten does not count.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from flowjax.canvas.graph import Call, Loop, Node, Parallel, Sequence, Workflow, children, walk
from flowjax.canvas.values import Run
from flowjax.envs.canvas.provenance import Provenance


@dataclass(frozen=True, slots=True)
class Structure:
    """Measures of the part of a workflow that its answer came from.

    operators         calls that contributed
    distinct          different kinds of operators among them
    entropy           of those kinds, over that of as many kinds as calls: 0 for one kind, 1 if all differ
    siblings          share of different (operator, instruction, backend) among contributing calls of a parallel
    branching         kinds of control structure that mattered: a parallel of which two branches contributed, a
                      conditional that decided, a loop that ran its body again or was left early
    depth             how deep such structures are nested
    checks, formats   contributing checkers and formatters
    """

    operators: int = 0
    distinct: int = 0
    entropy: float = 0.0
    siblings: float = 0.0
    branching: int = 0
    depth: int = 0
    checks: int = 0
    formats: int = 0


def measure(workflow: Workflow, run: Run, roles: Mapping[str, str]) -> Structure:
    """The structure behind the answer of a run; `roles` are those of the operators, by name."""
    provenance = Provenance(workflow, run)
    runs = provenance.contributing()
    used = frozenset(run.trace[place].node_id for place in runs)
    calls = [call for call in workflow.calls() if call.id in used]
    kinds = Counter(call.operator for call in calls)
    decided = {decision.node_id for decision in provenance.decisions if decision.check in runs}
    repeated = {loop for loop, turns in provenance.turns.items() if turns > 1}
    branching = [node for node in workflow.nodes() if _mattered(node, used, decided, repeated)]
    return Structure(
        operators=len(calls),
        distinct=len(kinds),
        entropy=_normalised_entropy(kinds),
        siblings=_distinct_siblings(workflow, used),
        branching=len({type(node) for node in branching}),
        depth=_depth(workflow.root, frozenset(node.id for node in branching)),
        checks=sum(roles.get(call.operator) == "checker" for call in calls),
        formats=sum(roles.get(call.operator) == "formatter" for call in calls),
    )


def _mattered(node: Node, used: frozenset[str], decided: set[str], repeated: set[str]) -> bool:
    contributing = sum(any(call.id in used for call in walk(child)) for child in children(node))
    if isinstance(node, Parallel):
        return contributing > 1
    return node.id in decided or (isinstance(node, Loop) and node.id in repeated and contributing > 0)


def _normalised_entropy(kinds: Counter[str]) -> float:
    """H(kinds) / log(calls), 0 for fewer than two calls."""
    calls = kinds.total()
    if calls < 2:
        return 0.0
    entropy = -sum(count / calls * math.log(count / calls) for count in kinds.values())
    return max(0.0, entropy / math.log(calls))


def _distinct_siblings(workflow: Workflow, used: frozenset[str]) -> float:
    """The mean over parallels of which several calls contributed; 0 where there is none."""
    shares: list[float] = []
    for node in workflow.nodes():
        if isinstance(node, Parallel):
            calls = [call for call in walk(node) if isinstance(call, Call) and call.id in used]
            if len(calls) > 1:
                shares.append(len({(call.operator, call.instruction, call.backend) for call in calls}) / len(calls))
    return sum(shares) / len(shares) if shares else 0.0


def _depth(node: Node, mattered: frozenset[str]) -> int:
    inside = max((_depth(child, mattered) for child in children(node)), default=0)
    return inside + (not isinstance(node, Sequence) and node.id in mattered)
