"""Training at speed: cells, ranks, loss curves, the profile of a step."""
