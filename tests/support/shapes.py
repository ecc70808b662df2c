"""Draws legal shapes for the kernels, runs each forward and backward, and judges it: a program.

    PYTHONPATH=. python tests/support/shapes.py --count 300 --out DIR

An illegal memory access ends a process's use of its GPU, so that shapes run in processes of their
own: each takes the next shape from a folder, and where one dies the shape is named and another
process goes on. A tenth runs once more under compute-sanitizer's memcheck. Shapes that no kernel
takes must be declined before a launch. Writes DIR/shapes.json; a summary comes last.

    PYTHONPATH=. python tests/support/shapes.py --one '{"form": ...}'

runs one shape out of that file here.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from backend_calls import outcome
from cases import Drawn
from distributions import DEFINED, judged, kernels, selection
from shape_draws import DTYPES, Shape, illegal, legal, tiny
from torch import Tensor

from nsa.attention.api import nsa_attention
from nsa.blocks import count_selectable
from nsa.reference.nsa import nsa

ROWS = 1 << 25  # query rows times tokens that the definition is evaluated on, 256 MiB of scores
DRAWS = 3  # of a shape that breaks the rule by the first draw; roundings can, a fault always does
SANITIZER = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
PATIENCE = {"judge": 200, "launch": 400}  # seconds for one shape
FOUND = re.compile(r"^=+ (Invalid|.*[Mm]isaligned|Program hit|Error:).*", re.MULTILINE)


def attend(drawn: Drawn, shape: Shape, backend: str, blocks: Tensor | None = None) -> Tensor:
    """o of a backend, with its own selection unless one is given."""
    args, kwargs = drawn.arguments()
    options = kwargs | {"branches": shape.branches, "blocks": blocks}
    return nsa_attention(*args, **options, backend=backend)


def define(drawn: Drawn, shape: Shape, blocks: Tensor | None) -> Tensor:
    """o of the definition, or of `gather`, which makes no T x T tensor, where that is too large."""
    rows = drawn.leaves["q"].shape[0] * drawn.leaves["q"].shape[2] * shape.tokens**2
    if shape.tokens > 2 * DEFINED or rows > ROWS:
        return attend(drawn, shape, "gather", blocks)
    args, kwargs = drawn.arguments()
    return nsa(*args, **kwargs | {"branches": shape.branches, "blocks": blocks}).o


def wrong_selection(drawn: Drawn, shape: Shape, blocks: Tensor) -> str:
    """Mistakes in the kernels' selection of a sequence, "" where there is none or it is long.

    Near ties may fall either way: what is kept of the exact importance counts, and how many.
    """
    lengths, exact = shape.lengths or (shape.tokens,), drawn.to(torch.float64)
    heads = shape.batch * shape.kv_heads * shape.form.group
    first = 0
    for length in lengths:
        rows = slice(first, first + length)
        first += length
        if not length or length > DEFINED or heads * length**2 > ROWS:
            continue
        args, kwargs = exact.arguments()
        q, k, v, gates, config = args
        q, gates = q[:, rows], gates[:, rows]
        k, v = ({b: x[:, rows] for b, x in side.items()} for side in (k, v))
        result = nsa(q, k, v, gates, config, phi=kwargs["phi"], branches=("slc",))
        mine, count = blocks[:, rows].long(), count_selectable(length, config)
        if int(mine.max()) >= count or int(mine.min()) < -1:
            return f"blocks from {int(mine.min())} to {int(mine.max())} of {count}"
        if not torch.equal((mine < 0).sum(-1), (result.blocks < 0).sum(-1)):
            return "another number of blocks than the definition selects"
        ranks = torch.where(mine < 0, count + torch.arange(mine.shape[-1]).to(mine), mine)
        if bool((ranks.diff(dim=-1) <= 0).any()):
            return "blocks that do not ascend"

        def kept(chosen, weight=result.importance):
            found = weight.gather(-1, chosen.clamp(min=0))
            return found.masked_fill(chosen < 0, 0.0).sum(-1)

        lost = float((kept(result.blocks.long()) - kept(mine)).max())
        most = 3 * torch.finfo(DTYPES[shape.form.dtype]).eps
        if lost > most * float(result.importance.sum(-1).max()):
            return f"blocks that lose {lost:.2e} of importance"
    return ""


def judge(shape: Shape, device: str) -> dict:
    """Runs a shape and holds o and each gradient to the accuracy rule: a record of it."""
    dtype = DTYPES[shape.form.dtype]
    drawn = shape.draw(device)
    with selection() as seen, kernels(shape.kernels):
        o = attend(drawn, shape, "triton")
        do = torch.randn(o.shape, device=device).to(dtype)
        got = _named(*outcome(lambda _: o, drawn, do))
    blocks, exact_inputs = None, drawn.to(torch.float64)
    if "slc" in shape.branches:
        blocks = seen[0].unflatten(0, drawn.leaves["q"].shape[:2])
        if wrong := wrong_selection(drawn, shape, blocks):
            return {"outcome": "inaccurate", "why": wrong}
    exact, plain = (
        _named(*outcome(lambda x: define(x, shape, blocks), given, do))
        for given in (exact_inputs, drawn.to(dtype))
    )
    errors = judged(got, plain, exact, dtype, norms=False)
    broken = [error["broken"] for error in errors.values() if error["broken"]]
    ratios = {name: round(error["ratio"], 2) for name, error in errors.items()}
    found = {"outcome": "inaccurate" if broken else "ok", "ratios": ratios}
    return found | ({"why": "; ".join(broken)} if broken else {})


def _named(o: Tensor, grads: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"o": o.detach()} | {f"d{name}": x for name, x in grads.items()}


def launch(shape: Shape, device: str) -> dict:
    """Runs a shape forward and backward and looks at nothing but whether it ends."""
    drawn = shape.draw(device)
    with kernels(shape.kernels):
        o = attend(drawn, shape, "triton")
        _wait(device)
        outcome(lambda _: o, drawn, torch.ones_like(o))
    return {"outcome": "ok"}


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def one(shape: Shape, device: str, mode: str = "judge") -> dict:
    """The record of a shape: "ok", "inaccurate", "raised", or "died" with the GPU out of use."""
    began = time.perf_counter()
    try:
        if mode == "launch":
            record = launch(shape, device)
        else:
            for draw in range(DRAWS):
                again = Shape(**vars(shape) | {"seed": shape.seed + 1000 * draw})
                record = judge(again, device) | {"draws": draw + 1}
                if record["outcome"] == "ok":
                    break
        _wait(device)
    except Exception:
        record = {"outcome": "raised", "why": traceback.format_exc(limit=-3)}
        try:
            _wait(device)
        except Exception:
            record["outcome"] = "died"
    return record | {"seconds": round(time.perf_counter() - began, 2)}


def work(folder: Path, mode: str, device: str) -> None:
    """A process's part: takes shapes from the folder until there is none, a line for each."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_num_threads(1)
    from nsa.attention.backends import gather

    gather.ELEMENTS |= {"cuda": 1 << 24}  # several processes share the memory
    while names := sorted(os.listdir(folder / "todo")):
        for name in names:
            try:
                os.rename(folder / "todo" / name, folder / "taken" / name)
            except FileNotFoundError:  # another process was first
                continue
            values = json.loads((folder / "taken" / name).read_text())
            print(json.dumps({"begun": name}), flush=True)
            record = one(Shape.from_dict(values), device, mode)
            print(json.dumps({"done": name} | record), flush=True)
            if record["outcome"] == "died":
                os._exit(3)
            if device != "cpu":
                torch.cuda.empty_cache()


