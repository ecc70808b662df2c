"""Reads the snapshots of torch.cuda.memory: plain lists and dicts, so no GPU is needed here."""

from dataclasses import dataclass

ROUNDING = 512  # bytes; the caching allocator's smallest block


@dataclass(frozen=True)
class Section:
    """One stretch: `events` (address, bytes; None: freed) out of a trace of `entries`."""

    events: list[tuple[int, int | None]]
    entries: int


def blocks_of(snapshot: dict, device: int) -> dict[int, int]:
    """Address and bytes of every block in use, as torch.cuda.memory_allocated counts them."""
    found = {}
    for segment in snapshot["segments"]:
        if segment["device"] != device:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                found[block.get("address", address)] = block["size"]
            address += block["size"]
    return found


def read_section(snapshot: dict, device: int) -> Section:
    """The allocations and frees of a snapshot's trace, with sizes as the statistics count them.

    A trace tells what was asked for. A block may be larger: rounded up to 512 bytes, or by up to
    1 MiB where the allocator found no use for the rest. Blocks still alive have their true size;
    for those that came and went only the rounding is known.

    A block counts as freed when that is requested, as in torch.cuda.memory_allocated, although
    another stream may still hold it.
    """
    traces = snapshot["device_traces"]
    trace = traces[device] if device < len(traces) else []
    alive = blocks_of(snapshot, device)
    settled: set[int] = set()
    events: list[tuple[int, int | None]] = []
    for entry in reversed(trace):
        action, address = entry["action"], entry["addr"]
        if action == "free_requested":
            events.append((address, None))
        elif action == "alloc":
            rounded = max(1, -(-entry["size"] // ROUNDING)) * ROUNDING
            true = alive.get(address, rounded) if address not in settled else rounded
            events.append((address, true))
        else:
            continue
        settled.add(address)
    return Section(events[::-1], len(trace))
