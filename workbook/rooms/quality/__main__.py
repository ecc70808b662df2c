"""Train NSA and dense attention on equal tokens, as many cells as the time allows.

    python -m workbook.rooms.quality --out DIR --seconds 540 --seeds 0,1,2 --variants nsa,dense

needs torch, numpy and jaxtyping alone (and triton on a GPU), and no network: the text is that of
this Python's installed packages. DIR gets rows.jsonl, a line as soon as a cell is done, and
manifest.json, the text's packages and versions. Checkpoints (12 bytes a parameter) stay in --work;
the same command again goes on from there, to the bit on a CPU, and rows that it finds there or in
--done are not made again. On a machine that forgets --work an unfinished cell starts anew.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsa.model import shards
from nsa.spelling import nearest
from workbook.lab import todays
from workbook.rooms.quality.cells import BYTES, MODELS, VARIANTS, Cell, cells_of, text_of
from workbook.runs.files import plain

SETUP_S, EVALUATE_S = 25.0, 35.0  # first guesses, replaced by the slowest seen


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser("python -m workbook.rooms.quality", description=__doc__)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    option = made.add_argument
    option("--out", required=True, help="folder of the results")
    option("--work", help="folder of text and checkpoints; by default ~/.cache/nsa/quality")
    option("--seconds", type=float, default=540.0, help="until it saves and ends")
    option("--variants", type=_words, default=["nsa", "dense"], help=f"of {', '.join(VARIANTS)}")
    option("--seeds", type=_numbers, default=[0, 1, 2], help="0,1,2")
    option("--tokens", type=_numbers, default=[16384], help="lengths T, as 16384,32768")
    option("--bytes", type=_count, default=_count("64M"), help="that a cell is trained on: 64M")
    text = "train on as many tokens instead, of a tokenizer of so many ids (needs tokenizers)"
    option("--vocab", type=int, default=BYTES, help=text)
    option("--batch-tokens", type=int, default=65536, help="tokens of a step")
    option("--model", default="small", choices=MODELS, help="small has 21 million parameters")
    option("--lr", type=float, default=1e-3, help="the highest learning rate")
    option("--longest", type=int, default=4, help="evaluate up to so many times T: 1, 2 or 4")
    text = "lengths of held-out text at which each NSA layer's q, k, v, gates and blocks are saved"
    option("--tensors", type=_numbers, default=[], help=f"{text}, in --work")
    option("--max-text", type=_count, help="bytes of training text at most, as 512M")
    option("--precision", choices=("fp32", "bf16"), help="bf16 on a GPU, fp32 without")
    option("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where")
    option("--no-compile", action="store_false", dest="compile", help="on a GPU, blocks eagerly")
    text = "on a GPU, a step kernel by kernel, not as a CUDA graph"
    option("--no-cuda-graph", action="store_false", dest="cuda_graph", help=text)
    text = "begin no cell that would not be done in time, by the first like it"
    option("--whole", action="store_true", help=text)
    option("--done", action="append", default=[], help="rows.jsonl of earlier calls")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cells; return 0, or 2 for options that cannot be run."""
    began = time.perf_counter()
    arguments = parser().parse_args(argv)
    try:
        cells = _cells(arguments)
        text = _text(arguments, cells)
        done = _rows(arguments.done)
    except (ValueError, TypeError) as error:
        print(f"quality: {error}", file=sys.stderr)
        return 2
    _say(f"text: {text.manifest['bytes']} bytes, {time.perf_counter() - began:.0f} s")
    run(arguments, cells, text, done, began + arguments.seconds)
    return 0


