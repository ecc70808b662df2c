import re
from dataclasses import replace
from pathlib import Path

import pages
import pytest

from whyhung.verdict import Verdict, judge
from whyhung.verdict.explain import page, strip, where
from whyhung.verdict.headline import headline
from whyhung.watch.evidence import End, Evidence, P, Process, Sample, Snapshot, Thread, Wait
from workbook.cli.main import main
from workbook.lab.search.ledger import Ledger

STEPS = 6
PRIVATE = re.compile(r"\b(beats?|rests?|rested|P)\b")


def moving(steps, *, each_s=1.0):
    """Samples of a rank that works."""
    return [
        Sample(i / 4, 0, P(int(i / 4 / each_s), "backward", 12, i % 4 + 1, 203), i, i / 4, "R")
        for i in range(4 * steps)
    ]


def returned():
    return Evidence({"subject": "x:y", "steps": STEPS}, samples=moving(STEPS), seconds=6.0,
                    end=End("returned", 0), losses=[1.0] * STEPS, began_s=0.0)  # fmt: skip


def hung(**more):
    """A lock taken twice, and everything else that a page can tell."""
    evidence, verdict = pages.lock()
    graph = {"ok": None, "detail": "too few | steps", "hint": "w1 never | learns"}
    evidence = replace(
        evidence,
        end=End("stopped by the supervisor", -15, "deadline", "still running after 20 s"),
        oracles={"finite": {"ok": True, "detail": "as it should be"}, "graph": graph},
        losses=[2.5, 2.25],
        notes=["process 7 could not be ended"],
        flights={0: [{"seq": 7, "op": "all_reduce", "state": "scheduled", "sizes": [[4096]],
                      "frames": list(pages.REDUCE)}]},
        again=returned(),
        **more,
    )  # fmt: skip
    evidence.spec["settings"] = {"layers": 2, "changes": {"dim": 64}}
    return evidence, verdict


def test_the_first_line_says_what_happened_in_plain_words_with_the_users_line():
    for case, first in {
        "lock": "HANG: rank 0 waits for a lock that it holds itself at train.py:31 evaluate",
        "ranks": "STALLED for 18 s: rank 1 waits in all_reduce at train.py:40 step for rank 0, "
                 "which is in\n  upload.py:12 put (reads from 10.0.0.7:443, "
                 "somebody who is not observed)",
        "busy": "SLOW for 18 s, not counted: worker 4121 of rank 0 computes, at bleu.py:8 score",
        "no ptrace": "STALLED for 18 s: rank 0 reads a socket to 10.0.0.7:443 "
                     "(somebody who is not observed)",
        "nothing": "INCONCLUSIVE: nothing was seen",
    }.items():  # fmt: skip
        assert page(*pages.CASES[case]()).startswith(first + "\n")


def test_a_run_that_moves_is_told_so():
    moves = Verdict("INCONCLUSIVE", "running", "not late", ["step 3 of 6"], line="train.py:3 f")
    assert headline(Evidence(), moves) == "it moves: step 3 of 6, at train.py:3 f"


@pytest.mark.parametrize("case", pages.CASES)
def test_a_users_line_or_rank_stands_in_the_first_five_lines(case):
    evidence, verdict = pages.CASES[case]()
    top = page(evidence, verdict, name="ab12").splitlines()[:5]
    assert any(verdict.label in line and "ab12" in line for line in top)
    if verdict.line or verdict.edges:
        assert (verdict.line or "rank 0") in "".join(top).replace("  ", " ")


@pytest.mark.parametrize("case", pages.CASES)
def test_a_page_is_bounded_fits_a_terminal_and_has_no_private_words(case):
    evidence, verdict = pages.CASES[case]()
    told = page(evidence, verdict, name="ab12")
    assert told == page(evidence, verdict, name="ab12")
    lines = told.splitlines()
    assert len(lines) < 120
    for line in lines:
        assert len(line) <= 100 and line == line.rstrip()
        assert not PRIVATE.search(line), line


