"""Episodes: the vLLM engine beside us, the client that asks it, and the service that plays."""
