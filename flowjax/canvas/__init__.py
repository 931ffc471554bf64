"""Workflows of operators as values: built, edited, drawn and run with any OpenAI-compatible backend."""
