"""A store of trials that two may share, and that no death and no full disk can break."""

import errno
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import alive, python, wait_until_gone

from whyhung.process import child, sources
from whyhung.process.runner import Spec
from whyhung.verdict import Verdict
from whyhung.watch.evidence import End, Evidence, P, Sample
from workbook.lab.search import ledger
from workbook.lab.search.ledger import Ledger


def spec(**settings):
    return Spec("stranger:Training", settings)


SPEC = spec(width=8)


@pytest.fixture
def tried(monkeypatch):
    """Trials without processes: who was tried, in order."""
    names = []

    def pretend(spec, *, folder, **options):
        names.append(spec.settings.get("width"))
        time.sleep(0.2)
        Path(folder).mkdir(parents=True)
        Path(folder, "stdout.txt").write_text("printed")
        sample = Sample(0.1, 0, P(2, "end", phases=3), 1)
        end = End("returned", 0)
        if spec.settings.get("full"):
            raise OSError(errno.ENOSPC, "No space left on device")
        if spec.settings.get("stopped"):
            end = End("stopped by the supervisor", -9, "caller")
        return Evidence(spec=spec.to_dict(), samples=[sample], losses=[1.0, 0.9, 0.8], end=end)

    monkeypatch.setattr(ledger.runner, "run", pretend)
    return names


def test_a_finished_trial_is_not_run_again(tmp_path, tried):
    first = Ledger(tmp_path).run(SPEC)
    again = Ledger(tmp_path).run(SPEC)
    assert tried == [8] and again[0] == first[0] and again[2] == first[2]
    assert again[1].to_dict() == first[1].to_dict()
    assert first[2].kind == "PASS" and (tmp_path / first[0] / "stdout.txt").exists()
    assert Ledger(tmp_path).get("nothing") is None


def test_another_deadline_or_setting_is_another_trial(tmp_path, tried):
    store = Ledger(tmp_path)
    ids = [store.run(SPEC)[0], store.run(SPEC, deadline_s=9.0)[0], store.run(spec(width=16))[0]]
    assert len(set(ids)) == 3 and tried == [8, 8, 16] and store.ids() == ids


def test_what_was_inconclusive_is_run_again_and_replaced(tmp_path, tried):
    store = Ledger(tmp_path)
    first, second = store.run(spec(stopped=True)), store.run(spec(stopped=True))
    assert first[2].kind == "INCONCLUSIVE" and len(tried) == 2
    assert store.ids() == [first[0]] == [second[0]] and store.get(first[0])


def test_again_runs_it_anew_and_keeps_what_was_there(tmp_path, tried):
    store = Ledger(tmp_path)
    first = store.run(SPEC)[0]
    (tmp_path / first / "stdout.txt").write_text("of the first")
    assert [store.run(SPEC, again=True)[0] for _ in range(2)] == [first, first]
    assert tried == [8] * 3 and store.ids() == [f"{first}-1", f"{first}-2", first]
    assert (tmp_path / f"{first}-1" / "stdout.txt").read_text() == "of the first"
    assert store.run(SPEC)[0] == first and len(tried) == 3 and store.get(f"{first}-2")
    store.run(spec(stopped=True)), store.run(spec(stopped=True), again=True)
    assert len(store.ids()) == 4  # an inconclusive one is replaced


def test_a_trial_whose_loaded_files_changed_is_another_one(tmp_path, tried):
    store, helper = Ledger(tmp_path / "store"), tmp_path / "helper.py"
    helper.write_text("x = 1")

    def loads(id, content):
        child.put(store.root / id / "loaded-0.json", {str(helper): content})

    first = store.run(SPEC)[0]
    loads(first, sources.hash_of(str(helper)))
    assert store.run(SPEC)[0] == first and tried == [8]
    helper.write_text("raise KeyError")
    second = store.run(SPEC)[0]
    assert second != first and tried == [8, 8] and store.ids() == [first, second]
    loads(second, sources.hash_of(str(helper)))
    assert store.run(SPEC)[0] == second and tried == [8, 8]
    loads(second, "changed while it ran")  # then nobody knows what was loaded
    assert store.run(SPEC)[0] not in (first, second)
    helper.unlink()
    assert store.run(SPEC)[0] not in (first, second) and len(tried) == 4
    helper.write_text("x = 1")
    assert store.run(SPEC)[0] == first and len(tried) == 4


def test_two_supervisors_run_a_trial_once(tmp_path, tried):
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: Ledger(tmp_path).run(SPEC), range(2))
    assert tried == [8] and one[0] == other[0] and one[2] == other[2]


def test_who_waits_for_another_can_be_stopped(tmp_path, tried):
    store, stop = Ledger(tmp_path), threading.Event()
    id = store.id(SPEC)
    with store._claimed(id, None):
        threading.Timer(0.2, stop.set).start()
        with pytest.raises(InterruptedError, match=f"another ran trial {id}"):
            store.run(SPEC, stop=stop)
    assert tried == []


def test_a_full_disk_is_told_and_costs_the_trial_in_flight_only(tmp_path, tried, monkeypatch):
    store = Ledger(tmp_path)
    kept = store.run(SPEC)[0]
    with pytest.raises(OSError, match=r"is full: trial .* is lost, the 1 before it are kept"):
        store.run(spec(full=True))

    def full(path, text):
        path.write_text(text[: len(text) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(ledger, "_write", full)
        with pytest.raises(OSError, match="free some space and run again") as error:
            store.run(spec(width=16))
    assert error.value.errno == errno.ENOSPC
    assert store.ids() == [kept] and store.get(kept)
    assert [p.name for p in tmp_path.iterdir() if p.name not in (kept, ".locks")] == []
    assert store.run(spec(width=16))[2].kind == "PASS"


def test_a_folder_that_was_never_finished_is_none(tmp_path):
    (tmp_path / "abc").mkdir()
    (tmp_path / "abc" / "evidence.json").write_text('{"seconds":')
    assert Ledger(tmp_path).get("abc") is None and Ledger(tmp_path).ids() == []
    place = Ledger(tmp_path).put("abd", Evidence(), Verdict("PASS"))
    assert place == tmp_path / "abd" and Ledger(tmp_path).ids() == ["abd"]


@pytest.mark.processes
@pytest.mark.full
def test_a_killed_supervisor_leaves_a_store_that_goes_on(tmp_path):
    pid, root = tmp_path / "pid", tmp_path / "store"
    unlike = Spec("subject_entries:unlike", {"pids": str(pid)})
    code = (
        "from workbook.lab.search.ledger import Ledger; from whyhung.process.runner import Spec; "
        f"Ledger({str(root)!r}).run({unlike!r}, stall_s=60.0)"
    )
    kept = Ledger(root).put("before", Evidence(), Verdict("PASS")).name
    supervisor = python(code)
    end = time.monotonic() + 60
    while not (pid.exists() and pid.read_text()) and time.monotonic() < end:
        time.sleep(0.02)
    supervisor.kill()
    supervisor.wait()
    child = int(pid.read_text())
    wait_until_gone([child])
    assert not alive(child)
    store = Ledger(root)
    assert store.ids() == [kept] and store.get(kept)[1].kind == "PASS"
    id, evidence, verdict = store.run(unlike, stall_s=60.0)
    assert verdict.kind == "PASS" and len(evidence.losses) == 3
    assert store.ids() == [kept, id]
