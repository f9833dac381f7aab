"""The text of a module is read as XLA writes it: arrays and their memory, operands, what calls what and how often."""

import math

import pytest

from maxtext_lite.analysis.hlo import arrays_of, parse

MODULE = """HloModule jit_step, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%a, %b)
}

%condition (p: (s32[], bf16[8,128])) -> pred[] {
  %limit = s32[]{:T(128)} constant(12)
  %p = (s32[], bf16[8,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%fused (p: bf16[8,128]) -> bf16[8,128] {
  %p = bf16[8,128] parameter(0)
  ROOT %twice = bf16[8,128] add(%p, %p)
}

%body (p: (s32[], bf16[8,128])) -> (s32[], bf16[8,128]) {
  %p = (s32[], bf16[8,128]) parameter(0)
  %x = bf16[8,128] get-tuple-element(%p), index=1
  %kernel.1 = f32[8] custom-call(%x), custom_call_target="tpu_custom_call", backend_config={"text":{
"lines of their own": {"closed": "so"
}}, metadata={}
  %fusion.1 = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} fusion(bf16[8,128]{1,0} %x), kind=kLoop, calls=%fused
  %i = s32[] get-tuple-element(%p), index=0
  %two = s32[]{:T(128)} constant(2)
  %next = s32[]{:T(128)} add(%i, %two)
  ROOT %t = (s32[], bf16[8,128]) tuple(%next, /*index=1*/%x)
}

%branch (x: bf16[8,128]) -> bf16[8,128] {
  ROOT %x = bf16[8,128] parameter(0)
}

ENTRY %main (x: bf16[8,128]) -> bf16[8,128] {
  %x = bf16[8,128]{1,0} parameter(0)
  %while.1 = (s32[], bf16[8,128]) while(%x), condition=%condition, body=%body
  %one = s32[] constant(1)
  %chosen = bf16[8,128] conditional(%one, %x, %x), branch_computations={%branch, %fused}
  %kept = bf16[8,128]{1,0:S(5)} copy(%chosen)
  ROOT %r = bf16[8,128] get-tuple-element(%while.1), index=1
}
"""


def test_trips_that_xla_noted_win_and_a_loop_that_counts_in_another_way_is_unknown():
    noted = MODULE.replace(
        "body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}'
    )
    assert parse(noted).runs["body"].times == 5
    odd = MODULE.replace("add(%i, %two)", "multiply(%i, %two)")
    assert odd != MODULE
    assert math.isnan(parse(odd).runs["body"].times)
    assert parse(odd, trips_where_unknown=3).runs["body"].times == 3
    scoped = odd.replace(
        "body=%body", 'body=%body, metadata={op_name="jit(f)/spare/while"}'
    )
    assert parse(scoped, trips_where_unknown=3, not_run="spare").runs["body"].times == 0
    assert math.isnan(parse(scoped, not_run="other").runs["body"].times)
    known = noted.replace(
        "body=%body", 'body=%body, metadata={op_name="jit(f)/spare/while"}'
    )
    assert parse(known, not_run="spare").runs["body"].times == 5


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("f32[16,24]", 1536),
        ("pred[]", 1),
        ("s4[6]", 3),
        ("token[]", 0),
        ("f32[<=4,2]{1,0}", 32),
    ],
)
def test_bytes_of_arrays(text, size):
    assert [array.num_bytes for array in arrays_of(text)] == [size]
