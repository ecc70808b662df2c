"""Memory of a training step: tables and sentences."""
