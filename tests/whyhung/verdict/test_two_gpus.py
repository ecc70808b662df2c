"""Programs seen on two H100s are called what they were, and the guilty rank is named."""

import gzip
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from whyhung.verdict import judge
from whyhung.watch.evidence import Evidence

SEEN = Path(__file__).parents[2] / "support" / "two_gpus"
DUE = {  # the label, the rank to blame, and the function that the line names
    "both_receive_first": ("HANG:collective", (0, 1), "swap_halo"),
    "endless_kernel": ("STALLED:device", (1,), "augment"),
    "expert_exchange_splits": ("HANG:collective", (0, 1), "layer"),
    "lock_taken_twice": ("HANG:lock", (1,), "evict"),
    "rank_stopped": ("STALLED:stopped", (1,), "checkpoint_signal"),
    "two_groups_crossed": ("HANG:collective", (0, 1), "data_then_tensor"),
    "uneven_shards": ("HANG:collective", (0, 1), "epoch_loss"),
    "waits_for_key": ("STALLED:socket", (1,), "wait_for_vocabulary"),
}


@cache
def seen(name: str) -> Evidence:
    content = gzip.decompress((SEEN / f"{name}.json.gz").read_bytes())
    return Evidence.from_dict(json.loads(content))


@pytest.mark.parametrize("name", DUE)
def test_each_hang_has_its_kind_its_rank_and_its_line(name):
    label, ranks, function = DUE[name]
    verdict = judge(seen(name))
    assert verdict.label == label
    assert verdict.numbers["where"] in [f"rank {rank}" for rank in ranks]
    assert verdict.line.rpartition(".")[2].rpartition(" ")[2] == function


def test_healthy_ranks_that_others_wait_for_are_slow():
    for name in ("saves_on_rank0", "tokenizes_in_a_pool"):
        assert judge(seen(name)).label == "SLOW:uncounted", name


def test_who_has_not_called_a_collective_is_named_with_its_line():
    verdict = judge(seen("saves_on_rank0"))
    told = verdict.because[0]
    assert told.startswith("rank 0 has not called ") and verdict.line in told
    assert told.endswith(", working")


def test_without_records_of_collectives_nothing_is_certain():
    """The ranks' devices spin: it is said that they get nowhere, and not that they never will."""
    verdict = judge(replace(seen("uneven_shards"), flights={}, wait_s=0.5))
    assert verdict.label == "STALLED:device"


@pytest.mark.parametrize("works", [True, None])
def test_a_device_that_works_or_may_work_is_no_stall(works):
    evidence = seen("endless_kernel")
    looks = [
        replace(look, devices={r: use | {"works": works} for r, use in look.devices.items()})
        for look in evidence.snapshots
    ]
    assert judge(replace(evidence, snapshots=looks)).label == "SLOW:uncounted"


def test_without_functions_of_c_a_spinning_thread_is_taken_for_work():
    """py-spy may not look at them, or there is none: a guess would accuse a long computation."""
    evidence = seen("endless_kernel")
    looks = []
    for look in evidence.snapshots:
        processes = tuple(
            replace(p, threads=tuple(replace(t, native=()) for t in p.threads))
            for p in look.processes
        )
        looks.append(replace(look, processes=processes))
    assert judge(replace(evidence, snapshots=looks)).kind in ("SLOW", "INCONCLUSIVE")
