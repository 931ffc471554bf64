"""Episodes as async functions over named agents."""
