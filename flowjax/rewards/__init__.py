"""Rewards: pure functions from the outcomes of episodes to one score per trajectory."""