def test_a_page_tells_threads_grouped_and_the_users_frames_first():
    told = page(*pages.lock())
    assert (
        """\
  rank 0, process 10 (python train.py), sleeps
    MainThread: waits for a lock that it holds itself
      train.py:31 evaluate
      from train.py:80 main, from train.py:99 <module>
    14 threads that idle in native code
"""
        in told
    )
    told = page(*pages.ranks_wait())
    assert (
        "      train.py:40 step\n        inside it: distributed_c10d.py:2810 all_reduce (2" in told
    )
    assert "MainThread: reads from 10.0.0.7:443" in told
    assert "Last lines of its output\n  epoch 3\n  saved model.pt\n" in told


def test_workers_and_other_children_are_told_with_their_rank():
    told = page(*pages.worker_deadlock())
    assert "  process 12 of rank 0 (python train.py), sleeps\n" in told
    assert "  process 13 of rank 0 (sleep 15), sleeps\n" in told
    assert told.index("rank 0, process 11") < told.index("process 12 of rank 0 (")


def test_a_time_is_told_once():
    wait = Wait("timer", "sleeps for another 26.8 s", left_s=26.8)
    edge = pages.edge("rank 0", "train.py:3 f", "timer", wait.text, left_s=26.8)
    process = Process(2, rank=0, threads=(pages.main_thread(2, pages.LOCKED, wait),))
    verdict = Verdict("SLOW", "timer", "it ends", edges=[edge], line="train.py:3 f")
    told = page(Evidence(snapshots=[Snapshot(1.0, (process,))]), verdict)
    assert told.startswith("SLOW: rank 0 sleeps for another 26.8 s at train.py:3 f\n")
    assert "    MainThread: sleeps for another 26.8 s\n" in told


def test_a_rank_that_has_ended_and_a_process_of_another_run_are_told_as_such():
    alive = Process(2, rank=0, state="S", threads=(pages.main_thread(2, pages.LOCKED),))
    dead = Process(2, rank=0, state="X")
    stranger = Process(9, of=-1, name="postgres", state="S", threads=(Thread(9, state="S"),))
    told = page(
        Evidence(snapshots=[Snapshot(1.0, (alive,)), Snapshot(2.0, (stranger, dead))]),
        Verdict("CRASH", rule="ended"),
    )
    assert (
        "  rank 0, process 2, has ended\n  process 9, not of this run (postgres), sleeps\n" in told
    )


def test_a_share_of_a_core_is_counted_between_two_snapshots():
    told = page(*pages.busy_worker())
    assert "process 4121 of rank 0 (python train.py), runs, 100% of a core" in told


def test_ranks_that_do_the_same_are_told_once_after_the_one_that_does_not():
    told = page(*pages.CASES["64 ranks"]())
    assert "each of ranks 0-2, 4-63 waits in all_reduce at train.py:40 step for rank 3" in told
    alike = "  ranks 0-2, 4-63 (python train.py), all alike; of the first: sleeps\n"
    assert told.index("  rank 3, process 103") < told.index(alike)
    assert told.count("python train.py") == 2


def test_threads_beyond_the_bound_are_counted():
    told = page(*pages.many_threads(3000))
    shown = len(re.findall(r"^    t\d+: ", told, re.MULTILINE))
    assert 10 < shown < 60 and f"... and {3000 - shown:,} threads more\n" in told


def test_who_has_many_threads_leaves_room_for_the_others():
    evidence, verdict = pages.many_threads(3000)
    other = Process(11, 10, threads=(pages.main_thread(11, pages.UPLOAD),))
    first = evidence.snapshots[0]
    evidence.snapshots[0] = replace(first, processes=(*first.processes, other))
    told = page(evidence, verdict)
    assert "process 11 of rank 0" in told and "upload.py:12 put" in told
    crowd = [Process(20 + n, 10, name=f"{'x' * n}", threads=other.threads) for n in range(500)]
    evidence.snapshots[0] = replace(first, processes=(*first.processes, *crowd))
    section = page(evidence, verdict).partition("Processes and threads\n")[2].partition("\n\n")[0]
    assert len(section.splitlines()) <= 60
    assert re.search(r"\.\.\. and 4\d\d processes with 3,\d\d\d threads more$", section)


