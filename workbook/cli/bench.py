"""`nsa bench`: every attention backend, accuracy first."""

import os
import sys

from workbook.cli import options
from workbook.cli.options import FAILED, GOOD, SEVERAL, command, duration, share, words


def add(commands) -> None:
    """Add the parser."""
    made = command(commands, bench)
    option = made.add_argument
    text = (
        "main, small, g4, tiny, or sizes as tokens=4k,heads=32,kv_heads=8,dim=128; "
        "main on a GPU, tiny without"
    )
    option("--shapes", nargs="+", metavar="SHAPE", help=text)
    option("--tokens", type=words, default=[], metavar="T,T", help="8k,32k: other T")
    text = "ours to run; all by default"
    option("--backends", type=words, metavar="NAME,NAME", help=text)
    text = "random,correlated by default; captured: they select as trained models do"
    option("--queries", type=words, default=["random", "correlated"], metavar="KIND", help=text)
    text = "import.path:function, called as f(q, k, v, gates, config) -> o [B, T, HQ, DV]"
    option("--peer", metavar="PATH", help=text, **SEVERAL)
    option("--no-dense", action="store_true", help="without dense attention")
    option("--budget", type=duration, metavar="TIME", help="what does not fit says so: 5m")
    share(made, "--device")
    option("--json", metavar="FILE", help="write the rows, as in metrics.csv, there")


def bench(arguments) -> int:
    """Time every attention backend; accuracy is checked first."""
    gpu = options.has_gpu(arguments.device, "runs a tiny shape")
    if not gpu:
        # Triton reads it at import: the interpreter, for correct numbers and not for speed.
        os.environ.setdefault("TRITON_INTERPRET", "1")

    from workbook.lab.measure import shapes
    from workbook.rooms.comparison import implementations, record
    from workbook.rooms.comparison.trials import bench as run_bench

    options.check_json(arguments.json)
    options.import_from_here()
    wrong = implementations.wrong_paths(arguments.peer)
    if wrong:
        raise ValueError(f"--peer: {'; '.join(wrong)}")
    chosen = shapes.shapes_from(
        arguments.shapes or (["main"] if gpu else ["tiny"]),
        tokens=[shapes.count(text) for text in arguments.tokens],
        queries=arguments.queries,
    )
    cells, interrupted = [], False
    try:
        run_bench(
            chosen,
            backends=arguments.backends,
            peers=arguments.peer,
            with_dense=not arguments.no_dense,
            device="cuda" if gpu else "cpu",
            budget_s=arguments.budget,
            say=lambda line: print(line, file=sys.stderr, flush=True),
            into=cells,
        )
    except KeyboardInterrupt:
        interrupted = True
        print("nsa: interrupted; what was measured until then:", file=sys.stderr)
    print(record.text(cells), flush=True)
    if arguments.json:
        from workbook.runs import metrics
        from workbook.runs.environment import devices
        from workbook.runs.files import write_json

        facts = options.provenance() | {"device": devices()["cuda" if gpu else "cpu"]}
        write_json(arguments.json, [metrics.row(row, facts) for row in record.rows(cells)])
    failed = [(w, line) for w in ("red", "error") for line in record.ended(cells, w)]
    for how, line in failed:
        what = "NOT ACCURATE" if how == "red" else "BROKE OFF"
        print(f"{what}: {line}", file=sys.stderr)
    return FAILED if failed or interrupted else GOOD
