"""Tests that every backend computes the definition, and that a defect would be detected."""
