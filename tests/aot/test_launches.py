"""What is read out of a GPU program's HLO and thunks."""

from __future__ import annotations

from jaxserve.aot.launches import Thunks, count_launches, parse_thunks

HLO = """HloModule jit_run, entry_computation_layout={(bf16[8])->bf16[8]}

%fused_add (a: bf16[8]) -> bf16[8] {
  %a = bf16[8]{0} parameter(0)
  ROOT %sum = bf16[8]{0} add(%a, %a)
}

%body (carry: (s32[], bf16[8])) -> (s32[], bf16[8]) {
  %carry = (s32[], bf16[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %next = s32[] fusion(%i), kind=kLoop, calls=%fused_add
  %x = bf16[8]{0} fusion(%carry), kind=kLoop, calls=%fused_add
  ROOT %out = (s32[], bf16[8]{0}) tuple(%next, %x)
}

%never (p: bf16[8]) -> bf16[8] {
  ROOT %p = bf16[8]{0} parameter(0)
}

ENTRY %main.22 (x.1: bf16[8]) -> bf16[8] {
  %x.1 = bf16[8]{0} parameter(0)
  %two = (bf16[8]{0}, /*index=1*/(bf16[8]{0}, s32[])) custom-call(%x.1), custom_call_target="mosaic_gpu_v2"
  %one = bf16[8]{0} get-tuple-element(%two), index=0
  %copy-start = (bf16[8]{0}, bf16[8]{0}, u32[]) copy-start(%one)
  %copy-done = bf16[8]{0} copy-done(%copy-start)
  %loop = (s32[], bf16[8]{0}) while(%two), condition=%never, body=%body, backend_config={"known_trip_count":{"n":"10"}}
  %branch = bf16[8]{0} conditional(%one, %loop), branch_computations={%never, %fused_add}
  ROOT %view = bf16[8]{0} bitcast(%branch)
}
"""

THUNKS = """000: kCommandBuffer [source       | next=003 (1)]
    001: kCustomKernel [source | next=002 (1)] fusion grid: [1, 1, 1]
    002: kWhile        [prev=001 (1) | sink]
condition:
        003: kCustomKernel [source | sink] loop_compare_fusion
004: kAllReduce     [prev=000 (1) | next=005 (1)] kAllReduce
005: kWhile         [prev=004 (1) | sink]
condition:
    006: kCustomKernel [source | sink] loop_compare_fusion
000: kCommandBuffer [prev=005 (1) | sink]
    007: kCublasLtMatmul [source | sink] kCublasLtMatmul
    008: kAsyncStart     [prev=007 (1) | sink] stream=computation_stream[0], async_id=39
        010: kDynamicSliceFusion [source | sink] params=1, results=1
            009: kCopy [source | sink] kCopy
    011: kAsyncDone      [source | sink] async_id=39
"""


def test_launches() -> None:
    assert count_launches(HLO) == 1 + 1 + 10 * 2 + 1


def test_thunks() -> None:
    assert parse_thunks(THUNKS) == Thunks(graphs=2, in_graphs=5, outside=("kAllReduce", "kWhile"))
    assert parse_thunks("001: kCustomKernel [source | sink] fusion\n") == Thunks(0, 0, ("kCustomKernel",))
