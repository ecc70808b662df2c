"""Comparison of backends: the fastest correct one at each shape."""
