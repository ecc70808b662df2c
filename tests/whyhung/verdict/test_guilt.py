"""Guilty ranks of simulated jobs: all of them are named, and nobody else."""

import json
import os
import re
from itertools import count
from pathlib import Path

import pytest
from jobs import Call, Job
from places import ROOT

from whyhung.verdict.guilt import blame
from whyhung.watch.dumps import read


def stop(job):
    """A host that makes no more calls: it waits for a lock, or computes for ever."""
    rank = job.random.randrange(job.world)
    job.ranks[rank].stops_at = job.random.randrange(5, len(job.ranks[rank].program))
    return {rank}


def two_stop(job):
    """Two hosts that stop about the same time."""
    ranks = job.random.sample(range(job.world), 2)
    place = job.random.randrange(5, len(job.ranks[ranks[0]].program) // 2)
    for rank in ranks:
        job.ranks[rank].stops_at = place + job.random.randrange(6)
    return set(ranks)


def die(job):
    """A rank that is killed, and leaves no dump."""
    rank = job.random.randrange(job.world)
    job.ranks[rank].dies_at = job.random.randrange(5, len(job.ranks[rank].program))
    return {rank}


def unreported(job):
    """A device that gives its part to a collective and never reports the end."""
    rank = job.random.randrange(job.world)
    program = [call for call in job.ranks[rank].program if call.group]
    places = [n for n, c in enumerate(program) if c.peer is None and len(c.group.ranks) > 1]
    job.ranks[rank].breaks_at = job.random.choice(places[len(places) // 3 :])
    return {rank}


def reorder(job):
    """A rank that makes two calls of two groups in the other order."""
    rank = job.random.randrange(job.world)
    program = job.ranks[rank].program
    for n in range(len(program) // 3, len(program) - 1):
        one, two = program[n : n + 2]
        both = all(c.group and c.peer is None and len(c.group.ranks) > 2 for c in (one, two))
        if both and one.group is not two.group:
            program[n : n + 2] = two, one
            return {rank}
    return None


def other_call(job):
    """A rank that makes another call, or one of another size, where the others make theirs."""
    rank = job.random.randrange(job.world)
    places = [
        n
        for n, call in enumerate(job.ranks[rank].program)
        if call.op == "all_reduce" and len(call.group.ranks) > 2
    ]
    if not places:
        return None
    place = job.random.choice(places)
    group = job.ranks[rank].program[place].group
    op, size = job.random.choice([("broadcast", [1]), ("all_reduce", [77])])
    job.ranks[rank].program[place] = Call(op, group, size)
    return {rank}


def healthy(job):
    return set()


# Written after the rule was frozen.


def skip(job):
    """A rank that leaves one collective out, and goes on."""
    rank = job.random.randrange(job.world)
    program = job.ranks[rank].program
    places = [n for n, c in enumerate(program) if c.group and len(c.group.ranks) > 2]
    places = [n for n in places if program[n].peer is None]
    if not places:
        return None
    del program[job.random.choice(places)]
    return {rank}


def leave(job):
    """A rank whose data end a step early: it returns, and its dump holds completed calls."""
    rank = job.random.randrange(job.world)
    program = job.ranks[rank].program
    ends = [n for n, call in enumerate(program) if call.op == "sync"]
    job.ranks[rank].stops_at = ends[1] + 1
    return {rank}


def error(job):
    """A device that fails, still in some calls for its peers; its host ends a little later."""
    found = set()
    for rank in job.random.sample(range(job.world), job.random.choice([1, 2])):
        unreported_of(job, rank)
        mine = job.ranks[rank]
        mine.gives, mine.stops_at = job.random.randrange(1, 6), mine.breaks_at + 25
        found.add(rank)
    return found


def unreported_of(job, rank):
    program = [call for call in job.ranks[rank].program if call.group]
    places = [n for n, c in enumerate(program) if c.peer is None and len(c.group.ranks) > 1]
    job.ranks[rank].breaks_at = job.random.choice(places[len(places) // 3 :])


def asleep(job):
    """A kernel that never ends on one device, before some call; starts are recorded."""
    rank = job.random.randrange(job.world)
    job.ranks[rank].sleeps_at = job.random.randrange(10, len(job.ranks[rank].program) // 2)
    return {rank}


def die_and_stop(job):
    return die(job) | stop(job)


def logs(job):
    """Rank 0 waits for its device after every collective of all, and another one stops."""
    for place, call in reversed(list(enumerate(job.ranks[0].program))):
        if call.op == "all_reduce" and job.random.random() < 0.5:
            job.ranks[0].program.insert(place + 1, Call("sync", None, []))
    rank = job.random.randrange(1, job.world)
    job.ranks[rank].stops_at = job.random.randrange(5, len(job.ranks[rank].program))
    return {rank}


def lost(job):
    """One stops, and of another the dump is cut short."""
    truth = stop(job)
    job.cut = job.random.choice([r for r in range(job.world) if r not in truth])
    return truth


def small_ring(job):
    job.ring = 12
    return stop(job)


# Written after the rule had been repaired on these.


def two_die(job):
    return die(job) | die(job) if job.world > 2 else None


def batch(job):
    """Sends and receives made as one; a host stops, or a device never reports."""
    job.batched = True
    return job.random.choice([stop, unreported, die])(job)


def twins_stop(job):
    """Two ranks of one tensor group that stop at one place."""
    rank = job.random.randrange(0, job.world, 2)
    place = job.random.randrange(5, len(job.ranks[rank].program) // 2)
    for one in (rank, rank + 1):
        job.ranks[one].stops_at = place
    return {rank, rank + 1}


SURE = [stop, die, unreported, reorder, other_call, healthy, skip, leave, asleep, logs, small_ring,
        two_die, batch]  # fmt: skip
# With two faults one may hide the other, and of two ranks one that cannot be read tells nothing.
SOME = [two_stop, error, die_and_stop, lost, twins_stop]


def simulated(fault, seed, folder):
    """(guilty ranks, what is found); of the next layout that has what the fault needs."""
    for number in count(seed, 100):
        job = Job(number, loose=bool(seed % 2))
        if (truth := fault(job)) is not None:
            break
    job.run()
    active, timed = job.random.random() < 0.5, fault is asleep or job.random.random() < 0.5
    job.dump(folder, active, timed, nodes=job.random.choice([1, 2]))
    if fault is lost:
        (file,) = folder.rglob(f"nccl_trace_rank_{job.cut}")
        file.write_bytes(file.read_bytes()[:200])
    told = read(folder)
    struck = {rank for rank in truth if job.ranks[rank].struck() and not job.finished()}
    return struck, blame(told.flights, told.world, told.unread)


def named(found):
    return {one.rank for one in found.guilty}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fault", SURE)
def test_all_guilty_ranks_are_named_and_no_other(fault, seed, tmp_path):
    truth, found = simulated(fault, seed, tmp_path)
    assert named(found) == truth, [one.why for one in found.guilty]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fault", SOME)
def test_no_innocent_rank_is_named_where_one_fault_hides_another(fault, seed, tmp_path):
    truth, found = simulated(fault, seed, tmp_path)
    assert named(found) <= truth, [one.why for one in found.guilty]
    assert named(found) or not found.waits


TRACES = Path(os.environ.get("NSA_FR_TRACES") or ROOT.parent / "shared/corpora/fr_traces")
CASES = sorted(folder.name for folder in TRACES.glob("*") if folder.is_dir()) or ["none"]


@pytest.mark.parametrize("case", CASES)
def test_the_ranks_of_a_public_corpus_are_named(case):
    log = TRACES / case / "fault_injection.log"
    if not log.is_file():
        pytest.skip(f"the dumps are not in {TRACES}; NSA_FR_TRACES names another folder")
    truth = json.loads(re.search(r"Fault ranks: (\[.*\])", log.read_text())[1])
    told = read(TRACES / case)
    assert sorted(named(blame(told.flights, told.world, told.unread))) == truth


def call(seq, group="0", state="scheduled", ranks=(0, 1, 2), **more):
    given = {"op": "nccl:all_reduce", "p2p": False, "sizes": [[3]], "frames": [], "id": seq}
    return {**given, "seq": seq, "group": group, "state": state, "ranks": list(ranks), **more}


def test_who_is_named_stands_with_its_reason_and_its_line():
    at = ["/me/train.py:9 step"]
    waits = [call(1, state="completed"), call(2, frames=at)]
    found = blame({0: waits, 1: waits, 2: [call(1, state="completed")]})
    (one,) = found.guilty
    assert (one.rank, one.kind, one.waiting) == (2, "behind", (0, 1))
    assert one.why == (
        "rank 2 has not called all_reduce number 2 of all ranks, in which ranks 0 and 1 wait for "
        "it at train.py:9 step; the last that it called was all_reduce of [3]"
    )


def test_all_who_wait_are_told_though_one_of_them_waits_elsewhere_too():
    early = call(3, "b", ranks=[1, 2], created_ns=1)
    found = blame({0: [call(4)], 1: [early, call(4)], 2: [call(1, "c", "completed")]})
    assert found.guilty[0].waiting == (0, 1) and found.guilty[0].call.group == "0"


def test_of_a_job_that_still_runs_nobody_is_blamed():
    flights = {0: [call(4)], 1: [call(4)], 2: [call(3, state="completed")]}
    assert named(blame(flights)) == {2}
    found = blame(flights, moving=True)
    assert not found.guilty and "rank 2 has not called" in found.suspects[0]


def test_the_wait_is_followed_to_who_waits_for_nobody():
    flights = {
        0: [call(5, "a", ranks=[0, 1])],
        1: [call(7, "b", ranks=[1, 2])],  # not yet in "a"
        2: [call(9, "c", state="completed", ranks=[2, 3])],
    }
    found = blame(flights, range(4))
    assert named(found) == {2}
    assert {(wait.rank, wait.peer) for wait in found.waits} == {(0, 1), (1, 2)}


def test_where_all_are_in_one_call_nobody_is_named():
    found = blame({rank: [call(4)] for rank in range(3)})
    assert not found.guilty and "ranks 0 to 2 are in all_reduce number 4" in found.suspects[0]
    begun = {rank: [call(4, state="started" if rank else "scheduled")] for rank in range(3)}
    assert named(blame(begun)) == {0}


def test_a_dump_that_cannot_be_read_is_no_absence():
    flights = {0: [call(4)], 1: [call(4)]}
    assert named(blame(flights)) == {2}
    found = blame(flights, unread=[2])
    assert not found.guilty and "rank 2's dump cannot be read" in found.suspects[0]


def test_who_waits_for_a_failed_device_in_the_call_that_others_saw_end_is_innocent():
    flights = {
        0: [call(3), call(4)],  # its device had failed before
        1: [call(3, state="completed"), call(4)],
        2: [call(3, state="completed"), call(4, state="completed")],
    }
    assert named(blame(flights)) == {0}


def test_the_root_of_a_broadcast_may_see_the_end_before_the_others():
    flights = {0: [call(4, op="nccl:broadcast", state="completed")]}
    flights |= {rank: [call(4, op="nccl:broadcast")] for rank in (1, 2)}
    assert not blame(flights).guilty
    flights = {rank: [{**row[0], "op": "nccl:all_reduce"}] for rank, row in flights.items()}
    assert named(blame(flights)) == {1, 2}


def ahead(*lasts):
    """Each of four ranks has called numbers 4 to its last, and none of them has ended."""
    everybody = range(len(lasts))
    return {
        rank: [call(n, ranks=everybody) for n in range(4, last + 1)] or [call(1, "d", "completed")]
        for rank, last in enumerate(lasts)
    }


@pytest.mark.parametrize(
    ("lasts", "guilty"),
    [
        ((9, 4, 9, 0, 9), {1, 3}),  # 3 has called nothing; 1 has less reason to wait than others
        ((4, 9, 9, 0, 9), {3}),  # the first waits for its device to print a number
        ((9, 9, 9, 0, 4), {3}),  # or the last
        ((9, 7, 9, 0, 9), {3}),  # two calls fit into a queue
        ((9, 4, 4, 0, 9), {3}),  # who stands at one place waits there by its program
    ],
)
def test_who_called_less_than_all_peers_is_held_by_something_else(lasts, guilty):
    assert named(blame(ahead(*lasts))) == guilty


def send(peer, number, ranks=(0, 1, 2, 3), op="send", rank=0, **more):
    arrow = f"nccl:{op} {rank}{'->' if op == 'send' else '<-'}{peer}"
    return {**call(None, "pipe", ranks=ranks, id=number), "op": arrow, "p2p": True,
            "p2p_seq": number, "sizes": [[4096, 4096]], **more}  # fmt: skip


def test_in_a_round_who_went_less_far_than_its_twin_is_named():
    """0 and 1 are twins, and 2 and 3, which come after them: 1 has not called where 0 waits."""
    flights = {
        0: [send(3, 5, op="recv", rank=0), call(6, "a", ranks=[0, 1])],
        1: [send(2, 5, op="recv", rank=1)],
        2: [call(9, "b", ranks=[2, 3])],
        3: [send(0, 4, op="recv", rank=3)],
    }
    assert named(blame(flights)) == {1}


def test_exchanges_of_a_ring_that_all_have_begun_accuse_nobody():
    flights = {}
    for rank in range(3):
        after, before = (rank + 1) % 3, (rank - 1) % 3
        both = [send(after, 8, range(3), rank=rank), send(before, 8, range(3), "recv", rank)]
        flights[rank] = [{**row, "id": n} for n, row in enumerate(both, 30)]
    assert not blame(flights).waits
    assert named(blame({0: flights[0], 1: flights[1], 2: [call(1, state="completed")]})) == {2}


def test_a_device_that_has_not_begun_a_receive_is_named():
    flights = {0: [send(1, 8, (0, 1))], 1: [send(0, 8, (0, 1), "recv", 1)]}
    assert not blame(flights).guilty
    flights[0][0]["state"] = "started"
    assert [(one.rank, one.kind) for one in blame(flights).guilty] == [(1, "device")]


def test_what_a_blamed_rank_waits_for_accuses_nobody_else():
    flights = {
        0: [call(3), call(8, "b", ranks=[0, 3])],  # its device failed in 3
        1: [call(3, state="completed"), call(4)],
        2: [call(3, state="completed"), call(4)],
        3: [call(1, "c", "completed", ranks=[3])],
    }
    assert [(one.rank, one.kind) for one in blame(flights).guilty] == [(0, "device")]
