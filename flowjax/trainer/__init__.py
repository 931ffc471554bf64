"""The trainer: a whole run in `train.py`, a whole step in `update.py`."""
