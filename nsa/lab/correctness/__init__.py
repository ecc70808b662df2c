"""The definition drawn, the oracle, tasks, and mutants of the code."""
