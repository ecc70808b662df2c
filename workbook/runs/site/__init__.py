"""Site: Sphinx pages of all runs, each with its notebook, and of comparisons of them."""
