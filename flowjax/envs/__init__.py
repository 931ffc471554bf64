"""Worlds that agents act in: one module each, with its task source and its scripted expert."""
