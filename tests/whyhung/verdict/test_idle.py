"""A program that waits to be asked is idle; one that waits for an answer stands still."""

from evidences import p, process, thread
from verdict_cases import still

from whyhung.verdict import judge
from whyhung.verdict.headline import headline
from whyhung.verdict.idle import idle
from whyhung.watch.evidence import OUTSIDE, P, Wait

LIB, SITE = "/usr/lib/python3.11", "/x/lib/python3.11/site-packages"
LOOP = (f"{LIB}/selectors.py:468 select", f"{LIB}/asyncio/base_events.py:1898 _run_once",
        f"{LIB}/asyncio/base_events.py:608 run_forever")  # fmt: skip
KERNEL = (*LOOP, f"{SITE}/tornado/platform/asyncio.py:205 start",
          f"{SITE}/ipykernel/kernelapp.py:758 start",
          f"{SITE}/ipykernel_launcher.py:18 <module>")  # fmt: skip
SERVER = (f"{LIB}/selectors.py:415 select", f"{LIB}/socketserver.py:232 serve_forever",
          "/home/someone/serve.py:9 <module>")  # fmt: skip
FETCH = (*LOOP, f"{LIB}/asyncio/runners.py:190 run", "/home/someone/train.py:31 fetch")
INPUT = ("/home/someone/ask.py:3 <module>",)
REQUEST = Wait("event", "its event loop has nothing to do: waits for a TCP socket", outside=True)
LISTENS = Wait("socket", "waits for a connection to TCP socket 0.0.0.0:80", outside=True)
ANSWER = Wait("socket", "waits for a TCP socket to 10.0.0.7:443", outside=True)
BEFORE, WITHIN = P(phase=OUTSIDE), p(step=3)


def said(frames, wait, at=BEFORE):
    return idle(process(thread(wait=wait, frames=frames)), at)


def test_a_kernel_a_server_and_a_prompt_are_idle():
    for case in ((KERNEL, REQUEST), (SERVER, LISTENS), (SERVER, ANSWER), (FETCH, LISTENS)):
        assert said(*case) == "waits for the next request", case
    own = Wait("event", "waits for an event of its own process", ((1, 0),))  # of ZeroMQ's thread
    assert said(KERNEL, own) == said(LOOP, REQUEST) == "waits for the next request"
    assert said(INPUT, Wait("terminal", "reads the terminal /dev/pts/0", outside=True))


def test_who_waits_for_an_answer_is_not():
    cell = ("/tmp/ipykernel_12/1.py:2 <module>", *KERNEL)  # a cell of a notebook that runs
    for case in (
        (FETCH, ANSWER), (FETCH, ANSWER, WITHIN), (LOOP, REQUEST, WITHIN), (cell, LISTENS),
        (INPUT, LISTENS), (KERNEL, None), ((), REQUEST),
    ):  # fmt: skip
        assert said(*case) == "", case
    assert idle(None, BEFORE) == ""


def test_the_verdict_says_so_and_accuses_nobody():
    served = still(process(thread(wait=LISTENS, frames=SERVER)))
    found = judge(served)
    assert found.label == "INCONCLUSIVE:idle"
    assert headline(served, found).startswith("it is idle: rank 0 waits for the next request")
    assert judge(still(process(thread(wait=ANSWER, frames=FETCH)))).label == "STALLED:event"
