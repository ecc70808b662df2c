"""Memory of a training step, and its growth with T."""
