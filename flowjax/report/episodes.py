"""Episodes of a run as data for the page: transcripts read back, with the text of their tokens and drawings of states.

They go to the page in pieces, one for each batch and evaluation, which a browser unpacks when they are opened.
"""

import functools
import inspect
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from flowjax.config import ConfigError, task_options
from flowjax.envs import World, WorldError, find_world, view_reader
from flowjax.monitor.held_out import oldest_first
from flowjax.monitor.transcripts import batch_path, held_out_path, read_lines, trained_path, whole_prompts
from flowjax.records import Group, Status, Task, Trajectory, Turn
from flowjax.rewards import COMPONENTS, canvas, required_outcomes
from flowjax.run import Run

_CONTEXT_TOKENS = 4  # tokens before a token on which its text may depend
_LONGEST_PAYLOAD = 4000  # characters of one field of a task's payload


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """Transcripts of the trajectories of one group (of one task, in an evaluation), with whole prompts."""

    group_id: str
    lines: Sequence[dict[str, Any]]

    @property
    def success(self) -> float:
        """Share of the group's episodes that succeeded."""
        return sum(line["outcome"].get("success", 0.0) for line in self.lines) / len(self.lines)

    @property
    def evenness(self) -> float:
        """0.5 where as many episodes succeeded as failed, 0 where all ended alike."""
        return min(self.success, 1 - self.success)

    def as_group(self) -> Group:
        """The group as the estimators of credit read it."""
        return Group(self.group_id, Task(self.lines[0]["task_id"], "", 0), [_trajectory(line) for line in self.lines])

    @property
    def rewards(self) -> list[float]:
        return [line.get("reward", 0.0) for line in self.lines]


def batches_of(run_dir: Path, policy: str) -> list[int]:
    """Batches of a policy whose transcripts were kept, each by the version of the policy that was trained on it."""
    names = (path.name.partition(".")[0] for path in (run_dir / "trajectories" / policy).glob("*.jsonl.gz"))
    return sorted(int(name) for name in names if name.isdecimal())


def evaluations_of(run_dir: Path) -> list[str]:
    """Names of the evaluations whose episodes were kept turn by turn, oldest first."""
    files = oldest_first((run_dir / "held_out").glob("*.turns.gz"))
    return [path.name.removesuffix(".turns.gz") for path in files]


def read_batch(run_dir: Path, policy: str, step: int) -> list[RecordedGroup]:
    """The groups of a batch, with the log-probs that its tokens had at training where those were kept."""
    trained = {line["trajectory_id"]: line["logprobs"] for line in read_lines(trained_path(run_dir, policy, step))}
    groups = list(_grouped(read_lines(batch_path(run_dir, policy, step))))
    for line in (line for group in groups for line in group.lines):
        values = trained.get(line["trajectory_id"], [])
        # One list for the whole trajectory. Its length differs where some of the trajectory's rows were not trained on:
        # then its values cannot be assigned to turns.
        if len(values) == sum(len(turn["sampled_ids"]) for turn in line["turns"]):
            start = 0
            for turn in line["turns"]:
                turn["trained_logprobs"] = values[start : start + len(turn["sampled_ids"])]
                start += len(turn["sampled_ids"])
    return groups


def read_evaluation(run_dir: Path, name: str) -> list[RecordedGroup]:
    """The episodes of an evaluation that were kept, by task."""
    return list(_grouped(read_lines(held_out_path(run_dir, name))))


def _grouped(lines: Iterator[dict[str, Any]]) -> Iterator[RecordedGroup]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if not isinstance(line, dict) or not {"trajectory_id", "group_id", "turns"} <= line.keys():
            continue  # not an episode's line
        for turn, prompt in zip(line["turns"], whole_prompts(line["turns"]), strict=True):
            turn["prompt_ids"] = prompt
        groups.setdefault(line["group_id"], []).append(line)
    for group_id, members in groups.items():
        yield RecordedGroup(group_id, members)


