"""Weights from the trainer to the engine: Orbax publication, PEFT folders, and the follower that hands them over."""
