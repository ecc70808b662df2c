import json
from dataclasses import replace

import pytest
from evidences import (
    STEPS,
    TRAIN,
    moving,
    oracle,
    p,
    process,
    resting,
    returned,
    snapshots,
    thread,
    trial,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT
from verdict_cases import (
    ALIVE,
    ALONE,
    CERTIFIED,
    ENDED,
    LOCKED,
    NEAR,
    OTHERS,
    OWN,
    QUIET,
    RANKS,
    SOCKET,
    rank,
    still,
    two,
)

from whyhung.process.observer import START_STALL_S
from whyhung.verdict import KINDS, Verdict, judge
from whyhung.verdict.opened import PATIENCE_S
from whyhung.verdict.rests import WAIT_S
from whyhung.verdict.stalls import place_of
from whyhung.watch.evidence import End, Evidence, P, Sample


@pytest.mark.parametrize("case", ALONE)
def test_each_evidence_has_its_verdict(case):
    evidence, expected = ALONE[case]
    verdict = judge(evidence)
    assert verdict.label == expected, verdict
    assert verdict.rule and verdict.because and all(verdict.because)
    # and the same from what a disk holds of it
    held = json.loads(json.dumps(evidence.to_dict()))
    assert judge(Evidence.from_dict(held)) == verdict
    assert Verdict.from_dict(json.loads(json.dumps(verdict.to_dict()))) == verdict


def test_its_seconds_count_from_its_first_step():
    """Start-up is left out, as in deadlines: 2.5 s of 8.5 are loading; 6 s of work are in time."""
    samples = [replace(s, t=s.t + 2.5) for s in moving(STEPS)]
    found = trial(samples, end=End("returned", 0), began_s=2.5, soft_s=7.0, losses=[1.0] * STEPS)
    numbers = judge(found).numbers
    assert numbers["seconds"] == pytest.approx(samples[-1].t - 2.5) and not numbers["late"]
    assert judge(replace(found, soft_s=5.0)).numbers["late"]


def test_one_step_too_few_is_an_early_return():
    verdict = judge(returned(losses=[1.0] * (STEPS - 1)))
    assert verdict.label == "CRASH:early-return"
    assert verdict.because == (f"it returned after {STEPS - 1} of {STEPS} steps",)


def test_ranks_that_differ_explain_what_is_not_finite_and_that_what_does_not_arrive():
    told = ("arrival", "finite", "ranks")
    broken = {name: oracle(False, f"{name} broken") for name in told}
    names = []
    while broken:
        verdict = judge(returned(oracles=dict(broken)))
        names.append(verdict.numbers["broken"][0])
        assert verdict.label == f"FAIL:{names[-1]} broken"
        del broken[names[-1]]
    assert names == ["ranks", "finite", "arrival"]


def test_what_is_read_of_a_dead_process_is_no_sign_of_life():
    evidence = still(process(thread(wait=LOCKED)))
    last = evidence.samples[-1]
    evidence.samples.append(Sample(last.t + 3, 0, p(9, fired=90), last.beats + 3, last.cpu_s))
    assert judge(evidence).label == "HANG:lock"


@pytest.mark.parametrize("case", RANKS)
def test_of_several_ranks_the_one_to_blame_is_named_with_its_line(case):
    evidence, expected, who, line = RANKS[case]
    verdict = judge(evidence)
    assert (verdict.label, verdict.numbers["where"], verdict.line) == (expected, who, line)


def test_a_rank_that_waits_for_one_that_moves_is_not_stalled():
    seen = [rank(0, LOCKED), rank(1, None, OWN)]
    assert judge(two(*seen, moves=[1], end=None)).label == "SLOW"
    # but a certificate holds, whatever the others do
    seen = [rank(0, LOCKED, [f"{TRAIN}:9 step"]), rank(1, None)]
    assert judge(two(*seen, moves=[1], end=None)).label == "HANG:lock"


def test_sizes_that_do_not_match_are_told_with_each_ranks_line():
    evidence, _, _, _ = RANKS["other sizes"]
    told = "\n".join(judge(evidence).because)
    assert "rank 0 calls all_reduce of [4] at train.py:2 step" in told
    assert "rank 1 all_reduce of [5] at train.py:2 step" in told


def test_a_certificate_must_be_the_same_at_every_look():
    """Another lock at each look: somebody let the one before go."""
    waits = [("lock", f"waits for lock {n}", OTHERS) for n in range(4)]
    evidence = still(each=[[process(thread(wait=wait))] for wait in waits])
    assert judge(evidence).kind != "HANG"


def test_a_longer_silence_in_the_runs_own_history_makes_it_more_patient():
    """It was silent for 10 s before, so 18 s tell nothing yet."""
    samples = [*moving(3), *resting(3, 10, at=p(2, fired=9)), *resting(13.25, 18, **QUIET)]
    evidence = trial(samples, snapshots(18.5, process(thread(wait=SOCKET))))
    assert judge(evidence).label == "INCONCLUSIVE:few-looks"
    samples += resting(31.5, 4, **QUIET)
    evidence = trial(samples, snapshots(18.5, process(thread(wait=SOCKET))))
    assert judge(evidence).label == "STALLED:socket"


def test_a_stall_tells_who_waits_for_whom_and_what_would_settle_it():
    evidence, _ = NEAR["its worker waits for another host"]
    verdict = judge(evidence)
    first, second = verdict.edges
    assert first["from"] == "rank 0" and first["to"] == ["process 7 (python train.py) of rank 0"]
    assert second["text"] == "reads a socket of 10.0.0.7:443" and second["outside"]
    assert verdict.line == "train.py:60 load" and "--pid 7" in verdict.settle[0]
    assert verdict.numbers["rested_s"] == pytest.approx(18.0)


@settings(max_examples=200, deadline=None)
@given(
    each_s=st.floats(0.5, 30), part=st.floats(0.25, 4), ticks=st.integers(1, 400),
    gil=st.booleans(), idle=st.booleans(), known=st.booleans(), late=st.floats(0, 3),
)  # fmt: skip
def test_slow_work_is_never_hang_at_any_deadline(each_s, part, ticks, gil, idle, known, late):
    """A step of `each_s` with `ticks` signs of progress, looked at and cut at part x its time."""
    start, deadline = 2.0 + late, each_s * part
    samples = [Sample(t / 4, 0, P(), int(2.5 * t), t / 4, "R") for t in range(int(4 * start))]
    for i in range(max(2, int(4 * deadline))):
        t = i / 4
        at = P(int(t / each_s), "backward", 9, int(ticks * (t % each_s) / each_s), ticks, phases=2)
        cpu, state = (start, "S") if idle else (start + t, "R")
        how = "hrtimer_nanosleep" if idle else ""
        samples.append(Sample(start + t, 0, at, int(10 * (start + t)), cpu, state, how))
    last = samples[-1]
    wait = LOCKED if idle and gil else SOCKET if idle else None
    seen = snapshots(last.t - 3.5, process(thread(wait=wait)), at=last.p)
    predicted = {"predicted_s": STEPS * each_s, "soft_s": 18 * each_s} if known else {}
    gap = each_s / ticks
    evidence = trial(samples, seen, began_s=start, stall_s=max(5.0, 10 * gap), **predicted)
    assert judge(evidence).kind in ("SLOW", "INCONCLUSIVE")


@pytest.mark.parametrize("part", [0.25, 0.5, 1, 2, 4])
def test_a_deadline_moves_slow_work_only_between_slow_and_done(part):
    """One token at a time: 51 s a step, a deadline of any length."""
    seconds = 51 * part
    verdict = judge(
        trial(moving(seconds, each_s=51.0), snapshots(seconds - 2, process()), soft_s=10.0)
    )
    assert verdict.kind == "SLOW"
    assert verdict.numbers["fraction"] == pytest.approx(part / STEPS, abs=0.1)


def test_the_signature_of_a_fault_is_the_same_wherever_the_steps_end():
    deep = p(5, fired=40, total=900)
    stuck = process(thread(wait=LOCKED))
    one, other = judge(still(stuck)), judge(still(stuck, at=deep))
    assert one.signature == other.signature == "HANG:lock at backward, train.py never_ends"
    assert judge(ENDED["an exception"][0]).signature != judge(ENDED["an early exit"][0]).signature


def test_the_place_of_an_exception_is_its_own_code():
    traced = (
        'Traceback (most recent call last):\n  File "/home/someone/train.py", line 12, in step\n'
        '    x()\n  File "/usr/lib/python3/site-packages/torch/nn/x.py", line 7, in forward\n'
    )
    end = End("exception", 1, "RuntimeError", "shapes", traced, first_rank=1)
    verdict = judge(trial(moving(2), end=end))
    assert verdict.signature == "CRASH:RuntimeError at train.py step"
    assert "rank 1 was the first to fail" in verdict.because


TORCH, COUNTED = "/x/site-packages/torch", "/x/whyhung/watch/counting.py:9 counted"


@pytest.mark.parametrize(
    ("frames", "place"),
    [
        ([f"{TORCH}/a.py:1 f"], "a.py f"),
        (["libc.so:0 wait"], ""),
        ([f"{TORCH}/nn/linear.py:1 forward", COUNTED, "/mine/model.py:3 forward"],
         "model.py forward"),
        ([f"{TORCH}/autograd/graph.py:8 f", COUNTED, "/mine/a.py:3 step"], "a.py step"),
    ],
)  # fmt: skip
def test_neither_a_library_nor_what_counts_a_module_is_where_it_rests(frames, place):
    assert place_of(frames) == place


def test_slow_work_is_told_with_its_rate_and_what_is_left():
    verdict = judge(trial(moving(20, each_s=10.0)))
    assert verdict.numbers["steps_per_s"] == pytest.approx(0.05, rel=0.1)
    assert verdict.numbers["eta_s"] == pytest.approx(40, rel=0.15)
    assert verdict.numbers["ratio"] == pytest.approx(30, rel=0.15)
    assert any("x its prediction" in line for line in verdict.because)


def test_a_hang_tells_what_it_read():
    verdict = judge(still(process(thread(wait=LOCKED))))
    told = "\n".join(verdict.because)
    assert "no progress for 18.0 s, at step 3 backward, 12 modules, node 4 of 203" in told
    assert "rank 0 waits for a lock, at train.py:31 never_ends" in told
    assert "nobody is left who could end this" in told


def test_every_kind_can_be_reached():
    every = [*ENDED.values(), *ALIVE.values(), *CERTIFIED.values(), *NEAR.values()]
    found = {judge(evidence).kind for evidence, _ in every}
    assert {*found, "FLAKY", "INVALID"} == set(KINDS)
    with pytest.raises(ValueError, match="kind='HUNG' is none of PASS"):
        Verdict("HUNG")


def test_the_documentation_tells_the_limits_that_the_rules_have():
    told = (ROOT / "whyhung/README.md").read_text()
    assert f"after {WAIT_S:g} s of quiet" in told and PATIENCE_S == 120 and "two minutes" in told
    evidence = Evidence()
    assert f"({evidence.stall_s:g} s; {START_STALL_S:g} s before the first step)" in told


def test_a_poll_of_a_run_that_goes_on_is_given_longer_than_other_waits():
    evidence, label = ALONE["it looks for something twice a second"]
    assert judge(evidence).label == label == "STALLED:polling"  # it was ended
    assert judge(replace(evidence, end=None)).kind == "INCONCLUSIVE"
    samples = [replace(s, t=s.t + 60.0 * (s.t > 18.0)) for s in evidence.samples]
    late = replace(evidence, samples=samples, seconds=90.0, end=None)
    assert judge(late).label == "STALLED:polling"
