"""The case study's figures, its claims, and the trials that settle them."""