def most_divided(groups: Sequence[RecordedGroup]) -> RecordedGroup:
    """The group whose share of successes is nearest to a half."""
    return max(groups, key=lambda group: group.evenness)


def _trajectory(line: Mapping[str, Any]) -> Trajectory:
    turns = [_turn(turn, line["policy"]) for turn in line["turns"]]
    status: Status = line["status"]
    names = (line["trajectory_id"], line["group_id"], line["task_id"], line["seed"])
    return Trajectory(*names, turns, line["outcome"], status, policy=line["policy"])


def _turn(turn: Mapping[str, Any], policy: str) -> Turn:
    return Turn(
        policy=policy,
        version=turn["version"],
        prompt_ids=np.array(turn["prompt_ids"], np.int32),
        sampled_ids=np.array(turn["sampled_ids"], np.int32),
        logprobs=np.array(turn["logprobs"], np.float32),
        finish_reason=turn["finish_reason"],
        state_key=int(turn["state_key"], 16),
        next_state_key=int(turn["next_state_key"], 16),
        env_reward=turn["reward"],
        valid=turn["valid"],
        terminal=turn["terminal"],
        spans=turn.get("spans", ()),
    )


def _versions(turn: Mapping[str, Any]) -> list[int]:
    return [version for version, _ in turn.get("spans", ())] or [turn["version"]]


def workflow_use(groups: Sequence[RecordedGroup]) -> dict[str, Any]:
    """Share of distinct workflows among those with which a batch's episodes ended, and mean calls of each operator per
    workflow; empty for a world without workflows."""
    last = [_last_workflow(line) for group in groups for line in group.lines]
    built = [steps for steps in last if steps]
    if not built:
        return {}
    calls = Counter(operator for steps in built for operator in _operators(steps))
    distinct = {json.dumps(_without_ids(steps), sort_keys=True) for steps in built}
    return {
        "unique": len(distinct) / len(built),
        "operators": {name: round(count / len(built), 4) for name, count in calls.most_common()},
    }


def _last_workflow(line: Mapping[str, Any]) -> list[Any]:
    traces = [turn.get("shown", {}).get("trace") for turn in line["turns"]]
    workflows = [trace["workflow"] for trace in traces if isinstance(trace, dict) and "workflow" in trace]
    return workflows[-1].get("steps", []) if workflows else []


def _operators(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "operator" in value:
            yield value["operator"]
        value = list(value.values())
    for part in value if isinstance(value, list) else ():
        yield from _operators(part)


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_ids(part) for name, part in value.items() if name not in ("id", "instruction")}
    return [_without_ids(part) for part in value] if isinstance(value, list) else value


# ------------------------------------------------------------------------------------------------------- text of tokens


