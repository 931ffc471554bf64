"""The operators that workflows are made of, one module each, and the registry that finds them."""
