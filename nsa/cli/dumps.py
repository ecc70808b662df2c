"""`nsa dumps`: who is guilty, by the Flight Recorders of a job that is gone."""

import json
from pathlib import Path

from nsa.cli.options import FAILED, GOOD, command


def add(commands) -> None:
    """Its parser."""
    made = command(commands, dumps, "--json")
    text = (
        "with dumps of torch's Flight Recorder, also in folders below it; their names end in a rank"
    )
    made.add_argument("folder", metavar="FOLDER", help=text)


def dumps(arguments) -> int:
    """Read the Flight Recorder dumps that a job left, and name the ranks that held it up: behind,
    absent, in another call, or with a device that never reported an end. Exit code 1 if something
    stands, 0 if nothing does, 2 if nothing can be read."""
    from whyhung.verdict import gone
    from whyhung.verdict.guilt import blame
    from whyhung.watch.dumps import read

    folder = Path(arguments.folder)
    told = read(folder)
    found = blame(told.flights, told.world, told.unread, told.moving)
    if arguments.json:
        files = {str(rank): str(file) for rank, file in sorted(told.files.items())}
        refused = {str(file): why for file, why in told.refused.items()}
        absent = sorted({*told.world} - told.flights.keys())
        print(json.dumps({**gone.to_dict(found), "files": files, "refused": refused,
                          "absent": absent, "notes": told.notes}, indent=2))  # fmt: skip
    else:
        print(gone.page(found, told), end="")
    return FAILED if found.guilty or (found.suspects and not told.moving) else GOOD
