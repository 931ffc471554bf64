"""Checks and sizes that need JAX and the modules that a config names: names, mesh, memory, checkpoints.

Runs in a process of its own, `python -m flowjax.launch.probe`, so that the supervisor stays small and starts at once.
Reads {"config", "devices", "checkpoints", "platform"} as JSON, writes {"problems", "here", "plan"}: what no machine can
run, what this one lacks, and sizes.
"""

import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from flowjax.config import default_config, task_options, taught_options
from flowjax.envs import NotReady, World, WorldError, find_world, naming_options_of
from flowjax.envs.demonstrations import base_words, is_executor
from flowjax.launch.checks import in_base, on_each_policy
from flowjax.launch.devices import (
    adapter_slots_bytes,
    check_attention,
    check_mesh,
    decoder_shape,
    memory_plan,
    memory_together,
    moments_of,
    shown_axes,
    trained_shapes,
)
from flowjax.launch.machine import check_model, unprepared
from flowjax.launch.trial import check_algorithms, check_episode, check_tasks, fails
from flowjax.rollout.sidecar import unserved_targets, unserved_windows
from flowjax.run import ONLY_AGENT, Base, Policy, Run, resolve
from flowjax.workflows import agents_of, demonstrates, episode_outcomes, outcomes_of, workflow_problem

_ENDLESS = 100_000_000  # tasks from which a source counts as one that makes them as they are asked for


def inspect_run(run: Run, device_count: int, checkpoints: Path | None, platform: str = "cpu") -> dict[str, Any]:
    """Problems of the config, problems of this machine only, and the sizes that a plan shows.

    `device_count` is the trainer's, 0 where it runs elsewhere and the count is not known; `checkpoints` the folder of
    a resumed run with a folder for each policy; `platform` JAX's name of what the trainer computes on.
    """
    plan: dict[str, Any] = {"bases": {}}
    here: list[str] = []
    of_config = (_world, check_tasks, _workflow, _data_algorithms)
    problems = [text for check in of_config for text in _messages(check, run.config, here=here)]
    # What goes on with a base, or is measured, keeps it: `main` makes a note of its words.
    of_bases = (_taught, _executors, _templates, *([_words] if _is_fresh(run, checkpoints) else []))
    problems += [text for check in (_learning, *of_bases) for text in _messages(check, run, here=here)]
    if run.trains or run.trained_remotely:
        problems += _messages(_rules, run, here=here)
    if run.trains or (run.trained_remotely and device_count):
        problems += _messages(check_mesh, run, device_count, plan, here=here)
    problems += _messages(_bases, run, device_count, platform, plan, here=here)
    if checkpoints is not None:
        problems += _messages(_checkpoints, run, checkpoints, here=here)
    return {"problems": _named(problems), "here": _named(here), "plan": plan}


def _is_fresh(run: Run, checkpoints: Path | str | None) -> bool:
    return checkpoints is None and not run.is_evaluation


def _named(problems: Sequence[str]) -> list[str]:
    """Each message once: a world that cannot be imported fails several checks. Some name fields without "config."."""
    return list(dict.fromkeys(f"config.{text}" if text.startswith("env.") else text for text in problems))


def _messages(check: Callable[..., Iterator[str] | None], *args: Any, here: list[str] | None = None) -> list[str]:
    """The problems that a check yields or raises: errors meant for users are all subclasses of ValueError.

    `NotReady`, for things missing on this machine only, goes to `here`; without that list it is raised on.
    """
    found: list[str] = []
    try:
        found.extend(check(*args) or ())
    except NotReady as error:
        if here is None:
            raise
        here.append(str(error))
    except ValueError as error:
        found.append(str(error))
    return found


