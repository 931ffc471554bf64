"""Measures of the different work that went into a workflow's answer, from its graph and the trace of its run.

A step counts where the answer was made from its outputs: directly, through other steps, or as a check that decided
which steps ran. Steps that did not run, failed, or whose outputs were overwritten unread do not count, and earn no
reward for structure.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from flowjax.canvas.graph import (
    Call,
    Conditional,
    Loop,
    Node,
    Parallel,
    Sequence,
    Workflow,
    children,
    walk,
    without_ids,
)
from flowjax.canvas.values import WorkflowRun

Places = frozenset[int]  # of runs in the trace
Sources = Mapping[str, Places]  # field of the state -> the runs that wrote its newest value
NEWEST = ("answer", "code")  # fields in which answers stand: code for a problem of programs, answer for all others


@dataclass(frozen=True, slots=True)
class Structure:
    """Measures of the part of a workflow that its answer came from.

    operators         calls that contributed
    distinct          different kinds of operators among them
    entropy           of those kinds, normalised by log(operators): 0 for one kind, 1 if all differ
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


def measure(
    workflow: Workflow, run: WorkflowRun, roles: Mapping[str, str], answers: Collection[str] = NEWEST
) -> Structure:
    """The structure behind the answer of a run.

    Args:
        roles: each operator's role, by name.
        answers: the field in which answers to the problem stand; either one where it is not known.
    """
    provenance = Provenance(workflow, run, roles, answers)
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


def _same(one: Node | None, other: Node | None) -> bool:
    return one is other or (one is not None and other is not None and without_ids(one) == without_ids(other))


def _normalised_entropy(kinds: Counter[str]) -> float:
    """H(kinds) / log(calls), 0 for fewer than two calls."""
    calls = kinds.total()
    if calls < 2:
        return 0.0
    entropy = -sum(count / calls * math.log(count / calls) for count in kinds.values())
    return max(0.0, entropy / math.log(calls))


def _distinct_siblings(workflow: Workflow, used: frozenset[str]) -> float:
    """The share of different calls, averaged over parallels with several contributing calls; 0 if there is none."""
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


@dataclass(frozen=True, slots=True)
class Decision:
    """A check that decided a conditional or a loop, and the runs that happened because of its verdict."""

    node_id: str
    check: int
    allowed: Places


