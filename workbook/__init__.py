"""Workbook of Native Sparse Attention: instruments, stored runs, rooms of experiments, commands."""
