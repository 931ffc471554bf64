"""An episode function of two agents: the first acts, the second is asked the same and only watched."""

from flowjax.workflows import AgentTurns, Played, record_turn


async def play(task, *, seed, env, agents, options):
    world = options.world
    observation = await env.reset(task, seed)
    prompt = world.prompt(observation, [], options.prompt)
    replies = {name: await agents[name].act(prompt) for name in ("first", "second")}
    action = world.parse_action(replies["first"].text, observation.legal_actions) or ""
    step = await env.step(action)
    outcome = dict.fromkeys(world.OUTCOMES, 0.0)
    parts = [
        AgentTurns(name, [record_turn(reply, observation, step, env_s=0.0)], outcome) for name, reply in replies.items()
    ]
    return Played(parts, outcome, "ok")
