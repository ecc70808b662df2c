"""The inside of a trial: `python -X faulthandler -m nsa.lab.process.child ENTRY SPEC RESULT`.

Calls ENTRY ("package.module:function") with the JSON object in the file SPEC and leaves in the file
RESULT {"status": "ok", "result": ...}, or the status "oom", "error" or "bad entry" with a message
and the traceback's tail. RESULT appears whole or not at all. Imports as little as it can.
"""

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback

from nsa.lab.process import atomic
from nsa.lab.process.family import die_with_parent, let_others_look
from nsa.lab.process.out_of_memory import is_out_of_memory

PATH = "NSA_TRIAL_PATH"
TAIL_LINES = 30


def main(entry: str, spec_file: str, result_file: str) -> int:
    """Runs the trial; 0 if `entry` returned, else 1."""
    die_with_parent()
    let_others_look()
    _volunteer_for_the_oom_killer()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # where a late trial stands
    known = set(sys.path)
    sys.path += [place for place in json.loads(os.environ.get(PATH, "[]")) if place not in known]
    outcome = _call(entry, spec_file)
    try:
        text = json.dumps(outcome)
    except (TypeError, ValueError) as error:
        outcome = _failure("error", error)
        outcome["message"] = f"{entry} returned what JSON cannot hold: {error}"
        text = json.dumps(outcome)
    atomic.write(result_file, text)
    return 0 if outcome["status"] == "ok" else 1


def _call(entry: str, spec_file: str) -> dict:
    module, _, name = entry.partition(":")
    try:
        with open(spec_file, encoding="utf-8") as file:
            spec = json.load(file)
        function = importlib.import_module(module)
        for part in name.split("."):
            if not hasattr(function, part):
                return {"status": "bad entry", "message": f"{module} has no {name!r}"}
            function = getattr(function, part)
        return {"status": "ok", "result": function(spec)}
    except BaseException as error:  # SystemExit and KeyboardInterrupt end a trial like any other
        return _failure("oom" if is_out_of_memory(error) else "error", error)


def _failure(status: str, error: BaseException) -> dict:
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    lines = "".join(traceback.format_exception(error)).splitlines()
    return {
        "status": status,
        "message": f"{type(error).__name__}: {error}{notes}",
        "traceback": "\n".join(lines[-TAIL_LINES:]),
    }


def _volunteer_for_the_oom_killer() -> None:
    # Short of memory, the kernel then takes the trial rather than the notebook that waits for it.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)  # to take torch apart takes as long as to load it