def run(
    arguments: argparse.Namespace,
    cells: Sequence[Cell],
    text: shards.Shards,
    done: Sequence[dict[str, Any]],
    deadline: float,
) -> list[dict[str, Any]]:
    """Run the cells until the deadline, on time.perf_counter; return the rows, also in rows.jsonl.

    A cell that fails leaves a row whose outcome is "error", and the others run; one that the
    deadline cuts off leaves an "unfinished" row, with its losses so far.
    """
    from workbook.rooms.quality.child import OutOfTime, amounts_of, run_cell

    out, work = Path(arguments.out), _work(arguments)
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(text.folder / "manifest.json", out)
    known, rows = {json.dumps(row["cell"]): row for row in done}, []
    setup, evaluation = SETUP_S, EVALUATE_S
    gpu = _device(arguments) == "cuda"
    if not gpu:  # nothing is compiled
        setup = evaluation = 0.0
    given = {"device": _device(arguments), "compile": gpu and arguments.compile}
    given["cuda_graph"] = gpu and arguments.cuda_graph
    given |= {"amounts": amounts_of(cells[0], arguments.longest, arguments.tensors), "say": _say}
    took: dict[tuple[str, int], float] = {}
    with (out / "rows.jsonl").open("w", encoding="utf-8") as lines:
        for cell in cells:
            row = known.get(json.dumps(cell.to_dict()))
            left = deadline - time.perf_counter()
            whole = took.get((cell.variant, cell.tokens), max(took.values(), default=0.0))
            whole = whole if arguments.whole else 0.0
            if row is None and left < max(whole, setup + evaluation):
                _say(f"{cell.name}: not begun, {left:.0f} s are left")
                continue
            began, fresh = time.perf_counter(), row is None
            try:
                row = row or run_cell(cell, text, work, until=deadline - evaluation, **given)
            except OutOfTime as stopped:
                row, fresh = stopped.row, False
            except Exception as error:
                row = {"cell": cell.to_dict(), "outcome": "error"}
                row["message"] = f"{type(error).__name__}: {str(error)[:2000]}"
            evaluation = max(evaluation, row.get("evaluation_s", 0.0))
            if fresh:
                took.setdefault((cell.variant, cell.tokens), time.perf_counter() - began)
            rows.append(row)
            lines.write(json.dumps(plain(row), allow_nan=False) + "\n")
            lines.flush()
            _say(f"{cell.name}: {row['outcome']} {row.get('bits', row.get('message', ''))}")
    return rows


def _cells(arguments: argparse.Namespace) -> list[Cell]:
    for variant in arguments.variants:
        if variant not in VARIANTS:
            raise ValueError(f"no variant {variant!r}; {nearest(variant, VARIANTS)}")
    precision = arguments.precision or ("bf16" if _device(arguments) == "cuda" else "fp32")
    common = {"bytes": arguments.bytes, "batch_tokens": arguments.batch_tokens}
    common |= {"model": arguments.model, "lr": arguments.lr, "precision": precision}
    common |= {"vocab": arguments.vocab}
    return cells_of(arguments.variants, arguments.seeds, arguments.tokens, **common)


def _text(arguments: argparse.Namespace, cells: Sequence[Cell]) -> shards.Shards:
    most, vocab = arguments.max_text, arguments.vocab
    name = "text" if most is None else f"text-{most}"
    folder = _work(arguments) / (name if vocab == BYTES else f"{name}-{vocab}-ids")
    return text_of(cells, folder, arguments.longest, most)


def _rows(files: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of earlier calls that came to an end."""
    try:
        texts = [Path(file).read_text(encoding="utf-8") for file in files]
        read = [json.loads(line) for text in texts for line in text.splitlines()]
        read = [row | {"cell": todays(row["cell"])} for row in read]
    except (OSError, ValueError) as error:
        raise ValueError(f"--done: {error}") from error
    return [row for row in read if row["outcome"] in ("ok", "diverged")]


def _work(arguments: argparse.Namespace) -> Path:
    return Path(arguments.work or "~/.cache/nsa/quality").expanduser()


def _device(arguments: argparse.Namespace) -> str:
    import torch

    if arguments.device != "auto":
        return arguments.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _words(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in _words(text)]


def _count(text: str) -> int:
    """Bytes of a text such as 64M or 131072."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1:] in units else int(text)


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
