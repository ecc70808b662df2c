"""Arrival of gradients by rank, with order and bucket."""
