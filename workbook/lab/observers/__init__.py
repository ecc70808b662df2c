"""Observers, passed to a trainer to record its training; a training without any has no overhead."""
