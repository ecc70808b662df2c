"""One room a question: what is measured, what runs in a child, tables, claims, plots."""
