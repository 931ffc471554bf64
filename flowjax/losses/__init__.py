"""Losses: pure functions from log-probabilities and advantages to a sum and its denominator."""
