"""Snapshots of torch.cuda.memory, as a GPU wrote them but smaller, to be read without one."""

BASE = 0x7F0000000000


def entry(action, offset, size):
    return {"action": action, "addr": BASE + offset, "size": size, "stream": 0, "time_us": 0}


def snapshot(trace, blocks, device=0):
    """One segment whose blocks lie one after the other, as [(state, size, requested)]."""
    described = [dict(zip(("state", "size", "requested_size"), x, strict=True)) for x in blocks]
    segment = {"device": device, "address": BASE, "stream": 0, "segment_type": "large"}
    segment |= {"total_size": sum(x["size"] for x in described), "blocks": described}
    return {"segments": [segment], "device_traces": [[] for _ in range(device)] + [trace]}
