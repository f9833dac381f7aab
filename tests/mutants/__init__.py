"""Faults planted in the library one at a time, and the tests that see them: `python -m tests.mutants`."""