def test_a_thread_of_this_tool_is_not_told():
    mine = Thread(3, "watcher", ours=True, frames=("/x/whyhung/watch/inside.py:3 run",))
    process = Process(2, rank=0, threads=(pages.main_thread(2, pages.LOCKED), mine))
    assert "watcher" not in page(
        Evidence(snapshots=[Snapshot(1.0, (process,))]), pages.nothing()[1]
    )


def test_what_could_not_be_read_is_said_with_what_would_help():
    told = page(*pages.no_ptrace())
    unknown = told[told.index("What is not known") :]
    assert "at which line it waits" in unknown
    assert "process 10: py-spy: permission denied; run it as root" in unknown
    evidence, verdict = pages.no_ptrace()
    why = evidence.snapshots[0].processes[0].message
    assert page(evidence, replace(verdict, unknown=[why])).count("permission denied") == 1


def test_a_silence_is_told_with_the_ways_to_teach_it_and_commands_that_settle_it():
    told = " ".join(page(*pages.ranks_wait()).split())
    for words in ("stall_s=", "whyhung.watch.event()", "(allowed now: 5 s;", "its longest before"):
        assert words in told
    assert "\n  py-spy dump --native --pid 10\n" in page(*pages.lock())
    assert "stall_s" not in page(returned(), Verdict("PASS"))


def test_a_page_tells_everything_else_that_was_seen():
    told = page(*hung(), name="abc123")
    for words in (
        "settings", "layers=2, changes.dim=64",
        "stopped by the supervisor (deadline): still running after 20 s",
        "step 3, backward, 12 modules done, node 4 of 96", "all_reduce", "[[4096]]",
        "train.py:40 step", "too few | steps", "hint", "w1 never | learns",
        "2: 2.5, 2.25", "Rerun for twice as long", "process 7 could not be ended",
        "longest silence allowed 5 s", "place: train.py",
    ):  # fmt: skip
        assert words in told


def test_a_page_with_much_to_say_fits_a_terminal():
    evidence, verdict = hung(preflight=["reason " * 40])
    evidence.oracles["graph"] = {"ok": False, "what": "graph-growth", "detail": "word " * 60}
    evidence = replace(evidence, end=End("exception", 1, "ValueError", "x " * 90, "at " * 90))
    for line in page(evidence, verdict).splitlines():
        assert len(line) <= 100 and line == line.rstrip()


def test_output_cannot_break_a_page():
    evidence, verdict = pages.ranks_wait()
    evidence.output = ["```", "\x1b[31mred\x1b[0m\r", "x" * 5000]
    told = page(evidence, verdict, markdown=True)
    assert "\x1b" not in told and "````text\n```\nred\n" in told and "x" * 99 not in told


def test_markdown_keeps_its_tables_whole_and_holds_the_picture():
    told = page(*hung(), name="abc123", markdown=True)
    assert told.startswith("### HANG: rank 0 waits for a lock that it holds itself")
    assert "**Who waits for whom**\n\n```text\nrank 0, at train.py:31 evaluate\n" in told
    assert "too few \\| steps" in told
    for table in re.findall(r"(?:^\|.*\n)+", told, re.MULTILINE):
        bars = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(bars) == 1
    assert told.count("```") % 2 == 0
    assert "in all\\_reduce" in page(*pages.ranks_wait(), markdown=True)  # no emphasis in a name


def cases():
    """Every evidence that the rules are tested with."""
    import verdict_cases

    tables = [
        x for name, x in vars(verdict_cases).items() if name.isupper() and isinstance(x, dict)
    ]
    return [case for table in tables for case in table.values() if isinstance(case, tuple)]


@pytest.mark.parametrize("markdown", [False, True])
def test_every_evidence_has_a_page(markdown):
    found = [case[0] for case in cases()]
    assert len(found) > 20
    for evidence in found:
        verdict, told = judge(evidence), page(evidence, markdown=markdown)
        assert verdict.label in told


