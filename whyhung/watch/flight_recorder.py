"""Data that only the stuck process itself can read: its Flight Recorder, and its device's memory.

Written by a thread of the process on a supervisor's request (whyhung.watch.layout.ask), since the
main thread may be inside a collective forever. Dumps that torch wrote are read by `loads`.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whyhung.process import child

RECORDERS = "_dump_fr_trace", "_dump_nccl_trace"  # of gloo and of NCCL, which record separately
ENTRIES = 2000
LAST = 50  # newest entries, all kept
OPEN = 150  # older uncompleted entries kept: the oldest shows for whom a rank waits
FRAMES = 8
MEMORY = ("allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.current",
          "active.all.current", "inactive_split_bytes.all.current", "num_alloc_retries",
          "num_ooms")  # fmt: skip
ENVIRONMENT = {  # variables under which a process records its collectives
    "TORCH_FR_BUFFER_SIZE": str(ENTRIES),
    "TORCH_NCCL_TRACE_BUFFER_SIZE": str(ENTRIES),  # its name before torch 2.9
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # 1 destroys the record
    "TORCH_NCCL_ENABLE_TIMING": "1",  # records which devices have begun a collective
}


def write(folder: Path, key: int | str) -> None:
    """Write flight-KEY.json, and on a GPU memory-KEY.json and memory-KEY.pickle, to `folder`."""
    with contextlib.suppress(Exception):
        child.put(folder / f"flight-{key}.json", {"entries": recorded()})
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        with contextlib.suppress(Exception):
            every = [torch.cuda.memory_stats(i) for i in range(torch.cuda.device_count())]
            held = {name: sum(stats.get(name, 0) for stats in every) for name in MEMORY}
            child.put(folder / f"memory-{key}.json", held)
            if not (snapshot := folder / f"memory-{key}.pickle").exists():  # it may be large
                torch.cuda.memory._dump_snapshot(str(snapshot))


def recorded() -> list[dict[str, Any]]:
    """Last collectives of this process, by recorder, oldest first; empty without a process group.

    Rows as `entries` returns them, without frames if torch would have to load its compiler to name
    them: that takes seconds, in a process that should be seen at rest.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return []
    import torch._C._distributed_c10d as c10d

    named = "torch._inductor" in sys.modules
    dumps = [dump for name in RECORDERS if (dump := getattr(c10d, name, None))]
    return [row for dump in dumps for row in kept(entries(pickle.loads(dump(True, named))))]


def loads(data: bytes) -> dict[str, Any]:
    """Plain data of a dump, pickled or JSON. Nothing that it names is loaded or called.

    Raises ValueError if the data is truncated, names a class or a function, or is no dump.
    """
    try:
        dumped = json.loads(data) if data[:1] == b"{" else _Plain(io.BytesIO(data)).load()
    except Exception as error:  # damaged pickles raise nearly any type
        raise ValueError(f"{type(error).__name__}: {error}") from None
    if not isinstance(dumped, dict) or not isinstance(dumped.get("entries", []), list):
        raise ValueError(f"it holds {type(dumped).__name__}, not a recorder's entries")
    return dumped


