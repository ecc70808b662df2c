"""Batches: a plan of many runs, a driver that runs them in a place, and a child for each run."""