def test_evidence_of_before_snapshots_has_a_page():
    frames = [pages.LOCKED[0], f"{pages.LIB}/site.py:3 main"]
    thread = {"name": "MainThread", "main": True, "active": True, "gil": True, "frames": frames}
    looks = [{"t": 9.0 + n, "rank": n % 2, "tool": "py-spy", "threads": [thread], "message": ""}
             for n in range(4)]  # fmt: skip
    looks.append(
        {"t": 14.0, "rank": 1, "tool": "native", "threads": [], "message": "not permitted"}
    )
    evidence = Evidence.from_dict({"spec": {"steps": 6}, "looks": looks, "seconds": 20.0})
    told = page(evidence, Verdict("HANG", "python-spin", "an older rule"))
    assert "  ranks 0-1, all alike; of the first:\n    MainThread: holds Python's interp" in told
    assert told.count("      train.py:31 evaluate\n") == 1
    assert "not permitted" in told


def test_the_strip_is_a_slope_for_slow_and_flat_for_hung():
    slow = strip(moving(6), 6, 6.0, width=12)
    still = [Sample(3 + i / 4, 0, P(3, "backward", 12, 4, 203)) for i in range(36)]
    hung = strip([*moving(3), *still], 6, 12.0, width=12)
    assert slow[0] < slow[5] < slow[-1] == "█"
    assert len(set(hung[4:])) == 1
    assert strip([Sample(0.0, 0, P())], 6, 0.0, width=4) == "    "


def test_a_coordinate_is_told_in_words():
    assert where(P()) == "before the first step, start"
    assert where(P(5, "backward", 3, 12, 96, 2, 7)) == (
        "step 5, backward, 3 modules done, node 12 of 96, 2 events, 7 collectives"
    )


def test_the_examples_of_the_documentation_are_pages():
    text = (Path(__file__).parents[3] / "whyhung" / "README.md").read_text()
    text = text.partition("## A job that is gone")[0]
    shown = re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    told = [page(*pages.CASES[case]()) for case in ("lock", "ranks", "busy")]
    assert len(shown) == 3
    for example, whole in zip(shown, told, strict=True):
        assert whole.startswith(example)


@pytest.fixture
def stored(tmp_path):
    """Puts trials where `nsa explain` finds them; asked(words...) is its exit code."""

    def asked(*words):
        return main(["explain", *words, "--trials", str(tmp_path)])

    def put(**trials):
        for name, (evidence, verdict) in trials.items():
            Ledger(tmp_path).put(name, evidence, verdict)
        return asked

    return put


def test_a_stored_trial_is_explained_by_id_beginning_or_folder(stored, tmp_path, capsys):
    asked = stored(aaa111=hung(), bbb222=(returned(), Verdict("PASS", rule="returned")))
    for words, code, told in (
        (["aaa1"], 1, "HANG: rank 0 waits for a lock that it holds itself at train.py:31"),
        (["latest"], 0, "PASS: returned\nPASS; rule: returned; trial bbb222\n"),
        ([str(tmp_path / "aaa111"), "--markdown"], 1, "### HANG: rank 0 waits"),
    ):
        assert asked(*words) == code
        assert capsys.readouterr().out.startswith(told)


def test_a_verdict_is_told_as_it_was_stored_unless_it_is_judged_again(stored, capsys):
    asked = stored(aaa111=(returned(), Verdict("SLOW", rule="an older rule")))
    asked("aaa111")
    assert "rule: an older rule" in capsys.readouterr().out
    asked("aaa111", "--again")
    assert "PASS; rule: returned, and every oracle holds" in capsys.readouterr().out


def test_a_trial_that_is_not_there_is_one_line(stored, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no runs are

    def refused(words, said):
        assert stored()(words) == 2
        assert said in capsys.readouterr().err

    one = returned(), Verdict("PASS")
    refused("abc", "no trials in")
    stored(aaa111=one, aaa222=one)
    refused("aaa", "'aaa' begins 2 trials: aaa111, aaa222; write more")
    refused("xyz", "no trial 'xyz' among 2")
    (tmp_path / "aaa111" / "evidence.json").write_text("{")
    refused("aaa111", "cannot be read")
