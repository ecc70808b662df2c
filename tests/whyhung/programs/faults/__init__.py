"""Subjects of trials with something planted in them, and controls that only look so.

Each is run and judged blind by `nsa trial selfcheck`, whose registry says what each plants.
"""
