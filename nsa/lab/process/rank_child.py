"""The inside of one rank: `torchrun ... -m nsa.lab.process.rank_child ENTRY SPEC FOLDER`.

Calls ENTRY ("package.module:function") with the JSON object in the file SPEC and leaves in FOLDER
rank-K.json: {"status": "ok", "result": ...}, or "oom" or "error" with a message and the traceback's
tail. It appears whole or not at all. On SIGUSR1 every thread's stack goes to stacks-K.txt.
"""

import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from nsa.lab.process import atomic
from nsa.lab.process.family import die_with_parent, let_others_look
from nsa.lab.process.out_of_memory import is_out_of_memory

FOLDER = "NSA_RANK_FOLDER"
TAIL_LINES = 30


def standing(place: str) -> None:
    """Tells the supervisor where this rank stands; outside a launch it does nothing."""
    if FOLDER in os.environ:
        content = {"place": place, "pid": os.getpid(), "since": time.time()}
        put(Path(os.environ[FOLDER], f"place-{os.environ['RANK']}.json"), content)


def put(path: Path, content: dict) -> None:
    """Writes JSON that appears whole or not at all."""
    atomic.write(path, json.dumps(content))


def failure(error: BaseException) -> dict:
    """An exception as a record: status, message, tail of the traceback, when."""
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    lines = "".join(traceback.format_exception(error)).splitlines()
    return {
        "status": "oom" if is_out_of_memory(error) else "error",
        "message": f"{type(error).__name__}: {error}{notes}",
        "traceback": "\n".join(lines[-TAIL_LINES:]),
        "time": time.time(),
    }


def main(entry: str, spec_file: str, folder: str) -> int:
    """Runs the rank; 0 if `entry` returned, else 1."""
    die_with_parent()
    let_others_look()
    rank = os.environ["RANK"]
    os.environ[FOLDER] = folder
    stacks = open(Path(folder, f"stacks-{rank}.txt"), "w")  # noqa: SIM115  open as long as we live
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    standing("starting")
    try:
        module, _, name = entry.partition(":")
        spec = json.loads(Path(spec_file).read_text(encoding="utf-8"))
        outcome = {"status": "ok", "result": getattr(importlib.import_module(module), name)(spec)}
    except BaseException as error:  # SystemExit and KeyboardInterrupt end a rank like any other
        outcome = failure(error)
    put(Path(folder, f"rank-{rank}.json"), outcome)
    return 0 if outcome["status"] == "ok" else 1


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        code
    )  # the threads of a process group that an error left open would abort a plain exit
