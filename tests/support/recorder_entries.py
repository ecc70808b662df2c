"""Entries as torch's Flight Recorder dumps them, and one that no reader may trust."""

import pytest


def entry(seq, op="nccl:all_reduce", state="scheduled", **more):
    return {"collective_seq_id": seq, "profiling_name": op, "state": state, "pg_id": 3,
            "process_group": ("7", "data"), "is_p2p": False, **more}  # fmt: skip


class Runs:
    """A pickle that would run code."""

    def __reduce__(self):
        return pytest.exit, ("code of a dump was run",)
