"""Accuracy of memory estimates of trainings, made before they run."""
