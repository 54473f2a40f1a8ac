"""Reading a dump of libtpu's schedules."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.aot.tpu_schedule import Block, blocks, products, take_blocks

# As libtpu 0.0.48 writes it, shortened: a loop, in it a loop with a predicated region that multiplies, slots behind branches.
DUMP = """= control target key start
LH: loop header
LB: loop body
= control target key end

     0   :  { %0 = vdelay 1 } /* Start region 0 */
   0x1   :  { %s4_s0 = smov 0 }
   0x2 LB: > { %s96_s6 = sld [smem:[#allocation17]]  ;;  %s23_s1 = sphi %s4_s0 }
   0x3   : > { %v1 = vmatmul.mubr.bf16.gmra.mrb[0].mxu0 %v0 }
   0x4 LB: >> { %v2 = vmatmul.mubr.bf16.gmra.mrb[0].mxu0 %v0  ;;  %v3 = vmatmul.mubr.bf16.gmra.mrb[4].mxu1 %v0 }
   0x5   : >> { %v4 = vadd.f32 %v2, %v3 }
   0x6   : >> { %v5 = vmatmul.mubr.bf16.gmra.mrb[0].mxu0 %v0 }
   0x7   : >> { %17 = sbr.rel (!%p1) target = $region2 }
   0x8   :  { %v6 = vdelay 1 }
   0x9 PF: >> { %s7 = smov %s8 }
   0xa PF:  { %8 = vsyncpa [#allocation3], 1 }
"""


def test_blocks_end_where_a_branch_may_lead() -> None:
    found = blocks(DUMP)
    assert found == [Block(0, 2, 0), Block(1, 2, 1), Block(2, 4, 3), Block(0, 1, 0), Block(2, 1, 0), Block(0, 1, 0)]
    assert products(found) == [Block(2, 4, 3)]


def test_the_kernel_compiled_last(tmp_path: Path) -> None:
    (tmp_path / "10-attend.1-71-final_bundles.txt").write_text("   0x1   : > { %v1 = vmatmul }")
    (tmp_path / "20-attend.1-71-final_bundles.txt").write_text(DUMP)
    (tmp_path / "20-attend.1-71-schedule-analysis_final_bundles.txt").write_text("no bundles")
    (tmp_path / "30-write.1-71-final_bundles.txt").write_text("")
    assert take_blocks(tmp_path, "attend") == blocks(DUMP)
    assert not list(tmp_path.iterdir())
    with pytest.raises(KeyError, match="no schedule of 'attend'"):
        take_blocks(tmp_path, "attend")
