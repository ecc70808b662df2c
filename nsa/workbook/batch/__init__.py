"""Batches: a plan of many runs, a driver that has them run in a place, a child a run."""
