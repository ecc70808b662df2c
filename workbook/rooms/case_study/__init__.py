"""The case study: its figures, its loop rebuilt, its step-5 hang, its claims settled."""
