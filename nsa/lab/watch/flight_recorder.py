"""What only a stuck process itself can tell: its Flight Recorder, and its device's memory.

Written by a thread of the process when a supervisor asks (nsa.lab.watch.progress.ask): the main
thread may be inside a collective for good.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import sys
from pathlib import Path
from typing import Any

from nsa.lab.process import child

RECORDERS = "_dump_fr_trace", "_dump_nccl_trace"  # of gloo and of NCCL: each has its own
ENTRIES = 2000
LAST = 50  # of them are kept
FRAMES = 4
MEMORY = ("allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.current",
          "active.all.current", "inactive_split_bytes.all.current", "num_alloc_retries",
          "num_ooms")  # fmt: skip
ENVIRONMENT = {  # variables under which a process records its collectives
    "TORCH_FR_BUFFER_SIZE": str(ENTRIES),
    "TORCH_NCCL_TRACE_BUFFER_SIZE": str(ENTRIES),  # its name before torch 2.9
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # 1 destroys the record
    "TORCH_NCCL_ENABLE_TIMING": "1",  # tells which devices have begun a collective
}


def write(folder: Path, key: int | str) -> None:
    """Leaves flight-KEY.json, and on a GPU memory-KEY.json and memory-KEY.pickle, in `folder`."""
    with contextlib.suppress(Exception):
        child.put(folder / f"flight-{key}.json", {"entries": recorded()})
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        with contextlib.suppress(Exception):
            every = [torch.cuda.memory_stats(i) for i in range(torch.cuda.device_count())]
            held = {name: sum(stats.get(name, 0) for stats in every) for name in MEMORY}
            child.put(folder / f"memory-{key}.json", held)
            torch.cuda.memory._dump_snapshot(str(folder / f"memory-{key}.pickle"))


def recorded() -> list[dict[str, Any]]:
    """This process's last collectives, by recorder, oldest first; empty without a process group.

    Each: seq, op, p2p, state ("scheduled", "started", "completed"), group, ranks (of the group,
    where told), sizes, frames (innermost first, torch's own left out; none where torch would have
    to load its compiler to name them, which takes seconds of a process that should be seen at
    rest). gloo never says "completed" of an entry; the group's status does.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return []
    import torch._C._distributed_c10d as c10d

    named = "torch._inductor" in sys.modules
    dumps = [dump for name in RECORDERS if (dump := getattr(c10d, name, None))]
    return [entry for dump in dumps for entry in entries(pickle.loads(dump(True, named)))]


def entries(dumped: dict[str, Any]) -> list[dict[str, Any]]:
    """The last of what a recorder dumped, as `recorded` has them."""
    status, groups = dumped.get("pg_status", {}), dumped.get("pg_config", {})
    mine = dumped.get("entries", [])[-LAST:]
    return [_entry(entry, status) | _members(entry, groups) for entry in mine]


def _members(entry: dict[str, Any], groups: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    """The ranks of its group, where the recorder tells them."""
    group = str((entry.get("process_group") or ("",))[0])
    told = groups.get(group, groups.get("", {}) if group == "0" else {}).get("ranks")
    with contextlib.suppress(ValueError, TypeError):
        return {"ranks": json.loads(told)} if told else {}
    return {}


def _entry(entry: dict[str, Any], status: dict[Any, dict[str, int]]) -> dict[str, Any]:
    group = str((entry.get("process_group") or ("",))[0])
    sequence, state = entry.get("collective_seq_id"), entry.get("state")
    done = status.get(group, {}).get("last_completed_collective", -1)
    if sequence is not None and not entry.get("is_p2p") and sequence <= done:
        state = "completed"
    frames = entry.get("frames") or []
    frames = [f for f in frames if "torch/distributed" not in f["filename"]] or frames
    return {
        "seq": sequence,
        "op": entry.get("profiling_name"),
        "p2p": bool(entry.get("is_p2p")),
        "state": state,
        "group": group,
        "sizes": entry.get("input_sizes"),
        "frames": [f"{f['filename']}:{f['line']} {f['name']}" for f in frames[:FRAMES]],
    }
