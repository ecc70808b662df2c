"""Stability of a long training, and the effect of allocator settings."""
