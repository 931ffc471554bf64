"""Data algorithms: what to play, what to keep, what to train on next. Any combination of them, in the order named."""
