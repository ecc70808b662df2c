"""What the case study claimed, row by row, and the facts on which each row's verdict stands.

C rows are contradictions: one report says, another says. H rows are causes that were proposed for
"hang", "slow" or "NaN". A row's verdict holds as long as all of its facts do; the facts are
measured or recomputed in `settlement.facts`. What no fact here can decide
is INCONCLUSIVE, with what would.
"""

from dataclasses import dataclass

VERDICTS = {
    "REFUTED": "the claim is wrong",
    "CONFIRMED": "the claim is right",
    "EXPLAINED": "both were seen, and this is what differed",
    "VOID": "the comparison could not have told",
    "INCONCLUSIVE": "not decided here",
}


@dataclass(frozen=True)
class Row:
    """One claim. `predicts`: what would be seen if it were right. `facts`: names of those below.

    retraction: what should have been taken back, "" where nothing was claimed wrongly. settles: for
    an INCONCLUSIVE row, what would decide it.
    """

    id: str
    claim: str
    predicts: str
    verdict: str
    facts: tuple[str, ...]
    retraction: str = ""
    settles: str = ""


ROWS = (
    Row("C1", "27 of 27 runs never hang; elsewhere 5 layers or more always do",
        "a cause that some environments have",
        "EXPLAINED", ("silence", "deadlines-too-short", "deadline-moves", "time-is-linear"),
        "the hang at 5 layers or more: a threshold in layers is one in seconds"),
    Row("C2", "the hang is deterministic, always at step 5", "the same step in every variant",
        "REFUTED", ("not-always-5", "print-schedule", "deadline-moves"),
        "'always at step 5'"),
    Row("C3", "the line `[debug] step 5` proves a hang; it proves that there is none",
        "runs that hang and runs that do not print different lines",
        "VOID", ("print-schedule", "loop-prints-alike"),
        "both readings: only a heartbeat tells them apart"),
    Row("C4", "safe packing works and costs under 1 %; safe packing hangs 12 layers",
        "an overhead of one sign", "VOID", ("safe-packing-is-noise",),
        "the overhead, and the hang"),
    Row("C5", "the hangs were missing code, stuck processes, and timeouts too short",
        "evidence of each of the three", "INCONCLUSIVE", ("deadlines-too-short",),
        settles="a preflight record of those runs: source hash, other processes on the GPU"),
    Row("C6", "all fixes work; and S = 512 and 2048 hang",
        "progress that stops", "EXPLAINED", ("slow-without-a-hang", "silence"),
        "'hangs immediately' at S = 2048"),
    Row("C7", "about 66 tokens/s at S = 256", "256 tokens in 3.9 s", "REFUTED",
        ("13-tokens-a-second",), "66 tokens/s: its own 19.343 s make 13.2"),
    Row("C8", "memory is O(S^2), confirmed", "a factor of 4 for each doubling", "REFUTED",
        ("not-quadratic", "copies-explain-the-table", "truncated-window"), "O(S^2)"),
    Row("C9", "the estimator is accurate at 2048; the backward takes 151 GB",
        "it stays accurate beyond 2048; a backward of three forwards", "REFUTED",
        ("estimator-recovered", "estimator-crosses", "backward-observed"),
        "the estimator and the 151 GB"),
    Row("C10", "12 layers at S = 2048 need checkpointing, else more than 80 GB",
        "more than 80 GB without it", "REFUTED",
        ("production-fits", "backward-observed", "kept-production-run"),
        "'checkpointing is required'"),
    Row("C11", "27 of 27 configurations passed", "a result for each", "REFUTED",
        ("parity-missing",), "27 of 27: what was not completed is INCONCLUSIVE, and is counted"),
    Row("C12", "5 layers at S = 2048 take 20,556.9, 20,451.9, 20,443 and 20,338 MB",
        "one program, one peak", "INCONCLUSIVE", ("four-peaks-differ",),
        settles="what each table counted: units, allocator setting, before or after the forward"),
    Row("C13", "the CPU test has 2 layers at S = 512", "35 parameter tensors", "REFUTED",
        ("twelve-layers-arrived",), "'2 layers': its own list has the 195 tensors of 12"),
    Row("C14", "the test infrastructure is complete and validated",
        "its bucket hook, its env.json and its timeout verdict work", "REFUTED",
        ("bucket-hook-raises", "env-is-not-json", "timeout-lies"), "'validated'"),
    Row("C15", "gradients of gate_mlp.weight and q_proj are missing",
        "parameters of those names", "INCONCLUSIVE", ("example-adds-up",),
        settles="the list as the script wrote it: names typed by hand are no evidence"),
    Row("C16", "the CPU test passes with 195 arrived; the same test hangs",
        "different programs", "EXPLAINED", ("twelve-layers-arrived", "deadlines-too-short"),
        "HANG @ 30 s"),
    Row("C17", "checkpointing is the root cause of the hang",
        "no hang with it off; the right gradients with it on", "REFUTED",
        ("late-binding", "bound-is-exact", "print-schedule"),
        "the root cause; it was a correctness defect instead"),
    Row("C18", "forcing a branch isolates it: all hang alike", "different work by branch", "VOID",
        ("branches-differ-here", "identical-backends"), "the branch isolation"),
    Row("C19", "aux stats cause the stop at step 1", "fewer steps with them, whatever the clock",
        "REFUTED", ("aux-stats-same-steps", "deadline-moves"), "aux stats as a cause"),
    Row("C20", "tracing and launch blocking bring the hang forward: a race condition",
        "fewer steps when traced, whatever the clock", "REFUTED",
        ("traced-is-slower", "traced-same-steps"), "the race condition"),
    Row("C21", "it is not precision; the next report has NaN in fp16 after step 1",
        "one defect", "EXPLAINED", ("print-schedule", "fp16-nan", "fp32-fine"),
        "precision as ruled out: it is a second defect, apart from the silence"),
    Row("C22", "PCIe limits throughput: a larger batch is slower", "a bandwidth that is measured",
        "REFUTED", ("batch-costs-operations", "one-constant"), "the PCIe bottleneck"),
    Row("C23", "12 layers need checkpointing or FSDP", "12 layers that do not fit without, and "
        "right gradients with", "REFUTED", ("late-binding", "production-fits", "one-constant"),
        "the recommendation"),
    Row("C24", "parity tests prove equivalence (MAE < 1e-5)",
        "a reference that shares no mistake", "REFUTED",
        ("first-key-only", "first-key-is-not-attention"), "the parity tests"),
    Row("C25", "the 50k-step run of the model succeeded", "12 layers at 393 to 405 tokens/s",
        "REFUTED", ("too-fast-for-12-layers",), "the run as evidence: it was a toy model"),
    Row("C26", "a laptop's CPU reaches 1,100 tokens/s, an A100 153", "one program on both",
        "VOID", ("not-one-program", "one-constant"), "the comparison"),
    Row("C27", "the strict fallback is operational", "a planted NaN is caught and named",
        "INCONCLUSIVE", ("planted-nan-named",),
        settles="their switch with a planted NaN; here it is caught, which says nothing of theirs"),
    Row("C28", "a boolean mask gives NaN in scaled_dot_product_attention",
        "NaN with a right mask", "REFUTED", ("boolean-mask-fine", "inverted-mask"),
        "the defect of torch: the mask was inverted"),
    Row("H1", "the last console line is a print condition", "another policy, another hang step",
        "CONFIRMED", ("print-schedule", "loop-prints-alike")),
    Row("H2", "the step is longer than the deadline", "a longer deadline, a later step",
        "CONFIRMED", ("deadlines-too-short", "deadline-moves")),
    Row("H3", "a per-token Python loop, bound by launches",
        "operations grow with T, and microseconds each do not depend on the GPU", "CONFIRMED",
        ("operations-per-token", "one-constant", "time-is-linear")),
    Row("H4", "the autograd graph has millions of nodes", "nodes by the token", "CONFIRMED",
        ("nodes-per-token",)),
    Row("H5", "host syncs (.item, nonzero, unique) are there; whether they dominate is another "
        "question", "syncs by the token", "CONFIRMED",
        ("syncs-per-token",)),
    Row("H6", "index_add_ or another in-place operation stops the backward",
        "a form without it behaves otherwise", "REFUTED", ("in-place-equal", "in-place-raises"),
        "index_add_ as a cause"),
    Row("H7", "the packing loops", "packed differs from masked and gather", "REFUTED",
        ("identical-backends", "backends-differ-here"), "packing as the cause: it never ran"),
    Row("H8", "memory of dense masks, or fragmentation", "memory at the limit", "REFUTED",
        ("copies-explain-the-table", "production-fits"), "memory as a cause of the stop"),
    Row("H9", "state accumulates over five steps", "something grows from step 4 to 5",
        "REFUTED", ("nothing-accumulates", "print-schedule"), "'state accumulation'"),
    Row("H10", "DDP's reducer or NCCL", "no silence in a single process", "REFUTED",
        ("print-schedule",), "DDP as a necessary cause"),
    Row("H11", "checkpointing", "another line with it off", "REFUTED",
        ("print-schedule", "late-binding"), "checkpointing as a hang; its gradients were wrong"),
    Row("H12", "Triton or torch.compile recompiles at step 5", "compilations in the loop",
        "REFUTED", ("eager-compiles-nothing", "compile-recompiles"),
        "recompiles in an eager loop; a compiled one does have that risk"),
    Row("H13", "the PyTorch version", "another version, another pattern or constant", "REFUTED",
        ("print-schedule", "versions-share-the-constant"), "the version as a cause"),
    Row("H14", "stale processes held the GPU", "foreign processes in a preflight record",
        "INCONCLUSIVE", (), settles="nvidia-smi of those minutes; '73 GB' alone names no owner"),
    Row("H15", "NaN from fp16 weights under AdamW", "0/0 after one step", "CONFIRMED",
        ("fp16-nan", "fp32-fine", "eps-is-zero")),
    Row("H16", "heat or hardware", "one GPU and not the other", "INCONCLUSIVE", ("one-constant",),
        settles="clocks and error counters of those runs; no report kept them"),
    Row("H17", "aux stats", "fewer steps with them, whatever the clock", "REFUTED",
        ("aux-stats-same-steps",), "aux stats as a cause"),
    Row("H18", "the garbage collector, or recursion where a graph is destroyed",
        "freeing as long as a step, or a crash", "REFUTED", ("freeing-is-short",),
        "graph destruction as a cause"),
)  # fmt: skip
