"""Rules of the code base that no linter knows; see `__main__`."""
