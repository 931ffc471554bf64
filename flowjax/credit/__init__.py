"""Credit: pure functions from a table of turns to one advantage per turn."""
