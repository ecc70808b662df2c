"""Who is guilty of a hang, told from simulated jobs: all of them are named, and nobody else."""

import json

import pytest
from jobs import Call, Job

from nsa.lab.verdict.guilt import blame
from nsa.lab.watch.dumps import read

SEEDS = range(6)


def place_of(job, rank, deep=0.4):
    """Some call of a rank's program that is a collective, not in its first part."""
    program = job.ranks[rank].program
    places = [n for n, call in enumerate(program) if call.group and call.peer is None]
    return job.random.choice(places[int(len(places) * deep) :])


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


FAULTS = [stop, two_stop, die, unreported, reorder, other_call, healthy]


def judged(job, folder):
    told = read(folder)
    return blame(told.flights, told.world, told.unread)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_all_guilty_ranks_are_named_and_no_other(fault, seed, tmp_path):
    job = Job(seed)
    truth = fault(job)
    if truth is None:
        pytest.skip("this layout has no such calls")
    job.run()
    # who was stuck before its own fault came is a victim like others
    truth = {rank for rank in truth if job.ranks[rank].at >= (job.ranks[rank].stops_at or 0)}
    active, timed = job.random.random() < 0.5, job.random.random() < 0.5
    job.dump(tmp_path, active, timed, nodes=job.random.choice([1, 2]))
    found = judged(job, tmp_path)
    assert {one.rank for one in found.guilty} == truth, json.dumps([b.why for b in found.guilty])
