"""The operators that workflows are made of, by how they work, and the registry that finds them."""