def run(
    shapes: list[Shape], processes: int, device: str, mode: str = "judge", until: float = 1e12,
    prefix: tuple[str, ...] = (),
) -> list[dict]:  # fmt: skip
    """A record for each shape, made by so many processes at a time; "not run" after `until`.

    prefix: of each process's command, as a sanitizer's.
    """
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "todo").mkdir()
        (folder / "taken").mkdir()
        for number, shape in enumerate(shapes):
            (folder / "todo" / f"{number:04}").write_text(json.dumps(shape.to_dict()))
        command = [*prefix, sys.executable, __file__, "--work", made, mode, "--device", device]
        with ThreadPoolExecutor(processes) as pool:
            parts = pool.map(lambda _: _mind(command, folder, mode, until), range(processes))
            found = {name: record for part in parts for name, record in part.items()}
    missing = {"outcome": "not run", "why": "no time was left"}
    return [
        {"shape": shape.to_dict(), "mode": mode} | found.get(f"{number:04}", missing)
        for number, shape in enumerate(shapes)
    ]


def _mind(command: list[str], folder: Path, mode: str, until: float) -> dict[str, dict]:
    """Keeps one process going until no shape is left; its records by name."""
    found: dict[str, dict] = {}
    env = os.environ | ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if mode == "launch" else {})
    while any((folder / "todo").iterdir()) and time.time() < until:
        with tempfile.TemporaryFile("w+") as said:
            child = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=env)
            ended, size, since = None, -1, time.time()
            while child.poll() is None:
                time.sleep(0.2)
                if os.fstat(said.fileno()).st_size != size:
                    size, since = os.fstat(said.fileno()).st_size, time.time()
                if time.time() > min(since + PATIENCE[mode], until):
                    ended = "not run" if time.time() > until else "took too long"
                    child.kill()
                    child.wait()
            said.seek(0)
            text = said.read()
        begun = _read(text, found)
        if begun is not None and begun not in found:
            why = f"exit code {child.returncode}\n{text[-1500:]}"
            found[begun] = {"outcome": ended or "died", "why": why}
    return found


