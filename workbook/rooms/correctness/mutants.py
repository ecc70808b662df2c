"""Real defects of the case study as one-line mutations of this code.

Each cost weeks of work, because no test detected it. Now each has a killer, which fails when the
line is changed; `tests/workbook/rooms/correctness/test_mutants.py` verifies it.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from nsa.spelling import nearest

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Mutant:
    """One mutation: `before` occurs exactly once in `file` and becomes `after`."""

    # (view, backend) of `probe` that shows it, and (lesson, backend, T) that it makes a model fail,
    # or why there is none. The backends run the mutated line; those that hold T x T tensors or
    # process one token at a time use a smaller T.
    shows: tuple[str, str]
    lesson: tuple[str, str, int] | str
    defect: str  # what the case study's code did
    file: str
    before: str
    after: str
    killer: str  # the test that must fail once the line is changed


def mutated_copy(folder: str | Path, name: str = "") -> Path:
    """Copy the package, its tests if any, and pytest's configuration to `folder`/project.

    The line of the named mutant is changed. Raises ValueError if the line is not there, and for an
    unknown name, with the nearest. Compiled files are copied too, since a copied source keeps its
    modification time; those of the changed file are removed.
    """
    root = Path(folder) / "project"
    ignore = shutil.ignore_patterns(".*", "*.pyc.*")  # the latter while one is being written
    for part in ("nsa", "whyhung", "workbook", "tests"):
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, root / part, ignore=ignore)
    if (ROOT / "pyproject.toml").is_file():
        shutil.copy(ROOT / "pyproject.toml", root)
    if name:
        one = mutant(name)
        source = (root / one.file).read_text()
        if source.count(one.before) != 1:
            raise ValueError(
                f"mutant {name!r}: {source.count(one.before)} places in {one.file} read "
                f"{one.before!r}, wanted 1; rewrite the mutant with the code it mutates"
            )
        changed = root / one.file
        changed.write_text(source.replace(one.before, one.after))
        for compiled in changed.parent.glob(f"__pycache__/{changed.stem}.*"):
            compiled.unlink()
    return root


def mutant(name: str) -> Mutant:
    """Return the mutant of that name; ValueError for an unknown one, naming the nearest."""
    if name not in MUTANTS:
        raise ValueError(f"mutant {name!r} is unknown; {nearest(name, MUTANTS)}")
    return MUTANTS[name]


BACKENDS = "tests/nsa/attention/test_backends.py::"
FACTS = "tests/nsa/attention/test_backend_facts.py::"
REFERENCE = "tests/nsa/reference/test_reference.py::"
SPAN = "tests/nsa/kernels/test_span.py::"
SELECTED = "tests/nsa/kernels/test_selected.py::"
TOPK = "tests/nsa/kernels/test_topk.py::"
CHECKPOINT = "tests/nsa/model/test_checkpoint.py::"
COMPRESS = "tests/nsa/kernels/test_compress.py::"
SEQUENTIAL = "workbook/lab/sequential.py"

MUTANTS = {
    "one-query-causal": Mutant(
        ("window", "sequential"),
        ("window", "sequential", 64),
        "is_causal with one query is aligned top left: it sees only the first key",
        SEQUENTIAL,
        'o = torch.einsum("bhgs,bshd->bhgd", scores.softmax(-1), v)',
        "o = torch.nn.functional.scaled_dot_product_attention(q[..., None, :], "
        "*(x.transpose(1, 2)[:, :, None].expand(-1, -1, q.shape[2], -1, -1) for x in (k, v)), "
        "is_causal=True, scale=scale).squeeze(-2)",
        FACTS + "test_an_earlier_token_outside_block_0_and_window_is_still_attended_to",
    ),
    "heads-as-time": Mutant(
        ("window", "sequential"),
        ("window", "sequential", 64),
        "the heads of a group lie where time should: head i sees the first i + 1 keys",
        SEQUENTIAL,
        'o = torch.einsum("bhgs,bshd->bhgd", scores.softmax(-1), v)',
        "o = torch.nn.functional.scaled_dot_product_attention(q, k.transpose(1, 2), "
        "v.transpose(1, 2), is_causal=True, scale=scale)",
        FACTS + "test_an_earlier_token_outside_block_0_and_window_is_still_attended_to",
    ),
    "current-block-dropped": Mutant(
        ("selected", "reference"),
        ("blocks", "gather", 2048),
        "only blocks that are complete are legal: a query does not see its own",
        "nsa/reference/select.py",
        "legal = j <= own",
        "legal = j < own",
        REFERENCE + "test_the_querys_own_block_and_the_forced_ones_are_always_selected",
    ),
    "window-leak": Mutant(
        ("window", "sequential"),
        ("window", "sequential", 64),
        "the window's cache keeps the newest w tokens of the whole sequence, positions do not",
        SEQUENTIAL,
        '_attend(q_t, k["win"][:, newest], v["win"][:, newest], inputs.scale, needed)',
        '_attend(q_t, k["win"][:, -config.window :][:, newest], '
        'v["win"][:, -config.window :][:, newest], inputs.scale, needed)',
        FACTS + "test_no_query_sees_the_future_also_when_the_window_is_shorter_than_the_sequence",
    ),
    "scores-see-the-future": Mutant(
        ("selected", "reference"),
        "no model runs this line: it is the reference's own selection",
        "importance is a softmax over all compressed keys, later ones included",
        "nsa/reference/nsa.py",
        "p_cmp, _ = attention_probs(q, k_cmp, visible, scale)",
        "p_cmp, _ = attention_probs(q, k_cmp, torch.ones_like(visible), scale)",
        REFERENCE + "test_no_selection_depends_on_the_future",
    ),
    "chunked-scores-see-the-future": Mutant(
        ("selected", "gather"),
        ("selection", "gather", 2048),
        "the same in the chunked scorer: each query scored as if it were the last",
        "nsa/attention/branches.py",
        "span_scores(q[:, rows], k_cmp[:, keys], span, scale, first + rows.start)",
        "span_scores(q[:, rows], k_cmp[:, keys], span, scale, q.shape[1])",
        BACKENDS + "test_a_chunked_selection_keeps_as_much_importance_as_the_exact_one",
    ),
    "chunked-positions-restart": Mutant(
        ("selected", "gather"),
        ("blocks", "gather", 2048),
        "every chunk of queries is scored as if it stood at the start of the sequence",
        "nsa/attention/branches.py",
        "first_position=first + rows.start",
        "first_position=0",
        BACKENDS + "test_a_chunked_selection_keeps_as_much_importance_as_the_exact_one",
    ),
    "late-binding-checkpoint": Mutant(
        ("recomputed", "gather"),
        ("recall", "triton", 2048),
        "a closure over the loop's variable: every layer recomputes the last one",
        "nsa/model/llama.py",
        "again(block, x, *context)",
        "again(lambda *inputs: block(*inputs), x, *context)",
        CHECKPOINT + "test_gradients_are_bit_equal_with_checkpointing_on_and_off",
    ),
    "inverted-mask": Mutant(
        ("window", "sdpa"),
        ("window", "sdpa", 512),
        "the mask of what is forbidden, where torch takes the mask of what is seen",
        "nsa/attention/backends/sdpa.py",
        "mask = (visible | ~seen)",
        "mask = (~visible | ~seen)",
        FACTS + "test_no_query_sees_the_future_also_when_the_window_is_shorter_than_the_sequence",
    ),
    "equation-9-wrong-sign": Mutant(
        ("selected", "reference"),
        ("selection", "gather", 2048),
        "i = (l'/d) j + m + n in place of m - n: weights fall on the blocks that follow",
        "nsa/blocks.py",
        "    first = max(compressed, selectable * per_selectable)",
        "    compressed -= per_compressed - 1\n"
        "    first = max(compressed, selectable * per_selectable)",
        REFERENCE + "test_importance_is_the_double_sum_of_equation_9",
    ),
    "equation-9-wrong-sign-in-the-band": Mutant(
        ("selected", "gather"),
        ("selection", "gather", 2048),
        "the same in the band that the chunked scorer uses",
        "nsa/blocks.py",
        "    return 1 - per_compressed, weights",
        "    return 0, weights",
        BACKENDS + "test_a_chunked_selection_keeps_as_much_importance_as_the_exact_one",
    ),
    "window-off-by-one": Mutant(
        ("window", "masked"),
        ("window", "masked", 512),
        "w + 1 keys in the window",
        "nsa/reference/nsa.py",
        "(distance < config.window)",
        "(distance <= config.window)",
        REFERENCE + "test_a_window_holds_exactly_w_keys",
    ),
    "chunked-window-off-by-one": Mutant(
        ("window", "gather"),
        ("window", "gather", 2048),
        "the same in the chunked window",
        "nsa/attention/span.py",
        "ended >= span.lookback * span.stride",
        "ended > span.lookback * span.stride",
        BACKENDS + "test_longer_than_one_chunk_of_queries",
    ),
    "sequential-window-off-by-one": Mutant(
        ("window", "sequential"),
        ("window", "sequential", 64),
        "the same one token at a time",
        "nsa/blocks.py",
        "max(0, high - self.lookback)",
        "max(0, high - self.lookback - 1)",
        BACKENDS + "test_backend_agrees_with_the_reference_forward_and_backward",
    ),
    "compressed-block-seen-too-early": Mutant(
        ("compressed", "masked"),
        ("compressed", "masked", 512),
        "a compressed key is seen from its first token on, not from its last",
        "nsa/reference/nsa.py",
        "(last_tokens <= positions[:, None])",
        "(starts <= positions[:, None])",
        REFERENCE + "test_compressed_keys_are_seen_from_their_last_token_on",
    ),
    "heads-select-alone": Mutant(
        ("selected", "reference"),
        "no model runs this line: it is the reference's own selection",
        "importance of the first head of a group instead of the sum over its heads",
        "nsa/reference/select.py",
        'torch.einsum("bhgtc,cj->bthj", p_cmp, matrix)',
        'torch.einsum("bhgtc,cj->bthj", p_cmp[:, :, :1], matrix)',
        REFERENCE + "test_agrees_with_a_second_opinion_in_scalar_python",
    ),
    "kernel-window-off-by-one": Mutant(
        ("window", "triton"),
        ("window", "triton", 2048),
        "the same in the kernels of the window",
        "nsa/kernels/span_common.py",
        "seen = seen & (s >= end - SPAN.lookback)",
        "seen = seen & (s >= end - SPAN.lookback - 1)",
        SPAN + "test_a_window_one_token_short_of_the_sequence_leaves_out_the_first_key",
    ),
    "kernel-forgets-the-first-blocks": Mutant(
        ("selected", "triton"),
        ("blocks", "triton", 2048),
        "the initial blocks have to earn their place by importance",
        "nsa/kernels/ranking.py",
        "forced = (j < CONFIG.select_initial) | (j > own - CONFIG.select_local)",
        "forced = j > own - CONFIG.select_local",
        TOPK + "test_forced_blocks_and_legal_ones_hold_when_scores_are_not_finite",
    ),
    "kernel-scores-another-group": Mutant(
        ("selected", "triton"),
        "one group still scores with its own heads and finds the answer",
        "the first head of a group is found by the number of KV heads, right where that is G",
        "nsa/kernels/topk.py",
        "head = kv_head * G\n",
        "head = kv_head * HKV\n",
        TOPK + "test_any_head_dim_and_batch",
    ),
    "kernel-gate-gradient-of-another-branch": Mutant(
        ("gate_gradient", "triton"),
        "gates that learn nothing stay open",
        "delta is stored as the gradient of the first branch's gate, whichever branch it is of",
        "nsa/kernels/combine.py",
        "BRANCH * gate_strides[2]",
        "0 * gate_strides[2]",
        COMPRESS + "test_delta_is_the_product_of_do_and_o_and_the_gates_gradient",
    ),
    "kernel-gradient-overwritten": Mutant(
        ("query_gradient", "triton"),
        "the keys learn to meet queries that learn less",
        "the last branch's dq replaces the sum of the others",
        "nsa/kernels/selected_dq.py",
        "        if ADD:\n",
        "        if ADD and False:\n",
        SELECTED + "test_dq_is_added_to_and_the_gates_gradient_written_where_asked",
    ),
    "kernel-base-not-gated": Mutant(
        ("mixed", "triton"),
        "a branch that is always open is one that the task can live with",
        "the branch that is mixed in comes without its gate",
        "nsa/kernels/selected_fwd.py",
        "if BASE_BRANCH >= 0:",
        "if BASE_BRANCH > 2:",
        SELECTED + "test_the_output_is_mixed_with_a_base_in_place",
    ),
}