class Texts:
    """The text of token ids, by the tokenizer of a base; the ids themselves where that cannot be read."""

    def __init__(self, folder: Path):
        self._tokenizer: Tokenizer | None = None
        self.problem = ""
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # whatever the tokenizers library raises of a file
            self.problem = (
                f"{folder} has no readable tokenizer.json ({error}): token ids are shown in place of their text"
            )
        self._piece = functools.lru_cache(maxsize=1 << 16)(self._piece_after)

    def text(self, ids: Sequence[int]) -> str:
        """The whole text, special tokens included: it is what the model read."""
        if self._tokenizer is None:
            return " ".join(map(str, ids))
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text that each token adds to those before it."""
        if self._tokenizer is None:
            return [f"{number} " for number in ids]
        return [self._piece(tuple(ids[max(0, at - _CONTEXT_TOKENS) : at]), number) for at, number in enumerate(ids)]

    def _piece_after(self, before: tuple[int, ...], token: int) -> str:
        started = self.text(before) if before else ""
        whole = self.text([*before, token])
        # A token may be a part of a UTF-8 character. The text before it then ends in a replacement character, which
        # this token may complete: `started` is then no prefix of `whole`, and the token adds the last character.
        return whole[len(started) :] if whole.startswith(started) else whole[-1:]


# ----------------------------------------------------------------------------------------------------- pieces of a page


@dataclass
class _Table:
    """Distinct texts with numbers to refer to them: the same prompts and drawings occur again and again."""

    values: list[str] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)

    def place(self, value: str) -> int:
        if value not in self.places:
            self.places[value] = len(self.values)
            self.values.append(value)
        return self.places[value]


class EpisodePages:
    """Makes the pieces of a run's page from groups of episodes."""

    def __init__(self, run: Run):
        self._run = run
        bases = {name: policy.base for name, policy in run.policies.items()}
        # Agents that a base speaks for, without a policy.
        bases |= {name: run.bases[name] for name in run.agents.values() if name in run.bases}
        self._texts = {name: Texts(Path(base.model.path)) for name, base in bases.items()}
        self._worlds: dict[str, World | None] = {}
        self.problems = list(dict.fromkeys(texts.problem for texts in self._texts.values() if texts.problem))

    def piece(self, groups: Sequence[RecordedGroup]) -> dict[str, Any]:
        """Everything that the page shows of these groups, except their credit."""
        prompts, pictures, views = _Table(), _Table(), _Table()
        shown = [
            {
                "id": group.group_id,
                "task": group.lines[0]["task_id"],
                "kind": kind_of(group.lines[0]),
                "payload": {name: _cut(value) for name, value in group.lines[0]["payload"].items()},
                "episodes": [self._episode(line, prompts, pictures, views) for line in group.lines],
            }
            for group in groups
        ]
        self._add_structure(shown)
        return {"groups": shown, "prompts": prompts.values, "pictures": pictures.values, "views": views.values}

    def _episode(self, line: Mapping[str, Any], prompts: _Table, pictures: _Table, views: _Table) -> dict[str, Any]:
        # Of an endpoint's replies only the number of tokens is known, not which they are: all ids are 0.
        known_ids = any(any(turn["prompt_ids"]) for turn in line["turns"])
        texts, world = self._texts.get(line["policy"]) if known_ids else None, self._world(line["source"])
        turns, trace = [], None
        known: dict[Any, Any] = {}  # results of nodes that earlier turns ran, by node and turn: see `_completed`
        for turn in line["turns"]:
            shown = turn.get("shown", {})
            seen = _seen(world, shown.get("view"), trace)
            made: dict[str, Any] = {
                "prompt": prompts.place(texts.text(turn["prompt_ids"]) if texts else ""),
                "reply": texts.pieces(turn["sampled_ids"]) if texts else [],
                "logprobs": turn["logprobs"],
                "action": shown.get("action", ""),
                "view": views.place(seen[0]),
                "picture": pictures.place(seen[1]),
                "state": turn["state_key"],
                "next": turn["next_state_key"],
            }
            for name in ("version", "reward", "valid", "terminal", "finish_reason", "generate_s", "env_s"):
                made[name] = turn[name]
            for name in ("trained_logprobs", "advantage", "advantage_parts", "spans"):
                if name in turn:
                    made[name] = turn[name]
            if (found := shown.get("trace")) is not None:
                made["trace"] = trace = _completed(found, known)  # a refused action has none: the former one stays
            turns.append(made)
        last = _seen(world, line.get("shown", {}).get("view"), trace)
        kept = ("trajectory_id", "policy", "seed", "status", "error", "outcome", "reward", "rewards")
        found = {name: line[name] for name in kept if name in line}
        return {**found, "turns": turns, "view": views.place(last[0]), "picture": pictures.place(last[1])}

    def _add_structure(self, groups: Sequence[dict[str, Any]]) -> None:
        """Add the parts of the `canvas` reward to every episode of a policy that has it: S of the workflow's structure,
        C of the answer's correctness."""
        episodes = [episode for group in groups for episode in group["episodes"]]
        for name, policy in self._run.policies.items():
            paid = policy.reward.components.to_dict().get("canvas")
            options = dict(paid) if isinstance(paid, dict) else {}  # a number is its weight alone
            options.pop("weight", None)
            # A component of one's own may have this name, and other parts.
            is_built_in = paid is not None and options.pop("path", COMPONENTS["canvas"]) == COMPONENTS["canvas"]
            names = required_outcomes({"canvas": 1.0})
            # An episode that failed may report nothing.
            theirs = [each for each in episodes if each["policy"] == name and set(names) <= each["outcome"].keys()]
            if not is_built_in or not theirs:
                continue
            outcomes = {each: jnp.array([episode["outcome"][each] for episode in theirs]) for each in names}
            correct = outcomes.pop("correctness")
            # By the reward function itself, also with a wrong answer: that leaves base + S, whatever the options are.
            unsolved = np.asarray(canvas(jnp.zeros_like(correct), **outcomes, **options))
            whole = np.asarray(canvas(correct, **outcomes, **options))
            base = options.get("base", inspect.signature(canvas).parameters["base"].default)
            for place, episode in enumerate(theirs):
                found = {"base": base, "S": unsolved[place] - base, "C": correct[place]}
                found["paid"] = whole[place] - unsolved[place]
                episode["structure"] = {part: round(float(value), 4) for part, value in found.items()}

    def _world(self, source: str) -> World | None:
        """The world of a source; None where it cannot be made here, and then states are not drawn."""
        if source not in self._worlds:
            try:
                world = find_world(self._run.config.env.name)(**task_options(self._run.config, source))
            except (WorldError, ConfigError, KeyError) as error:
                world = None
                self.problems.append(f"states are not drawn: {error}")
            self._worlds[source] = world
        return self._worlds[source]


