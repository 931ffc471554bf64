"""Code that runs inside vLLM's server, whatever environment it has: standard library, Starlette and vLLM only."""