def _world(config: ConfigDict) -> Iterator[str]:
    kind = find_world(config.env.name)
    made = config.model.nano is not None and not Path(config.model.path).exists()
    if made and kind.expert is World.expert and not demonstrates(config.workflow.partition(":")[0]):
        yield (
            f"config.model.nano is set and config.model.path {config.model.path!r} is not there, but {config.env.name} "
            "has no expert() to imitate: write one, or name a base model that exists and set config.model.nano to None"
        )
    for source in config.env.sources or ("",):
        options = task_options(config, source)
        field = f"config.env.sources.{source}.options" if source else "config.env.options"
        try:
            with naming_options_of(source, config):
                world = kind(**options)
                try:
                    world.env()
                except NotReady:  # a sandbox, say
                    if "rollout" not in config.elsewhere:
                        raise
        except Exception as error:
            yield fails(f"{field} is {options}, with which {config.env.name} fails", error)
            continue
        if world.longest_step_s() > config.env.step_timeout_s:
            yield (
                f"config.env.step_timeout_s is {config.env.step_timeout_s}, but with {field} {options} a step of "
                f"{config.env.name} may take {world.longest_step_s()} s: raise step_timeout_s, or lower the "
                "world's limits"
            )
        if world.most_turns() > config.env.max_turns:
            yield (
                f"config.env.max_turns is {config.env.max_turns}, but with {field} {options} an episode of "
                f"{config.env.name} has {world.most_turns()} turns: make both the same"
            )
        if config.rollout.structured_outputs and not world.structured_outputs(config.env.prompt):
            yield (
                f"config.rollout.structured_outputs is True, but {config.env.name} has no structured_outputs(): "
                "set it to False, or take a world that says what its actions look like"
            )
    if config.rollout.structured_outputs and config.env.prompt == "compact":
        yield (
            "config.rollout.structured_outputs is True, but config.env.prompt is 'compact': the words of nano models "
            "carry no spaces, so that no grammar with spaces can be kept to; set one of them back"
        )


def _taught(run: Run) -> Iterator[str]:
    """Problems with the world of a nano base's warm start, where it has other options than the run's."""
    config = run.config
    sections = ("env_options", "noisy_env_options")
    for (name, base), section in itertools.product(run.bases.items(), sections):
        if base.model.nano is None or not base.warm_start[section] or Path(base.model.path).exists():
            continue
        field = in_base(name, f"config.warm_start.{section} is {base.warm_start[section].to_dict()}")
        kind = find_world(config.env.name)
        words = base_words(run, name, kind(**config.env.options.to_dict()))
        try:
            taught = kind(**taught_options(config, base.warm_start, noisy=section == "noisy_env_options"))
        except WorldError as error:
            yield f"{field}, beside config.env.options: {error}"
            continue
        if unknown := set(base_words(run, name, taught)) - set(words):
            yield (
                f"{field}, whose tasks have words that those of config.env.options lack ({min(unknown)!r}): the base "
                "has the words of what it is trained on, so give options that add none"
            )


def _words(run: Run) -> Iterator[str]:
    """Nano bases that lack words of the run's tasks, which they would read and write as <unk>. One that is still to be
    made will have those of config.env.options."""
    config, kind = run.config, find_world(run.config.env.name)
    for name, base in run.bases.items():
        file = Path(base.model.path) / "tokenizer.json"
        if base.model.nano is None or not (file.exists() or config.env.sources):
            continue
        try:
            world = kind(**config.env.options.to_dict())
            known = json.loads(file.read_text())["model"]["vocab"] if file.exists() else base_words(run, name, world)
            lacking: list[str] = []
            for source in config.env.sources or ("",):
                with naming_options_of(source, config):
                    world = kind(**task_options(config, source))
                if not is_executor(run, name, world):
                    lacking += [word for word in base_words(run, name, world) if word not in known]
        except Exception as error:  # a user's world may fail in any way
            yield fails(f"config.env.name is {config.env.name!r}, whose words cannot be read", error)
            continue
        if lacking:
            remedy = "give config.env.sources options that add no words"
            if file.exists():
                remedy = "remove that folder to have it made anew, unless a run is to go on with it"
            yield (
                f"{in_base(name, 'config.model.path')} is {base.model.path!r}, a nano base that lacks {len(lacking)} "
                f"of the tasks' words, such as {lacking[0]!r}: {remedy}"
            )