def _completed(trace: Any, known: dict[Any, Any]) -> Any:
    """A trace in which nodes whose results were remembered get the inputs, outputs and costs of when they were run."""
    nodes = trace.get("nodes") if isinstance(trace, dict) else None
    for node in nodes if isinstance(nodes, list) else ():
        name = (node.get("id"), node.get("turn"))
        if "inputs" in node:
            known[name] = {part: node.get(part) for part in ("inputs", "outputs", "tokens", "cost", "seconds")}
        elif name in known:
            node.update(known[name])  # with the cost of its run, since a remembered result costs nothing
    return trace


def _seen(world: World | None, view: Any, trace: Any) -> tuple[str, str]:
    """A view in words, and its drawing; "" where there is none."""
    if view is None:
        return "", ""
    if world is None:
        return _in_words(view), ""
    try:
        known = view_reader(world.View)(view)
        return _in_words(view, world.View), world.draw(known, trace)
    except Exception:  # the view is of another version of the world, or of a workflow with observations of its own
        return _in_words(view), ""


def _in_words(view: Any, kind: type = str) -> str:
    if isinstance(view, str):
        return view
    names = getattr(kind, "__dataclass_fields__", {})
    if isinstance(view, list) and len(names) == len(view):
        return "\n".join(f"{name}: {_lines(value)}" for name, value in zip(names, view, strict=True))
    return json.dumps(view)


def _lines(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return "\n" + "\n".join(value)
    return str(value)


def kind_of(line: Mapping[str, Any]) -> str:
    """Kind of an episode's task: its source and its kind within the world."""
    return " ".join(filter(None, (line["source"], line.get("kind", ""))))


def _cut(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _LONGEST_PAYLOAD else f"{text[:_LONGEST_PAYLOAD]} ..."


def index_of(groups: Sequence[RecordedGroup]) -> list[dict[str, Any]]:
    """The lines of the page's list of episodes, which it shows without unpacking their piece."""
    return [
        {
            "group": number,
            "episode": place,
            "id": line["trajectory_id"],
            "kind": kind_of(line),
            "success": line["outcome"].get("success"),
            "reward": line.get("reward"),
            "turns": len(line["turns"]),
            "invalid": sum(not turn["valid"] for turn in line["turns"]),
            "cut": sum(turn["finish_reason"] == "length" for turn in line["turns"]),
            "status": line["status"],
            "versions": sorted({version for turn in line["turns"] for version in _versions(turn)}),
        }
        for number, group in enumerate(groups)
        for place, line in enumerate(group.lines)
    ]
