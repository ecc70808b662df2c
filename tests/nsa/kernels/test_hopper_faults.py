"""The emulator finds what each kernel of specialized warps may have wrong."""

import pytest
import torch
from backend_calls import DEVICE
from hopper_cases import FEW, FINE, by_warps, scored, selected, selected_backward
from span_cases import Case, Problem

from nsa.blocks import Span
from nsa.kernels.topk import select_blocks

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

# What each kernel could have wrong of what its warps tell each other.
FULL, EMPTY, NOT = "mbarrier.wait(full", "mbarrier.wait(empty", "pass  #"

BACK = "mbarrier.arrive(v_empty.index(before))"

KEYS_BACK = "mbarrier.arrive(k_empty.index(before))"

TURN = "number // gl.num_programs(0)"

# Of kernels that have keys and values in rings, and scores in flight.
RINGS = [
    ("reads keys that are not there yet", "mbarrier.wait(k_full", NOT),
    ("reads values that are not there yet", "mbarrier.wait(v_full", NOT),
    ("overwrites keys that are in use", "mbarrier.wait(k_empty", NOT),
    ("overwrites values that are in use", "mbarrier.wait(v_empty", NOT),
    ("gives values back before they are summed",
     "acc = warpgroup_mma_wait(0, deps=[acc])\n" + 12 * " " + BACK,
     BACK + "\n" + 12 * " " + "acc = warpgroup_mma_wait(0, deps=[acc])"),
    ("reads scores in flight", "s = warpgroup_mma_wait(1", "s = warpgroup_mma_wait(2"),
]  # fmt: skip

FAULTS = {
    "dkdv": [
        ("reads a stage that is not there yet",
         f"{FULL}.index(stage), (n // STAGES) & 1)\n            s", "s"),
        ("waits for the stage before", "(n // STAGES) & 1)", "(n // STAGES + 1) & 1)"),
        ("overwrites a stage that is in use", EMPTY, NOT),
        ("gives a stage back twice", "            n += 1\n        let_by", "            n += 1\n"
         "            mbarrier.arrive(empty.index(stage))\n        let_by"),
        ("never gives it back", "            mbarrier.arrive(empty.index(stage))\n            n",
         "            n"),
        ("reads keys before they are there", "mbarrier.wait(loaded, 0)", "pass"),
        ("gives a stage back before its sums", "dk_acc, dv_acc = warpgroup_mma_wait(0,",
         "dk_acc, dv_acc = warpgroup_mma_wait(1,"),
        ("expects too few bytes", "* 4)", "* 4 - 4)"),
    ],
    "dq": [
        ("reads a stage that is not there yet", FULL, NOT),
        ("overwrites a stage that is in use", EMPTY, NOT),
        ("reads queries before they are there", "mbarrier.wait(q_full", NOT),
        ("overwrites queries that are in use", "mbarrier.wait(empty.index(side)", NOT),
        ("never gives queries back", "mbarrier.arrive(q_empty", NOT),
        ("takes every tile for the first", TURN, "0"),
        ("forgets the steps of the tiles before", "behind += steps", "pass"),
    ],
    "forward": [
        *RINGS,
        ("takes every tile for the first", TURN, "0"),
        ("forgets the steps of the tiles before", "behind += steps", "pass"),
    ],
    "scores": [
        ("reads queries that are not there yet", "mbarrier.wait(q_full", NOT),
        ("overwrites queries that are in use", EMPTY, NOT),
        RINGS[0],
        RINGS[2],
        RINGS[5],
        ("gives queries back in flight", "s = warpgroup_mma_wait(0", "s = warpgroup_mma_wait(1"),
        ("expects too few bytes", "* 2 + 4)", "* 2)"),
        ("reads the other half before it is there", "mbarrier.wait(handed_full", NOT),
        ("overwrites the half that is not read yet", "mbarrier.wait(handed_empty", NOT),
        ("forgets the steps of the tiles before", "behind += mine", "pass"),
        ("takes an odd step's queries for the next", "let_by(n, n + over", "let_by(n, n"),
        ("forgets what reaches into the other half", "to_open + left_over", "to_open"),
        ("forgets the other half", "_merge(best, others)", "best"),
    ],
    "selected": [
        ("reads keys that are not there yet", FULL, NOT),
        *RINGS[1:],
        ("reads the other warpgroup's blocks", "SIDE * STAGES", "0"),
        ("takes every tile's first block for the first of all", "        n += 1\n\n", "\n"),
        ("takes the next block's tokens for this one's", "m, this, these,", "m, block, member,"),
    ],
    "selected_dq": [
        ("reads keys and values that are not there yet", FULL, NOT),
        ("reads keys when values are there", "k_at, k_full, n", "k_at, v_full, n"),
        ("reads values when keys are there", "v_at, v_full, n", "v_at, k_full, n"),
        *RINGS[2:4],
        ("gives keys back before they are summed",
         "acc = warpgroup_mma_wait(0, deps=[acc])\n" + 16 * " " + KEYS_BACK,
         KEYS_BACK + "\n" + 16 * " " + "acc = warpgroup_mma_wait(0, deps=[acc])"),
        ("gives values back in flight", "dp = warpgroup_mma_wait(1", "dp = warpgroup_mma_wait(2"),
        ("reads scores in flight", "s = warpgroup_mma_wait(2", "s = warpgroup_mma_wait(3"),
        ("reads the other warpgroup's keys", "SIDE * K_STAGES", "0"),
        ("takes every tile's first block for the first of all", "n += 1\n            if kept",
         "if kept"),
        ("sums the keys of this step for those before", "k_at.index(before)", "k_at.index(stage)"),
        ("fetches tiles of few keys once", "steps *= rounds", "pass  #"),
        ("takes the second time with the first's delta", "shift = shift + beyond", "pass"),
    ],
}  # fmt: skip