def _executors(run: Run) -> Iterator[str]:
    """Problems with base models of the run, and endpoints, that the world's environments ask (as operators do)."""
    config, obstacles = run.config, []
    for source in config.env.sources or ("",):
        with naming_options_of(source, config):
            world = find_world(config.env.name)(**task_options(config, source))
        field = f"config.env.sources.{source}.options" if source else "config.env.options"
        for name, tokens in world.asked_bases().items():
            if (base := run.bases.get(name)) is None:
                continue  # `check_config` reports it
            if base.model.nano is not None and not is_executor(run, name, world):
                yield (
                    f"{field} has the base model {name!r} asked by operators, but that is a nano base which is taught "
                    "to be a policy: name one of config.bases that speaks for no agent"
                )
            if tokens >= (most := base.engine.max_model_tokens):
                yield in_base(
                    name,
                    f"config.engine.max_model_tokens is {most}, but {field} has that base model asked for replies of "
                    f"up to {tokens} tokens, beside their prompts: raise it, or lower max_new_tokens and "
                    "retry_new_tokens",
                )
            if (why := unprepared(Path(base.model.path))) and base.model.nano is None:
                obstacles.append(in_base(name, why))
        obstacles += () if "rollout" in config.elsewhere else world.obstacles()  # others play, and may reach more
    if obstacles:
        raise NotReady("\n".join(_named(obstacles)))


def _data_algorithms(config: ConfigDict) -> None:
    from flowjax.dataflow.algorithms import Chain, build_algorithms

    with (chain := Chain(build_algorithms(config))).state_changes():  # a state that cannot be packed raises now
        chain.metrics()  # and so does one that is no number


def _templates(run: Run) -> Iterator[str]:
    """Problems with the tokenizers of base models that are here, and with the options of chat templates."""
    from flowjax.models.nano import CHAT_TEMPLATE
    from flowjax.workflows.codec import Codec, CodecError, check_template_options

    for name, base in run.bases.items():
        options, folder = base.model.template_options.to_dict(), Path(base.model.path)
        try:
            if (folder / "tokenizer.json").exists():
                Codec(folder, template_options=options)
            elif base.model.nano is not None:
                check_template_options(CHAT_TEMPLATE, options)
        except CodecError as error:
            yield in_base(name, str(error))


def _learning(run: Run) -> Iterator[str]:
    """Problems with reward, credit and loss of each policy."""

    def check(policy: Policy) -> list[str]:
        reward = _messages(_reward, policy, run)
        return [*reward, *_messages(_credit, policy.credit), *_messages(_loss, policy.loss)]

    yield from on_each_policy(run, check)


def _reward(policy: Policy, run: Run) -> None:
    from flowjax.rewards import check_reward

    components, workflow, world = policy.reward.components.to_dict(), run.config.workflow, run.config.env.name
    alone = len(run.agents) == 1  # then an evaluation may have a base model in the policy's place, rewarded like it
    agents = [agent for agent, model in run.agents.items() if model == policy.name] or [""] * alone
    module, _, name = workflow.partition(":")
    for agent in agents if components and not workflow_problem(module, name) else ():
        who = f"the {agent} of {workflow}" if agent and not alone else world
        check_reward(components, outcomes_of(workflow, agent, find_world(world)), who)


def _workflow(config: ConfigDict) -> Iterator[str]:
    module, _, name = config.workflow.partition(":")
    if why := workflow_problem(module, name):
        yield f"config.workflow is {config.workflow!r}, {why}"
    episode_outcomes(config.workflow, find_world(config.env.name))  # which refuses what are no names
    asked, named = agents_of(config.workflow), tuple(config.agents) or (ONLY_AGENT,)
    if asked and set(asked) != set(named):
        yield (
            f"config.agents has {', '.join(named)}, and the agents of {config.workflow} are {', '.join(asked)}: name "
            "for each of these, and for no other, the policy or base that speaks for it"
        )


def _credit(credit: ConfigDict) -> None:
    from flowjax.credit.estimators import check_options

    check_options(credit.name, credit.options.to_dict())


def _loss(loss: ConfigDict) -> None:
    from flowjax.losses.policy import check_loss_options

    check_loss_options(loss.kind, loss.options.to_dict())


