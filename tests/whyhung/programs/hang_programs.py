"""The programs of the benchmark, and what the comment at the top of each says is due.

A header is the first comment lines, up to the first that does not end in a semicolon:
`# due: HANG:lock or STALLED:lock; line: fetch, main; rank: 1; within: 60; set: first`.
"""

import dataclasses
import itertools
import pathlib
import sys

FOLDER = pathlib.Path(__file__).parent
GROUPS = "cpu", "gpu"
KEYS = {"due", "line", "rank", "within", "quiet", "ranks", "spawns", "runs", "set"}
SETS = "first", "late"


@dataclasses.dataclass(frozen=True)
class Program:
    """A script and its due verdict.

    Args:
        group: `cpu` or `gpu`.
        due: labels that are right, the best first; `("healthy",)` where none may be told.
        lines: user functions, one of which is to be named at once.
        guilty: ranks, one of which is to be named; empty where there are no ranks.
        within: seconds from the fault to the verdict.
        quiet: seconds that a healthy one makes no progress that is easily seen.
        ranks: started under torchrun; 1 is started as it is.
        spawns: ranks that it starts itself.
        runs: arguments, one run each.
        written: `first`, or `late`: after the rules were frozen.
        text: the sentence after the header.
    """

    path: pathlib.Path
    group: str
    due: tuple[str, ...]
    lines: tuple[str, ...]
    guilty: tuple[int, ...]
    within: float
    quiet: float
    ranks: int
    spawns: int
    runs: tuple[str, ...]
    written: str
    text: str

    @property
    def name(self):
        return self.path.stem

    @property
    def healthy(self):
        return self.due == ("healthy",)

    def command(self, form, ranks=None):
        """Returns the command of one run; `ranks` replaces how many torchrun starts."""
        script = [str(self.path), *form.split()]
        if self.ranks == 1:
            return [sys.executable, *script]
        count = f"--nproc-per-node={ranks or self.ranks}"
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", count, *script]


def read(path):
    """Returns the Program of a script. ValueError where its header says too little."""
    path = pathlib.Path(path)
    header, lines = [], path.read_text().splitlines()
    for line in lines:
        header.append(line.removeprefix("#").strip())
        if not line.startswith("#") or not line.endswith(";"):
            break
    after = itertools.takewhile(lambda line: line.startswith("#"), lines[len(header) :])
    pairs = [part.partition(":") for part in " ".join(header).split(";")]
    said = {key.strip(): value.strip() for key, _, value in pairs}
    if header[0][:4] != "due:" or not set(said) <= KEYS or said.get("set") not in SETS:
        raise ValueError(
            f"{path}: its first line is {header[0]!r}; wanted is '# due: LABELS; set: first' with"
            f" any of {', '.join(sorted(KEYS))}"
        )
    due = tuple(said["due"].split(" or "))
    needed = "quiet" if due == ("healthy",) else "within"
    if needed not in said:
        raise ValueError(f"{path}: its header has no `{needed}: SECONDS`")
    return Program(
        path=path.resolve(),
        group=path.parent.name,
        due=due,
        lines=tuple(name.strip() for name in said.get("line", "").split(",") if name.strip()),
        guilty=tuple(int(rank) for rank in said.get("rank", "").split(" or ") if rank),
        within=float(said.get("within", 0)),
        quiet=float(said.get("quiet", 0)),
        ranks=int(said.get("ranks", 1)),
        spawns=int(said.get("spawns", 0)),
        runs=tuple(form.strip() for form in said.get("runs", "").split(" | ")),
        written=said["set"],
        text=" ".join(line.removeprefix("#").strip() for line in after),
    )


def chosen(group="all", only=(), written="all", kind="all"):
    """Returns the programs wanted, sorted. ValueError for a name that none has."""
    found = [read(path) for name in GROUPS for path in sorted(FOLDER.glob(f"{name}/[a-z]*.py"))]
    unknown = set(only) - {program.name for program in found}
    if unknown:
        raise ValueError(f"no program is called {', '.join(sorted(unknown))}; --list shows all")
    return [
        program
        for program in found
        if group in ("all", program.group)
        and (not only or program.name in only)
        and written in ("all", program.written)
        and kind in ("all", "healthy" if program.healthy else "hang")
    ]