EACH = [(kernel, *fault) for kernel, faults in FAULTS.items() for fault in faults]


class Right:
    """A problem of several steps a program, and what each kernel makes of it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.given = FEW.draw()
        self.chosen = selected(FEW, self.given, base=None)
        self.problem = Problem(by_warps(Case((640,), Span(lookback=640), 1, 1, 64, 64), 0))
        _, self.lse2 = self.problem.forward()
        _, self.delta = self.problem.dq(self.lse2)
        self.scored = scored((1, 800), FINE, 2, 1)

    def of(self, kernel: str) -> torch.Tensor:
        if kernel == "scores":
            return select_blocks(*self.scored, specialized=True)
        if kernel == "selected":
            return selected(FEW, self.given, base=None)["o"]
        if kernel == "selected_dq":
            return selected_backward(FEW, self.given, **self.chosen)["dq"]
        if kernel == "forward":
            return self.problem.forward()[0]
        if kernel == "dq":
            return self.problem.dq(self.lse2)[0]
        return self.problem.dkdv(self.lse2, self.delta)[0]


@pytest.fixture(scope="module")
def right() -> dict:
    return {}


@pytest.mark.full
@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves")
@pytest.mark.parametrize(
    ("kernel", "what", "of", "by"), EACH, ids=[f"{x[0]}: {x[1]}" for x in EACH]
)
def test_the_emulator_finds_what_a_kernel_may_have_wrong(run, right, kernel, what, of, by):
    run()
    if not right:
        right["problem"] = Right()
    problem, changed = right["problem"], []
    if kernel not in right:
        right[kernel] = problem.of(kernel)

    def change(source: str) -> str:
        changed.append(of in source)
        return source.replace(of, by)

    for seed in range(6):
        run(seed=100 * seed, change=change)
        try:
            found = problem.of(kernel)
        except (AssertionError, IndexError):
            return
        assert any(changed), f"{of} is in none of {kernel}'s functions"
        if not torch.equal(found, right[kernel]):
            return
    raise AssertionError(f"a kernel that {what} was not found out")
