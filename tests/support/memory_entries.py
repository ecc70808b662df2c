"""Stand-in cells that test_memory_cells.py runs in child processes: no model, every ending."""


def fake_cell(spec):
    """Ends as the cell's `seed` says."""
    if spec["cell"]["seed"] == 1:
        raise MemoryError("planted")
    if spec["cell"]["seed"] == 2:
        raise ValueError("planted")
    sizes = dict.fromkeys(("peak", "data", "forward", "backward", "optimizer"), 0.0)
    measured = {f"{name}_mib": 7.0 for name in sizes}
    return measured | {"step_ms": 3.0, "by_category_mib": {"activations": 5.0}, "parameters": 11}
