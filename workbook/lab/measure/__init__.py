"""Instruments: timing, memory, accuracy, shapes, physical limits, operations counted."""