def _rules(run: Run) -> None:
    """Check that the rules of each policy's optimiser match the names of the arrays that it trains."""
    from flowjax.models.lora import Lora
    from flowjax.trainer.optimizer import check_rules

    for policy in run.policies.values():
        model = decoder_shape(run, policy.base) if policy.base.model.path else None
        if model is None or not policy.optimizer.rules:
            continue
        lora = Lora(**policy.lora.to_dict()) if policy.train == "lora" else None
        check_rules(policy.optimizer.rules, list(trained_shapes(model, lora)))


def _bases(run: Run, device_count: int, platform: str, plan: dict[str, Any]) -> Iterator[str]:
    """Sizes of each base model and of the policies on it, into `plan`; yields what does not divide over the mesh."""
    from flowjax.models.hf import check_weights
    from flowjax.models.sharding import resolve_mesh

    mesh = resolve_mesh(run.config.mesh.to_dict(), device_count) if "mesh" in plan else None  # it is known, and fits
    parts = plan["bases"]
    for name, base in run.bases.items():
        part = parts[name] = {}
        said = _messages(_served, run, base, part)
        there = (Path(base.model.path) / "config.json").exists() and not check_model(base)
        if there and run.trains and run.policies_on(name):
            said += _messages(check_weights, Path(base.model.path))
        memory = []
        for policy in run.policies_on(name).values():
            said += _messages(_trained, run, policy, mesh, platform, part)
            memory += [part.pop("memory")] if "memory" in part else []
        if memory:
            part["memory"] = memory_together(memory, apart=run.config.separate_trainers)
        for text in dict.fromkeys(said):
            yield in_base(name, text)


def _served(run: Run, base: Base, plan: dict[str, Any]) -> Iterator[str]:
    """Memory that the base model takes on its engines, into `plan`; yields settings that they would refuse."""
    from flowjax.models import cost

    if model := decoder_shape(run, base):
        value_bytes = cost.DTYPE_BYTES.get(base.engine.dtype, 2)
        plan["model"] = {
            "parameters": model.parameter_count(),
            "kv_bytes_per_token": 2 * model.layers * model.kv_size * value_bytes,
            "served_bytes": cost.served_bytes(model, base.engine.dtype, base.engine.quantize),
            "adapter_slots_bytes": adapter_slots_bytes(run, base, model, tensor_parallel=base.engine.tensor_parallel),
        }
        if base.engine.quantize == "int8" and model.experts is not None:
            yield f"config.engine.quantize is 'int8', but {base.model.path} has experts: use 'fp8' or ''"
        started = base.engines and not base.engine.urls and "VLLM_ALLOW_LONG_MAX_MODEL_LEN" not in os.environ
        sure = base.model.nano is not None or (Path(base.model.path) / "config.json").exists()
        wanted, longest = base.engine.max_model_tokens, model.longest_context
        if started and sure and wanted > longest:
            field = "config.model.nano.max_positions" if base.model.nano is not None else "max_position_embeddings"
            yield (
                f"config.engine.max_model_tokens is {wanted}, but the model {base.model.path} has {longest} positions "
                f"({field}), and its engine would not start: lower it, and rollout.max_prompt_tokens or max_new_tokens "
                "with it, or take a model with a longer context"
            )


