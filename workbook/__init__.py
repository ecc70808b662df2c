"""Workbook of Native Sparse Attention: instruments, stored runs, rooms of experiments, commands."""

from nsa.attention import known

known.add("sequential", "workbook.lab.sequential")  # an exhibit, which the library goes without
