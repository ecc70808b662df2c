# due: STALLED:polling or HANG:polling or STALLED:file lock; line: prepare, __enter__; within: 60;
# runs: --poll 0.05 | --poll 1; set: first
# An earlier job was killed and left its lock file; this one asks 20 times a second if it is gone
# (soft locks on NFS).
import json
import pathlib
import time

import torch
from _shared import option


class SoftLock:
    """Holds a file by its being there, for file systems without flock."""

    def __init__(self, path, poll):
        self.path, self.poll = path, poll

    def __enter__(self):
        while True:
            try:
                self.path.open("x").close()
                return self
            except FileExistsError:
                time.sleep(self.poll)

    def __exit__(self, *error):
        self.path.unlink()


def prepare(folder, poll):
    with SoftLock(folder / ".lock", poll):
        if not (folder / "rows.json").exists():
            (folder / "rows.json").write_text(json.dumps(list(range(1000))))
    return json.loads((folder / "rows.json").read_text())


def main():
    poll = option("--poll", 0.05)
    folder = pathlib.Path("cache")
    folder.mkdir(exist_ok=True)
    (folder / ".lock").touch()  # what the killed job left
    print("fault", flush=True)
    rows = prepare(folder, poll)
    model = torch.nn.Linear(1, 1)
    for row in rows:
        model(torch.tensor([row / 1000])).backward()
    print("trained")


if __name__ == "__main__":
    main()
