import pytest

from whyhung.verdict.frames import folded, is_users, library, nearest, short, user_frames, user_line

THREADING = "/usr/lib/python3.11/threading.py:320 wait"
TORCH = "/x/.venv/lib/python3.11/site-packages/torch/nn/modules/module.py:1 _call_impl"
NUMPY = "/x/.venv/lib/python3.11/site-packages/numpy/core/numeric.py:9 dot"
TRAIN = "/home/someone/train.py:31 evaluate"


@pytest.mark.parametrize(
    ("frame", "whose"),
    [
        (THREADING, "threading"),
        ("/opt/conda/lib/python3.10/asyncio/events.py:80 _run", "asyncio"),
        ("/usr/lib64/python3.12/multiprocessing/queues.py:103 get", "multiprocessing"),
        ("/usr/lib/python3/dist-packages/six.py:3 f", "six"),
        (TORCH, "torch"),
        ("/src/pytorch/torch/_dynamo/eval_frame.py:5 f", "torch"),
        ("/w/whyhung/watch/inside.py:5 hook", "whyhung"),
        ("/w/whyhung/cli.py:5 main", "whyhung"),
        ("/w/tests/whyhung/programs/cpu/thread_pool.py:60 step", ""),
        ("<frozen importlib._bootstrap>:241 _call", "importlib"),
        ("<eval_with_key>.5:9 forward", "code made at run time"),
        ("/x/.venv/bin/torchrun:8 <module>", "a command"),
        ("futex_wait (libc.so.6)", "native code"),
        (TRAIN, ""),
        ("/home/someone/torch/train.py:3 f", ""),
        ("/home/someone/lib/metrics.py:3 f", ""),
        ("/w/nsa/model/train.py:60 step", ""),
        ("<string>:1 <module>", ""),
        ("<stdin>:1 <module>", ""),
        ("<ipython-input-3-ab>:1 <module>", ""),
        ("/tmp/ipykernel_12/345.py:1 <module>", ""),
        ("C:\\me\\train.py:3 f", ""),
    ],
)  # fmt: skip
def test_a_frame_is_the_users_or_somebody_elses(frame, whose):
    assert library(frame) == whose and is_users(frame) == (not whose)


def test_the_users_line_is_the_innermost_that_is_no_librarys():
    stack = [THREADING, TORCH, TRAIN, TORCH, "/home/someone/main.py:9 main"]
    assert user_line(stack) == "train.py:31 evaluate"
    own, inside = user_frames(stack)
    assert own == [TRAIN, "/home/someone/main.py:9 main"] and inside == [THREADING, TORCH]
    assert user_line([THREADING]) == user_line([]) == nearest([]) == ""


def test_a_program_that_is_an_installed_package_has_a_line_too():
    assert nearest([THREADING, TORCH, NUMPY]) == "numeric.py:9 dot"
    assert nearest([THREADING]) == "threading.py:320 wait"
    assert nearest([NUMPY, TRAIN]) == "train.py:31 evaluate"


def test_the_string_that_starts_a_spawned_worker_is_nobodys_line():
    spawn = "/usr/lib/python3.11/multiprocessing/spawn.py:122 spawn_main"
    assert user_line([THREADING, spawn, "<string>:1 <module>"]) == ""
    assert user_line([THREADING, "<string>:1 <module>"]) == "<string>:1 <module>"


def test_a_file_whose_name_tells_little_has_its_folder():
    assert short("/home/someone/tool/__main__.py:3 main") == "tool/__main__.py:3 main"
    assert short("/tmp/ipykernel_12/345.py:1 <module>") == "ipykernel_12/345.py:1 <module>"
    assert short("what is no frame") == "what is no frame"


def test_other_frames_are_counted_by_whose_they_are():
    assert folded([THREADING, TORCH, THREADING]) == "2 frames of threading, 1 of torch"
    assert folded([TORCH]) == "1 frame of torch" and folded([]) == ""
