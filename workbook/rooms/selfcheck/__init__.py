"""Tests that planted faults are classified correctly and healthy runs as healthy."""
