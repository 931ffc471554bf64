"""Credit: pure functions from a table of turns to one advantage per turn.

This file imports no JAX, so that recipes and the checks of a launch can name estimators without it.
"""

# Name -> path of the function. Your own estimator is named by such a path in the config.
ESTIMATORS = {
    "best_of_group": "flowjax.credit.estimators:best_of_group",
    "discounted_return": "flowjax.credit.estimators:discounted_return",
    "dr_grpo": "flowjax.credit.estimators:dr_grpo",
    "gae": "flowjax.credit.estimators:gae",
    "gigpo": "flowjax.credit.estimators:gigpo",
    "grpo": "flowjax.credit.estimators:grpo",
    "maxrl": "flowjax.credit.estimators:maxrl",
    "pass_at_k": "flowjax.credit.estimators:pass_at_k",
    "published.gigpo": "flowjax.published.credit:gigpo",
    "published.grpo": "flowjax.published.credit:grpo",
    "published.rewardflow": "flowjax.published.credit:rewardflow",
    "published.rloo": "flowjax.published.credit:rloo",
    "reinforce_plus_plus": "flowjax.credit.estimators:reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "flowjax.credit.estimators:reinforce_plus_plus_baseline",
    "rewardflow": "flowjax.credit.estimators:rewardflow",
    "rloo": "flowjax.credit.estimators:rloo",
}

PASS_AT_K = 4  # default k of `pass_at_k`

# Estimators that compare the episodes of a group: with one episode each, this part of every advantage would be 0.
GROUP_RELATIVE = {
    *("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "maxrl", "pass_at_k", "best_of_group"),
    *("gigpo", "rewardflow", "published.grpo", "published.rloo", "published.gigpo", "published.rewardflow"),
}
