"""Memory of a training step: cells, what they hold, and what shapes predict."""
