"""Facts of the settlement that trials of torch and of this project's attention decide."""

from nsa.experiments.case_study.settlement.measured import Asked, Found, asking

ASKED: list[Asked] = []
_fact = asking(ASKED)


@_fact("first-key-only", "one-query",
       "one query with is_causal=True returns the first key's value; the gradients of queries and "
       "keys are 0 but for rounding")  # fmt: skip
def _first(found: Found) -> bool:
    return found["from_first_value"] < 1e-6 and found["largest_gradient_of_q_and_k"] < 1e-5


@_fact("first-key-is-not-attention", "one-query",
       "that is not attention, by far: a test passes it only if its reference does the same",
       lambda f: f"off by {f['from_attention']:.1f}")  # fmt: skip
def _not_attention(found: Found) -> bool:
    return found["from_attention"] > 0.1


@_fact(
    "boolean-mask-fine",
    "boolean-mask",
    "True means attend: a causal boolean mask gives finite rows and nothing of the future",
)
def _mask(found: Found) -> bool:
    return found["right_finite"] and found["right_on_the_future"] == 0.0


@_fact("inverted-mask", "boolean-mask",
       "its negation attends to the future alone, and leaves the last row nothing",
       lambda f: f"the last row is {f['inverted_last_row']}")  # fmt: skip
def _inverted(found: Found) -> bool:
    return found["inverted_on_the_past"] == 0.0 and found["inverted_on_the_future"] > 0.99


@_fact(
    "fp16-nan",
    "fp16-adamw",
    "one step of AdamW on an fp16 weight: a gradient of 0 gives NaN, one of 1e-4 -inf",
)
def _fp16(found: Found) -> bool:
    return found["float16 0"] == "nan" and found["float16 0.0001"] == "-inf"


@_fact("fp32-fine", "fp16-adamw", "the same step in fp32 and bf16 is finite")
def _fp32(found: Found) -> bool:
    rest = [v for k, v in found.items() if k.startswith(("float32", "bfloat16"))]
    return all(v not in ("nan", "inf", "-inf") for v in rest)


@_fact("eps-is-zero", "fp16-adamw", "AdamW's eps of 1e-8 is 0 in fp16")
def _eps(found: Found) -> bool:
    return found["eps_in_fp16"] == 0.0


@_fact("branches-differ-here", "branches",
       "here one branch alone skips the others' work: fewer operations, paths of its own, and no "
       "gradient for the gate",
       lambda f: ", ".join(f"{b}: {r['operations']}" for b, r in f.items()))  # fmt: skip
def _branches(found: Found) -> bool:
    alone = [found[b] for b in ("cmp", "slc", "win")]
    fewer = all(r["operations"] < found["all"]["operations"] for r in alone)
    apart = len({tuple(r["paths"]) for r in found.values()}) == 4
    return fewer and apart and all(r["gates_with_gradient"] == 0 for r in alone)


@_fact("backends-differ-here", "backends",
       "here masked, packed and gather are three programs: other operations, other paths, one loss",
       lambda f: ", ".join(f"{b}: {r['operations']}" for b, r in f.items()))  # fmt: skip
def _backends(found: Found) -> bool:
    counts = {r["operations"] for r in found.values()}
    paths = {str(sorted(r["paths"].items())) for r in found.values()}
    losses = [r["loss"] for r in found.values()]
    return len(counts) == len(paths) == 3 and max(losses) - min(losses) < 1e-4


@_fact("in-place-equal", "in-place", "index_add_ and scatter_add have equal gradients")
def _in_place(found: Found) -> bool:
    return found["equal"]


@_fact(
    "in-place-raises",
    "in-place",
    "an in-place change of what the backward needs raises, and does not stop it",
)
def _raises(found: Found) -> bool:
    return found["raised"] == "RuntimeError"


@_fact("planted-nan-named", "planted-nan", "here strict mode names the branch of a planted NaN")
def _nan(found: Found) -> bool:
    return all(f"branch {branch!r}" in said for branch, said in found.items())


@_fact(
    "bucket-hook-raises",
    "harness",
    "a gradient bucket has no get_tensor, which its hook calls; it has buffer",
)
def _hook(found: Found) -> bool:
    return not found["bucket_has_get_tensor"] and found["bucket_has_buffer"]


@_fact("env-is-not-json", "harness", "the output of env, which its env.json holds, is no JSON")
def _env(found: Found) -> bool:
    return not found["env_output_is_json"]


@_fact("timeout-lies", "harness",
       "under `timeout`, a script whose SIGTERM handler only dumps prints COMPLETED, and the exit "
       "code is 124, which was recorded as HANG")  # fmt: skip
def _timeout(found: Found) -> bool:
    return found["timeout_says"] == 124 and "COMPLETED" in found["timeout_stdout"]
