"""The definition, the oracle and the mutants: tables, figures, sentences."""
