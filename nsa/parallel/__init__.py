"""One sequence on several ranks: docs/parallel.md. Its names are imported from their modules."""