def _trained(run: Run, policy: Policy, mesh: Mapping[str, int] | None, on: str, plan: dict[str, Any]) -> Iterator[str]:
    """Sizes of a policy, and of its trainer if the mesh is known; yields what does not divide or cannot be served."""
    from jax.sharding import AbstractMesh

    from flowjax.models import cost
    from flowjax.models.decoder import make_placement
    from flowjax.models.lora import Lora, adapter_specs
    from flowjax.models.sharding import MESH_AXES

    settings, trainer, model = policy.base.model, policy.trainer, decoder_shape(run, policy.base)
    if model is None:
        return
    lora = Lora(**policy.lora.to_dict()) if policy.train == "lora" else None
    adapter = sum(math.prod(s.shape) for ab in adapter_specs(model, lora).values() for s in ab.values()) if lora else 0
    trained = adapter if lora else model.parameter_count()
    saved = plan["model"].setdefault("policies", {})[policy.name] = {
        "train": policy.train,
        "trained": trained,
        "checkpoint_bytes": math.ceil((1 + moments_of(policy, model, lora)) * cost.FLOAT32 * trained),
        "adapter_bytes": cost.DTYPE_BYTES.get(policy.base.engine.dtype, 2) * trained,
    }
    copied = lora is None and trainer.processes == 1  # the engines' copy is all of a version between two checkpoints
    saved["version_bytes"] = saved["adapter_bytes"] if copied else cost.FLOAT32 * trained
    if lora is not None and model.experts is not None:
        yield from unserved_targets(lora.targets)
    yield from unserved_windows(model)
    if settings.dtype not in cost.DTYPE_BYTES or mesh is None:
        return
    rows, versions = trainer.micro_batch_rows, run.config.dataflow.max_staleness + 1
    plan["memory"] = memory_plan(policy, model, lora, shown_axes(mesh), rows=rows, versions=versions)
    make_placement(model, AbstractMesh(tuple(mesh.values()), MESH_AXES))
    check_attention(policy, model, mesh["sequence"], on)


def _checkpoints(run: Run, folder: Path) -> Iterator[str]:
    """Problems where no checkpoint of a policy can be read, or its newest is beyond the trainer's last step."""
    from flowjax.weights.publish import CheckpointError, read_adapter, whole_steps

    def check(policy: Policy) -> Iterator[str]:
        steps, problems = whole_steps(folder / policy.name), []
        if steps and policy.trainer.steps < steps[-1]:
            made = f"but the run is at step {steps[-1]}: give at least that"
            yield f"config.trainer.steps is {policy.trainer.steps}, {made}"
        for step in reversed(steps):
            try:
                read_adapter(folder / policy.name, step)
                return
            except CheckpointError as error:
                problems.append(str(error))
        yield from problems[:1]

    yield from on_each_policy(run, check)


def notes_on_tasks(config: ConfigDict) -> Iterator[str]:
    """Notes on training tasks that are never played, and on held-out tasks of one source that another one trains on."""
    from flowjax.dataflow.tasks import trained_in_another_source

    if config.eval.versions:  # an evaluation plays no training task, and its data may have none
        return
    kind, default = find_world(config.env.name), default_config().env.train_tasks
    try:
        for source in config.env.sources or ("",):
            count = len(kind(**task_options(config, source)).tasks("train", config.env.data_seed))
            most = config.env.sources.get(source, {}).get("train_tasks", config.env.train_tasks)
            if most == default < count < _ENDLESS:  # another number was chosen
                of = f" of the source {source!r}" if source else ""
                yield (
                    f"config.env.train_tasks is {most:,}, of {count:,} training tasks{of}: the others are never "
                    f"played. For all, set it to {count}"
                )
        if config.eval.tasks and (found := trained_in_another_source(config)):
            yield found
    except Exception as error:  # a user's world may fail in any way
        yield fails(f"config.env.name is {config.env.name!r}, whose tasks fail", error)


def main() -> None:
    answer_to, sys.stdout = sys.stdout, sys.stderr  # a world or library that prints must not spoil the JSON answer
    request = json.load(sys.stdin)
    config = default_config()
    with config.unlocked():
        config.update(request["config"])
    folder = request["checkpoints"]
    run = resolve(config)
    answer = inspect_run(run, request["devices"], Path(folder) if folder else None, request["platform"])
    answer["notes"] = []
    if not answer["problems"] and not answer["here"]:
        if not _is_fresh(run, folder):
            answer["notes"] += _messages(_words, run, here=answer["here"])
        answer["notes"] += _messages(notes_on_tasks, run.config, here=answer["here"])
        answer["problems"] += _messages(check_algorithms, run, here=answer["here"])
        answer["problems"] += _messages(check_episode, run, answer["notes"], here=answer["here"])
    json.dump(answer, answer_to)
    answer_to.flush()


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    print(__doc__) if "--help" in sys.argv else main()
