"""Every kernel compiles for the chips it is meant for and fits them; needs no GPU.

Covers whatever `compiled.reach` launches, and fails for a kernel that it does not reach.
"""

from functools import cache

import pytest
from compiled import apart, crossed, dropped
from processes import told_by

MAIN = 90, "main", "dense"
SHARED_KIB = {80: 163, 90: 227}  # what a block can have
SPILLED = 320  # bytes a thread, as for addresses that are set up before a loop
# The aims' shape with least and with most in its kernels, and what fills the smaller chip most.
CORNERS = (
    MAIN,
    (90, "main", "packed-sinks"),
    (90, "main", "offset"),
    (80, "wide", "dense"),
)
TARGETS = [
    pytest.param(
        architecture,
        *of,
        marks=[pytest.mark.slow] * ((architecture, *of) != MAIN)
        + [pytest.mark.long] * ((architecture, *of) not in CORNERS),
    )
    for architecture in SHARED_KIB
    for of in [
        ("main", "packed-sinks"),
        ("main", "sinks"),
        ("main", "offset"),
        ("main", "packed-offset"),
        *((x, "dense") for x in ("main", "narrow", "fp32", "wide")),
    ]
]


@cache
def compiled(architecture: int, shape: str, kind: str) -> dict:
    return told_by("compiled.py", architecture, shape, kind)


LANES = """\
#linear = #ttg.linear<{register = [[0, 1]], lane = [%s], warp = [[0, 16]], block = []}>
  %%top = "tt.reduce"(%%found) <{axis = 1 : i32}> ({
    tt.reduce.return %%larger : i64
  }) : (tensor<1x32xi64, #linear>) -> tensor<1xi64, #ttg.slice<{dim = 1, parent = #linear}>>
"""


def test_lanes_that_are_not_neighbours_are_found():
    neighbours = "[0, 0], [0, 2], [0, 4], [0, 8], [0, 0]"
    assert not apart(LANES % neighbours)
    gap = LANES % "[0, 2], [0, 0], [0, 0], [0, 4], [0, 8]"
    assert apart(gap) == ["tensor<1x32xi64, #linear> over axis 1"]
    sliced = gap.replace("<1x32xi64, #linear", "<32xi64, #ttg.slice<{dim = 0, parent = #linear}>")
    assert len(apart(sliced.replace("axis = 1", "axis = 0"))) == 1


# What ptxas made of the window's forward at T 1, D 96 and DV 16, and of the same at T 2.
SAME = """\
        /*04b0*/               @P0 R2UR UR7, R5 ;
        /*1110*/                   UIADD3 UR4, UP0, UR7, 0x20, URZ ;
        /*1120*/                   UIADD3.X UR5, UR7, -0x3ffffff0, URZ, UP0, !UPT ;
"""


def test_an_address_made_of_one_register_twice_is_found():
    assert crossed(SAME) == ["UIADD3.X UR5, UR7, -0x3ffffff0, URZ, UP0, !UPT"]
    assert not crossed(SAME.replace("UR5, UR7", "UR5, UR6"))
    lines = SAME.splitlines()
    between = "        /*1118*/                   UMOV UR7, URZ ;"
    assert not crossed("\n".join([*lines[:2], between, lines[2]]))


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("kind", ["one", pytest.param("odd", marks=pytest.mark.long)])
def test_one_token_and_odd_rows_make_no_address_of_one_register_twice(kind):
    found = compiled(90, "thin", kind)["compiled"]
    wrong = [x for x in found if x["crossed"] or x["dropped"]]
    assert found and not wrong, said(wrong)


# Machine code of two products of which one was left out: its place is taken by an empty one.
LEFT_OUT = """\
  HGMMA.64x8x16.F16 RZ, gdesc[URZ], RZ, !UPT, gsb0 ;
  HGMMA.64x8x16.F32.BF16 R76, R92, gdesc[UR4], RZ, !UPT ;
"""


def test_a_product_that_is_left_out_is_counted():
    ptx = "wgmma.mma_async.sync.aligned.m64n64k16\nwgmma.mma_async.sync.aligned.m64n8k16\n"
    assert dropped(ptx, LEFT_OUT) == 1
    assert dropped(ptx, LEFT_OUT.replace("RZ, gdesc[URZ]", "R24, R92, gdesc[UR52]")) == 0


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("shape", ["narrow", "main"])
def test_no_product_with_one_key_is_left_out(shape):
    found = compiled(90, shape, "one-key")["compiled"]
    assert len(found) == 1 and not found[0]["dropped"], said(found)


def said(found: list[dict]) -> str:
    return "\n".join(map(str, found))


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize(("architecture", "shape", "kind"), TARGETS)
def test_every_kernel_compiles_and_fits_the_chip(architecture, shape, kind):
    found = compiled(architecture, shape, kind)["compiled"]
    too_large = [x for x in found if x["shared"] > SHARED_KIB[architecture] * 1024]
    assert found and not too_large, said(too_large)
    gaps = [x for x in found if x["apart"]]
    assert not gaps, f"reductions over lanes that are not neighbours:\n{said(gaps)}"
    if architecture == 90 and shape != "fp32":
        without = [x for x in found if x["rows"] >= 64 and not x["wgmma"]]
        assert not without, f"products not by wgmma:\n{said(without)}"
    if shape == "main" and architecture == 90:
        spilling = [x for x in found if x["spilled"] > SPILLED]
        assert not spilling, f"registers spill to memory:\n{said(spilling)}"


@pytest.mark.processes
@pytest.mark.full
def test_no_kernel_is_left_out():
    answer = compiled(*MAIN)
    left_out = set(answer["kernels"]) - {x["kernel"] for x in answer["compiled"]}
    assert answer["kernels"] and not left_out, f"compiled.reach does not launch {left_out}"