class _Plain(pickle.Unpickler):
    """Unpickle lists, dicts, numbers and strings; refuse everything else."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not plain data")


def kept(rows: Sequence[dict[str, Any]], last: int = LAST) -> list[dict[str, Any]]:
    """Last rows, and the earlier ones that show which rank waits for which.

    These are the oldest uncompleted rows, and the last of each group.
    """
    before, after = list(rows[:-last]), list(rows[-last:])
    ends = {row.get("group"): number for number, row in enumerate(before)}
    still = [n for n, row in enumerate(before) if row.get("state") != "completed"][:OPEN]
    return [before[n] for n in sorted({*still, *ends.values()})] + after


def entries(dumped: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Plain rows of a recorder's dump, oldest first; fields that it lacks are None.

    seq, p2p_seq: numbers in the group, of collectives and of sends and receives; id: number in the
    recorder. op: as recorded, "nccl:all_reduce". p2p: True for a send or a receive. state:
    "scheduled", "started" (on the device) or "completed". group, desc: the group's name and
    purpose. ranks: its members, absent if unknown. sizes, out_sizes, dtypes: of inputs, outputs and
    inputs. frames: innermost first, without those of torch.distributed. retired: the recorder no
    longer watches it. created_ns, started_ns: time of day. timeout_ms.
    """
    status, groups = dumped.get("pg_status") or {}, dumped.get("pg_config") or {}
    members = {str(name): _listed(group.get("ranks")) for name, group in groups.items()}
    members.setdefault("0", members.get("", []))
    rows = [_row(one, status, members) for one in dumped.get("entries") or ()]
    together: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        together.setdefault((row["group"], row["p2p"], row["seq"], row["p2p_seq"]), []).append(row)
    for same in together.values():
        # of coalesced calls only the last, which represents all, is ever completed
        if "coalesced" in str(same[-1]["op"]):
            for row in same:
                row |= {"state": same[-1]["state"], "retired": same[-1]["retired"]}
    ended: set[tuple[Any, ...]] = set()  # a communicator ends its calls in their order
    for row in reversed(rows):
        line = row["group"], str(row["op"]).partition(":")[0], row["p2p"]
        if row["state"] == "completed":
            ended.add(line)
        elif line in ended and line[1:] == ("nccl", False):
            row["state"] = "completed"
    return rows


def everybody(dumped: Mapping[str, Any]) -> list[int]:
    """Ranks that a dump's groups name, sorted."""
    told = [_listed(one.get("ranks")) for one in (dumped.get("pg_config") or {}).values()]
    return sorted({rank for ranks in told for rank in ranks})


def _listed(told: Any) -> list[int]:
    """Ranks from a string like "[0, 1]" or from a list."""
    with contextlib.suppress(ValueError, TypeError):
        return [int(rank) for rank in (json.loads(told) if isinstance(told, str) else told)]
    return []


def _row(
    entry: Mapping[str, Any],
    status: Mapping[Any, Mapping[str, int]],
    members: Mapping[str, list[int]],
) -> dict[str, Any]:
    group = (*(entry.get("process_group") or ()), "", "")
    sequence = entry.get("collective_seq_id", entry.get("seq_id"))
    state, retired, op = entry.get("state"), entry.get("retired"), entry.get("profiling_name")
    if str(op).startswith("gloo:"):
        # gloo leaves the state at "scheduled". Group numbers in `pg_status` are local to this
        # process, and an entry has the same.
        mine = status.get(str(entry.get("pg_id"))) or {}
        over = sequence is not None and sequence <= mine.get("last_completed_collective", -1)
        state = "completed" if retired or (over and not entry.get("is_p2p")) else state
    frames = entry.get("frames") or []
    frames = [f for f in frames if "torch/distributed" not in f["filename"]] or frames
    return {
        "seq": sequence,
        "p2p_seq": entry.get("p2p_seq_id"),
        "id": entry.get("record_id"),
        "op": op,
        "p2p": bool(entry.get("is_p2p")),
        "state": state,
        "group": str(group[0]),
        "desc": str(group[1]),
        "sizes": entry.get("input_sizes"),
        "out_sizes": entry.get("output_sizes"),
        "dtypes": entry.get("input_dtypes"),
        "frames": [f"{f['filename']}:{f['line']} {f['name']}" for f in frames[:FRAMES]],
        "retired": retired,
        "created_ns": entry.get("time_created_ns"),
        "started_ns": entry.get("time_discovered_started_ns"),
        "timeout_ms": entry.get("timeout_ms"),
        # gloo's recorder does not record them
        **({"ranks": members[str(group[0])]} if members.get(str(group[0])) else {}),
    }