class Provenance:
    """Walks the graph along the trace as the interpreter did, and tracks which runs each value came from.

    made_from   for every run, the runs whose outputs it read
    decisions   checks that decided something
    turns       loop -> the most times that its body ran in a row
    """

    def __init__(
        self, workflow: Workflow, run: WorkflowRun, roles: Mapping[str, str], answers: Collection[str] = NEWEST
    ):
        self._run, self._roles, self._answers = run, roles, answers
        self._waiting: defaultdict[str, list[int]] = defaultdict(list)
        for place in reversed(range(len(run.trace))):
            self._waiting[run.trace[place].node_id].append(place)
        for places in self._waiting.values():
            places.sort(key=lambda place: -run.trace[place].turn)  # `pop` takes the earliest turn first
        self._visited: list[int] = []
        self._checks: list[int] = []  # runs that wrote `passed`; a parallel's are dropped at its end
        self._latest: dict[str, int] = {}  # node -> its latest run
        self.made_from: dict[int, Places] = {}
        self.decisions: list[Decision] = []
        self.turns: Counter[str] = Counter()
        self._final, _ = self._walk(workflow.root, {})

    def contributing(self) -> Places:
        """The runs that the answer came from: their outputs were read on the way to it, or they decided what ran.

        A deciding check also counts where it read a value that the answer came from.
        """
        used: set[int] = set()
        found = {place for name in self._answers if self._answered_by(name) for place in self._final.get(name, ())}
        while found:
            used |= found
            found = {source for place in found for source in self.made_from[place]}
            found |= {decision.check for decision in self.decisions if self._mattered(decision, used)}
            found -= used
        return frozenset(used)

    def _answered_by(self, name: str) -> bool:
        return bool(self._run.answer) and self._run.state.get(name) == self._run.answer

    def _mattered(self, decision: Decision, used: set[int]) -> bool:
        return bool(used & self.made_from[decision.check] or used & decision.allowed)

    def _walk(self, node: Node, sources: Sources) -> tuple[Sources, bool]:
        """The sources after a node, and whether its sequence goes on."""
        match node:
            case Call():
                return self._walk_call(node, sources)
            case Sequence(steps):
                return self._walk_steps(steps, sources)
            case Parallel(branches):
                ends = [self._walk_branch(branch, sources) for branch in branches]
                # Candidates come from answers that the branches wrote, not from those that they were given.
                new = (
                    branch.get(name, frozenset()) - sources.get(name, frozenset())
                    for branch, goes_on in ends
                    for name in self._answers
                    if goes_on
                )
                return {**sources, "candidates": frozenset().union(*new)}, True
            case Conditional():
                return self._walk_conditional(node, sources)
            case Loop():
                return self._walk_loop(node, sources)

    def _walk_branch(self, branch: Node, sources: Sources) -> tuple[Sources, bool]:
        checks = len(self._checks)
        end = self._walk(branch, sources)
        del self._checks[checks:]
        return end

    def _walk_call(self, call: Call, sources: Sources) -> tuple[Sources, bool]:
        waiting = self._waiting[call.id]
        if not waiting:
            return sources, False  # the run ended before this call
        place = waiting.pop()
        node_run = self._run.trace[place]
        read = node_run.inputs.keys() - {name for name, _ in call.inputs}  # a name may be bound several times
        origins = [sources.get(name, frozenset()) for name in read]
        for _, source in call.inputs:
            node, _, output = source.rpartition(".")
            latest = self._latest.get(node)
            if latest is not None and output in self._run.trace[latest].outputs:  # else nothing was read
                origins.append(frozenset({latest}))
        self.made_from[place] = frozenset().union(*origins)
        self._visited.append(place)
        if node_run.status != "ok":
            return sources, False
        self._latest[call.id] = place
        if "passed" in node_run.outputs:
            self._checks.append(place)
        return {**sources, **{name: frozenset({place}) for name in node_run.outputs}}, True

    def _walk_steps(self, steps: tuple[Node, ...], sources: Sources) -> tuple[Sources, bool]:
        for step in steps:
            sources, goes_on = self._walk(step, sources)
            if not goes_on:
                return sources, False
        return sources, True

    def _walk_conditional(self, node: Conditional, sources: Sources) -> tuple[Sources, bool]:
        checks = len(self._checks)
        sources, goes_on = self._walk(node.condition, sources)
        if not goes_on:
            return sources, False
        check = self._checks[-1] if len(self._checks) > checks else None
        passed = check is not None and self._run.trace[check].outputs["passed"] is True
        branch = node.then if passed else node.otherwise
        start = len(self._visited)
        if branch is not None:
            sources, goes_on = self._walk(branch, sources)
        if check is not None and not _same(node.then, node.otherwise):
            self.decisions.append(Decision(node.id, check, frozenset(self._visited[start:])))
        return sources, goes_on

    def _walk_loop(self, node: Loop, sources: Sources) -> tuple[Sources, bool]:
        steps = node.body.steps if isinstance(node.body, Sequence) else (node.body,)
        checks: list[tuple[int, int]] = []  # direct checks, each with the number of runs so far
        for turn in range(1, node.count + 1):
            for number, step in enumerate(steps):
                before = len(self._checks)
                sources, goes_on = self._walk(step, sources)
                if not goes_on:
                    return sources, False
                self.turns[node.id] = max(self.turns[node.id], turn)
                if not isinstance(step, Call) or len(self._checks) == before:
                    continue
                if self._roles.get(step.operator) != "checker":  # only checkers end loops
                    continue
                check = self._checks[-1]
                passed = self._run.trace[check].outputs["passed"] is True
                last = turn == node.count and number == len(steps) - 1
                if not last:
                    checks.append((check, len(self._visited)))
                if passed:
                    self._decided(node, checks)
                    return sources, True
        self._decided(node, checks)
        return sources, True

    def _decided(self, node: Loop, checks: list[tuple[int, int]]) -> None:
        self.decisions += [Decision(node.id, check, frozenset(self._visited[after:])) for check, after in checks]
