"""Credit: pure functions from a table of turns to one advantage per turn."""

# Estimators that compare the episodes of a group: with one episode each, every advantage would be 0. Kept here, where
# it can be read without JAX.
GROUP_RELATIVE = {"grpo", "dr_grpo", "rloo", "gigpo", "rewardflow", "maxrl", "pass_at_k", "best_of_group"}
