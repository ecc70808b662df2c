"""Training loops of other libraries with NSA, to run unchanged or to copy; docs/recipes.md."""
