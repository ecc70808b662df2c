"""Every backend beside the others and dense attention: tables, figures, sentences."""
