"""Evidence is plain data: it survives JSON, and coordinates of progress can be compared."""

import json
import math
import pickle

import pytest

from whyhung.watch import flight_recorder
from whyhung.watch.evidence import (
    End,
    Evidence,
    P,
    Process,
    Sample,
    Snapshot,
    Thread,
    Wait,
    thinned,
)


def full():
    p = P(3, "backward", modules=8, fired=40, total=100, events=2, collectives=1, phases=9, made=7)
    wait = Wait("pipe", "reads a pipe", ((7, 0),), left_s=1.5, source="/proc/1")
    thread = Thread(1, "MainThread", True, "S", wait=wait, frames=("a:1 f",), gil=True, switches=3)
    seen = (Process(1, rank=0, threads=(thread,)), Process(7, of=0, message="not permitted"))
    return Evidence(
        spec={"subject": "a:b", "steps": 4},
        preflight=["the GPU is also used by process 1"],
        samples=[Sample(0.0, 0, P()), Sample(0.5, 0, p, 5, 0.4, "R", "", 100.0, 12.0)],
        snapshots=[Snapshot(0.6, seen, {0: p}, gpu_percent=3.0)],
        end=End("signal", -9, "SIGKILL", first_rank=1, out_of_memory="host", peak_mib=1.5),
        oracles={"finite": {"ok": True, "detail": ""}},
        flights={0: [{"seq": 3}], 1: []},
        locks={1: [{"tid": 1, "holders": [2]}]},
        reports=[{"label": "STALLED:pipe", "withdrawn": None}],
        losses=[1.0, math.nan, math.inf],
        again=Evidence(samples=[Sample(0.0, 0, p)]),
        notes=["one"],
    )


def test_evidence_is_the_same_after_json():
    told = full().to_dict()
    read = Evidence.from_dict(json.loads(json.dumps(told, allow_nan=False)))
    assert read.to_dict() == told
    assert read.samples == full().samples and read.snapshots == full().snapshots
    assert (read.end, read.flights) == (full().end, full().flights)
    assert math.isnan(read.losses[1]) and read.losses[2] == math.inf
    assert read.again.last() == full().samples[1].p


def test_looks_of_earlier_versions_are_read_as_snapshots():
    thread = {"name": "MainThread", "main": True, "active": True, "gil": True, "frames": ["a:1 f"]}
    look = {"t": 0.6, "rank": 1, "tool": "native", "threads": [thread], "p": {"step": 3}}
    (read,) = Evidence.from_dict({"looks": [look]}).snapshots
    main = read.of(1).main()
    assert (read.t, read.tool, read.p) == (0.6, "native", {1: P(3)})
    assert (main.name, main.frames, main.gil) == ("MainThread", ("a:1 f",), True)


def test_what_a_later_version_wrote_besides_is_passed_over():
    told = full().to_dict() | {"of tomorrow": 1}
    told["samples"][0]["of tomorrow"] = 2
    told["samples"][0]["p"]["of tomorrow"] = 3
    assert Evidence.from_dict(told).samples == full().samples


@pytest.mark.parametrize(
    "later",
    [
        P(5, "start"),
        P(4, "forward", modules=4),
        P(4, "backward", modules=3, fired=1, total=9),
        P(4, "forward", modules=3, events=1),
        P(4, "forward", modules=3, collectives=1),
        P(4, "forward", modules=3, phases=1),
        P(4, "optimizer", modules=3),
    ],
)
def test_a_coordinate_is_after_another_when_anything_more_was_done(later):
    first = P(4, "forward", modules=3)
    assert later.key() > first.key()


def test_a_step_counts_for_more_than_what_was_done_inside_the_one_before():
    assert P(5, "forward").key() > P(4, "end", modules=90, fired=70, total=70).key()


def test_a_node_made_is_a_move_but_no_place_to_compare_runs_by():
    assert P(made=1) != P() and P(made=1).key() == P().key()


def test_frozen_is_counted_from_the_first_sample_at_the_last_place():
    places = [P(0), P(1), P(1), P(1)]
    evidence = Evidence(samples=[Sample(float(t), 0, p) for t, p in enumerate(places)])
    evidence.samples.insert(2, Sample(1.5, 1, P(7)))
    assert evidence.frozen_s(0) == 2.0 and evidence.frozen_s(1) == 0.0
    assert evidence.ranks() == [0, 1] and evidence.last(1) == P(7) and evidence.last(9) == P()


def test_a_coordinate_reads_as_a_sentence():
    assert str(P(5, "backward", 8, 4, 203)) == "step 5 backward, 8 modules, node 4 of 203"


def test_thinning_keeps_the_moves_and_every_other_sample_of_each_rank():
    samples = [Sample(float(t), t % 2, P(t // 20)) for t in range(100)]
    kept = thinned(samples)
    assert 50 <= len(kept) < 75 and {s.p for s in kept} == {s.p for s in samples}
    assert {s.rank for s in kept} == {0, 1} and kept == sorted(kept, key=lambda s: s.t)


def test_both_flight_recorders_are_read(monkeypatch):
    import torch
    import torch._C._distributed_c10d as c10d

    def dump(name):
        entry = {"process_group": ("0", "default"), "collective_seq_id": 3, "profiling_name": name}
        return lambda *_: pickle.dumps({"entries": [entry]})

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(c10d, "_dump_fr_trace", dump("gloo:all_reduce"))
    monkeypatch.setattr(c10d, "_dump_nccl_trace", dump("nccl:all_reduce"), raising=False)
    assert [e["op"] for e in flight_recorder.recorded()] == ["gloo:all_reduce", "nccl:all_reduce"]
