"""The trainer: one visible loop (`loop.py`) over batches of token rows."""
