"""Planted faults, and controls that only look like some: the lab's own test.

Each is a subject that a supervisor runs and a judge judges without knowing what was planted.
`registry` says what each plants.
"""