def _read(text: str, found: dict[str, dict]) -> str | None:
    """Adds the records in a process's output to `found`; the shape that was begun and not done.

    What a sanitizer says between two records is of the second one.
    """
    begun, between, name = None, [], None
    for line in text.splitlines():
        if not line.startswith(('{"begun"', '{"done"')):
            between.append(line)
            continue
        record = json.loads(line)
        if begun := record.get("begun"):
            continue
        name = record.pop("done")
        found[name] = record
        _note_error("\n".join(between), found, name)
        between = []
    _note_error("\n".join(between), found, begun or name)
    return begun


def _note_error(said: str, found: dict[str, dict], name: str | None) -> None:
    """Has the record of that name say what a sanitizer found."""
    error = FOUND.search(said)
    if error and name is not None:
        why = {"outcome": "died", "why": said[error.start() :][:3000]}
        found[name] = found.get(name, {}) | why


def declined(device: str) -> list[dict]:
    """A record for each call that is not legal: declined by an error that names the values."""
    from nsa.kernels import ops

    plain, records = ops.attend, []

    def launched(*_):
        raise RuntimeError("it was launched")

    ops.attend = launched
    try:
        for name, call, pattern in illegal(device):
            record = {"illegal": name, "outcome": "not declined", "why": "it computed"}
            try:
                call()
            except (ValueError, TypeError) as error:
                named = re.search(pattern, " ".join(str(error).split()))
                record |= {"outcome": "declined" if named else "unnamed", "why": str(error)}
            except Exception as error:
                record["why"] = f"{type(error).__name__}: {error}"
            records.append(record)
    finally:
        ops.attend = plain
    return records


def drawn_shapes(count: int, seed: int, device: str) -> list[Shape]:
    """Shapes for a GPU, or such as an interpreter can do."""
    return tiny(seed, count) if device == "cpu" else legal(seed, count, max(8, min(36, count // 4)))


def main() -> int:
    """Draws, runs, writes and sums up; 1 where anything is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=41)
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--sanitized", type=int, help="a tenth of count if not said")
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="folder for shapes.json")
    parser.add_argument("--one", help="a shape as JSON, to run alone")
    parser.add_argument("--launch", action="store_true", help="with --one: judge nothing")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(Path(given.work[0]), given.work[1], given.device)
        return 0
    if given.one:
        shape = Shape.from_dict(json.loads(given.one))
        record = one(shape, given.device, "launch" if given.launch else "judge")
        print(shape, json.dumps(record, indent=1))
        return int(record["outcome"] != "ok")
    return _all(given)


def _all(given: argparse.Namespace) -> int:
    began = time.time()
    until = began + given.seconds
    shapes = drawn_shapes(given.count, given.seed, given.device)
    few = given.count // 10 if given.sanitized is None else given.sanitized
    small = [shape for shape in shapes if shape.tokens <= 400][:few]
    present = given.device != "cpu" and shutil.which(SANITIZER[0]) is not None
    with ThreadPoolExecutor(2) as pool:
        main_run = pool.submit(run, shapes, given.processes, given.device, "judge", until)
        watched = []
        if present and small:
            args = small, 3, given.device, "launch", until, tuple(SANITIZER)
            watched = pool.submit(run, *args).result()
        records = main_run.result()
    if small and not present:
        why = f"{SANITIZER[0]} is not here"
        watched = [
            {"shape": x.to_dict(), "mode": "launch", "outcome": "not run", "why": why}
            for x in small
        ]
    refused = declined(given.device)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        device = torch.cuda.get_device_name() if given.device != "cpu" else "cpu"
        about = {"device": device, "torch": torch.__version__, "seed": given.seed}
        text = json.dumps(about | {"shapes": records, "memcheck": watched, "illegal": refused})
        (given.out / "shapes.json").write_text(text + "\n")
    bad = [r for r in records + watched if r["outcome"] != "ok"]
    bad += [r for r in refused if r["outcome"] != "declined"]
    for record in bad[:40]:
        what = record.get("illegal") or Shape.from_dict(record["shape"])
        print(f"{record['outcome']} ({record.get('mode', 'illegal')}): {what}")
        print("   ", record["why"].strip()[-600:].replace("\n", "\n    "))
    for name, found in (("judged", records), ("memcheck", watched), ("illegal", refused)):
        print(f"{name}: {len(found)}, {dict(Counter(r['outcome'] for r in found))}")
    print(f"{time.time() - began:.0f} s, seed {given.seed}: {len(bad)} are not as they must be")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
