"""Machine code read from a listing as nvdisasm writes it: blocks, loops, the steady path, what it costs."""

from __future__ import annotations

import pytest

from jaxserve.aot.gpu_schedule import cycles_alone, events, roles
from jaxserve.aot.sass import parse

PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24"  # 32 cycles
CODE = [
    (4, "S2R R0, SR_TID.X"),
    (5, "@P1 BRA `(.L_x_9)"),
    "tiles:.L_x_1:",
    (2, "SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR26], R4"),
    (5, "@!P2 BRA `(.L_x_5)"),
    "arrived:.L_x_2:",
    (1, PRODUCT),
    (1, PRODUCT + ", gsb0"),
    (6, "WARPGROUP.DEPBAR.LE gsb0, 0x0"),
    (5, "@P3 BRA `(.L_x_3)"),
    (1, "FSEL R1, R1, R2, P4"),  # a mask
    (1, "STS.128 [R3], R4"),
    "masked:.L_x_3:",
    (2, "MUFU.EX2 R1, R1"),
    (4, "STS.64 [R3], R4"),
    (5, "@P0 BRA `(.L_x_1)"),
    (5, "EXIT"),
    "not there yet:.L_x_5:",
    (4, "SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR26], R4"),
    (5, "@!P2 BRA `(.L_x_5)"),
    (5, "BRA `(.L_x_2)"),
    "pages:.L_x_9:",
    (1, "@P6 LDL R2, [R1]"),
    (5, "@P4 BRA `(.L_x_10)"),
    (4, "UTMALDG.4D [UR8], [UR26]"),
    "or:.L_x_10:",
    (5, "@!P4 BRA `(.L_x_11)"),
    (1, "FADD R1, R1, R1"),
    (4, "UTMALDG.4D [UR8], [UR26]"),
    "both:.L_x_11:",
    (5, "@P5 BRA `(.L_x_9)"),
    (5, "EXIT"),
]


def listing() -> str:
    lines, address = ['\t.section\t.text.some_kernel_mosaic_gpu_kernel,"ax",@progbits'], 0
    for item in CODE:
        if isinstance(item, str):
            lines.append(item[item.index(".") :])
            continue
        stall, text = item
        lines.append(f"        /*{address:04x}*/    {text} ;    /* 0x{address:016x} */")
        lines.append(f"                                         /* 0x{stall << 41 | 7 << 46:016x} */")
        address += 16
    return "\n".join(lines)


def test_loops_and_their_steady_paths() -> None:
    kernel = parse(listing())
    assert kernel.name == "some_kernel" and len(kernel.instructions) == sum(not isinstance(item, str) for item in CODE)
    tiles, pages = kernel.loops  # the one that waits for a barrier is none
    assert [x.base for x in kernel.steady_path(tiles, "HGMMA")] == [
        "SYNCS", "BRA", "HGMMA", "HGMMA", "WARPGROUP", "BRA", "MUFU", "STS", "BRA"
    ]  # fmt: skip
    assert len(kernel.code(tiles)) == 9 + 2 + 3
    assert sum(x.base == "UTMALDG" for x in kernel.steady_path(pages, "UTMALDG")) == 2
    one = kernel.steady_path(pages, "UTMALDG", UTMALDG=1)  # branches that exclude each other: the shorter way of the two
    assert [x.base for x in one] == ["LDL", "BRA", "UTMALDG", "BRA", "BRA"]
    with pytest.raises(ValueError, match="no way through the loop at"):
        kernel.steady_path(tiles, HGMMA=1)


def test_what_a_turn_costs() -> None:
    consumer, producer = roles(parse(listing()), copies=1)
    assert (consumer.name, producer.name) == ("consumer", "producer")
    cost = consumer.steady
    assert (cost.instructions, cost.stall_cycles, cost.tensor_cycles) == (9, 31, 64)
    # Each product reads 64 rows and 64 columns of 16 values of two bytes, the store writes 8 bytes of 128 threads.
    assert cost.smem_bytes == 2 * (64 + 64) * 16 * 2 + 8 * 128
    assert cost.unit_cycles["special"] == 8 and not cost.spills and producer.steady.spills == 1
    assert events(consumer.path) == "wait | 1 | 2 of 64x64x16 | in flight 0 | 4"


def test_products_in_flight_hide_what_is_done_meanwhile() -> None:
    (consumer, _) = roles(parse(listing()))
    assert cycles_alone(consumer.path) == 64 + 31 - 2  # the two products are issued meanwhile
    overlapped = parse(listing().replace("gsb0, 0x0", "gsb0, 0x1"))
    assert cycles_alone(roles(overlapped)[0].path) == 64


def test_a_listing_without_a_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernel"):
        parse("nothing")
