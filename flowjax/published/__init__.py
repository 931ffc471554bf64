"""Choices of the published systems, their faults included, selected by name: for comparison, never the default."""
