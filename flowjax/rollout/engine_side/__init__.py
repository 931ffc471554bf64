"""What runs inside vLLM's server, in whatever environment that lives: standard library, Starlette and vLLM only."""
