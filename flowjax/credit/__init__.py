"""Credit: pure functions from a table of turns to one advantage per turn.

What a command says about estimators before it needs JAX is kept here.
"""

# Name -> where it is. One's own are named by such a path.
ESTIMATORS = {
    "best_of_group": "flowjax.credit.episode:best_of_group",
    "discounted_return": "flowjax.credit.returns:discounted_return",
    "dr_grpo": "flowjax.credit.episode:dr_grpo",
    "gae": "flowjax.credit.rewardflow:gae",
    "gigpo": "flowjax.credit.returns:gigpo",
    "grpo": "flowjax.credit.episode:grpo",
    "maxrl": "flowjax.credit.episode:maxrl",
    "pass_at_k": "flowjax.credit.episode:pass_at_k",
    "published.gigpo": "flowjax.published.gigpo:gigpo",
    "published.grpo": "flowjax.published.gigpo:grpo",
    "published.rewardflow": "flowjax.published.rewardflow:rewardflow",
    "published.rloo": "flowjax.published.gigpo:rloo",
    "reinforce_plus_plus": "flowjax.credit.returns:reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "flowjax.credit.episode:reinforce_plus_plus_baseline",
    "rewardflow": "flowjax.credit.rewardflow:rewardflow",
    "rloo": "flowjax.credit.episode:rloo",
}

# Estimators that compare the episodes of a group: with one episode each, every advantage would be 0.
GROUP_RELATIVE = {"grpo", "dr_grpo", "rloo", "gigpo", "rewardflow", "maxrl", "pass_at_k", "best_of_group"}
