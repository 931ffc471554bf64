"""Start, supervise and stop every role of a run from one config."""
