"""The time of a scheduled module, by hand: instructions in order, collectives and copies beside them."""

import pytest

from maxtext_lite.analysis.hlo import collectives, parse, scheduled_seconds

BUSY = {"work": 10.0, "copy-start": 4.0, "fusion": 5.0, "add": 1.0}
SENT = 7.0

GROUPS = "replica_groups={{0,1}}, channel_id=1"
GATHER = f"f32[8] all-gather-start(%p), dimensions={{0}}, {GROUPS}"


def seconds(body, *more):
    """Of an entry computation; what its custom calls, copies, fusions and additions take is BUSY, a collective SENT."""
    text = "\n".join(
        [
            "HloModule m, is_scheduled=true, num_partitions=2",
            "",
            *more,
            "ENTRY %main (p: f32[4]) -> f32[4] {",
            "  %p = f32[4]{0} parameter(0)",
            *(f"  {line}" for line in body),
            "}",
            "",
        ]
    )
    module = parse(text)

    def busy(computation, it):
        return BUSY.get("work" if it.opcode == "custom-call" else it.opcode, 0.0)

    return scheduled_seconds(
        module, collectives(module), busy=busy, sent=lambda collective: SENT
    )


WORK = '%w{} = f32[4] custom-call(%p), custom_call_target="kernel"'


@pytest.mark.fast
def test_what_runs_beside_is_hidden_and_what_is_awaited_early_is_not():
    start, done = f"%g = {GATHER}", "%d = f32[8] all-gather-done(%g)"
    assert seconds([start, WORK.format(1), done]) == 10
    assert seconds([start, done, WORK.format(1)]) == 17
    assert seconds([WORK.format(1), start, "%a = f32[4] add(%p, %p)", done]) == 17
    assert (
        seconds(
            [f"%g = f32[8] all-gather(%p), dimensions={{0}}, {GROUPS}", WORK.format(1)]
        )
        == 17
    )


@pytest.mark.parametrize(("parts", "want"), [(1, 7), (3, 3 * 5)])
def test_the_parts_of_a_tpus_gather_run_beside_their_fusions(parts, want):
    """The gather is awaited by the last fusion that contains a part of it."""
    config = 'backend_config={"async_collective_fusion_config":{"chain_id":"9"}}'
    fused = [
        line
        for at in range(parts)
        for line in (
            f"%fused.{at} (x: f32[4]) -> f32[4] {{",
            f"  %x.{at} = f32[4]{{0}} parameter(0)",
            f"  ROOT %g.{at} = f32[8] all-gather(%x.{at}), dimensions={{0}}, {GROUPS}, {config}",
            "}",
        )
    ]
    calls = [
        f"%f.{at} = f32[8] fusion(%p), kind=kCustom, calls=%fused.{at}"
        for at in range(parts)
    ]
    assert seconds(calls, *fused) == want
