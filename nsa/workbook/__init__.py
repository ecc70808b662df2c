"""Running notebooks, keeping what they found, and showing it."""
