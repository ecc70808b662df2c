"""Training loops of others with NSA in them, to be run as they are or copied; docs/recipes.md."""
