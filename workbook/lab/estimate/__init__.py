"""Estimates of a training's memory, without running it."""
