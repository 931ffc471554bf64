"""Backends that answer the operators: any OpenAI-compatible endpoint, the run's own engine, or an offline stand-in."""
