"""Print batch size, learning rate, weight decay, warm-up and ramp from published laws. Needs no jax."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence

from maxtext_lite.analysis.laws import BATCH_LAWS, RATE_LAWS, WIDENING, Interval, Law, budget_of, timescale
from maxtext_lite.analysis.plan_view import short_number
from maxtext_lite.analysis.recommendation import UTILIZATION, LegalBatch, Machine, Ramp, Recommendation, recommend
from maxtext_lite.batching.devices import device_named
from maxtext_lite.cli import ArgumentParser, bounded, config_arguments, machine_arguments, real_number, run_command
from maxtext_lite.config import UserError, load_config
from maxtext_lite.config.errors import rounded_text
from maxtext_lite.config.records import json_text

_COUNT = bounded(real_number, 1, 1e21)  # of tokens or parameters
_count = functools.partial(short_number, digits=3, units="kMBT")
_TITLES = {
    "best": "batch for the lowest loss, tokens",
    "critical": "critical batch, beyond which larger batches hardly save steps, tokens",
    "rate": "peak learning rate",
}


def main(argv: Sequence[str]) -> int:
    """Prints what published laws say for a config's model and a number of tokens; returns the exit code.

    Raises:
      UserError: with every problem of the config or the arguments.
    """
    parser = ArgumentParser(prog="maxtext-lite advise", description=__doc__)
    config_arguments(parser)
    parser.add_argument("--tokens", type=_COUNT, required=True, help="training tokens of the whole run, such as 100e9")
    parser.add_argument("--parameters", type=_COUNT, help="model size, such as 8e9 (default: the config's)")
    parser.add_argument("--loss", type=bounded(real_number, 0.01, 100), help="target loss of the run, for Kaplan's law")
    machine_arguments(parser, "memory and time")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    arguments = parser.parse(argv)
    config = load_config(arguments.config, arguments.overrides)
    if config.run_kind == "rl":
        raise UserError("advise knows laws of pre-training, none of reinforcement learning. Use a config for train.")
    budget = budget_of(config, tokens=arguments.tokens, loss=arguments.loss)
    if arguments.parameters is not None:
        budget = dataclasses.replace(budget, parameters=arguments.parameters, non_embedding=arguments.parameters)
    device = None if arguments.device is None else device_named(arguments.device, option="--device")
    found = recommend(config, budget, Machine(arguments.devices, arguments.hosts, device))
    print(json_text(found.to_json(), indent=2, default=float) if arguments.json else "\n".join(_lines(found)))
    return 0


def _lines(found: Recommendation) -> Iterator[str]:
    budget = found.budget
    yield (
        f"N = {_count(budget.parameters)} parameters ({_count(budget.non_embedding)} without embeddings), "
        f"D = {_count(budget.tokens)} tokens ({rounded_text(budget.tokens / budget.parameters, 3)} a parameter), "
        f"C = 6 N D = {budget.flops:.3g} FLOPs"
    )
    yield from _of_laws(found, BATCH_LAWS, "best", found.best, _count)
    wide = _ends(found.best.widened(WIDENING), _count)
    yield f"  widened by a factor of {WIDENING:g}: {wide}, at the price of about 5 % more compute  [arXiv:2607.01487]"
    yield from _of_laws(found, BATCH_LAWS, "critical", found.critical, _count)
    yield from _of_laws(found, RATE_LAWS, "rate", found.learning_rate, "{:.2e}".format)
    yield ""
    decays = _ends(found.weight_decay, "{:.2g}".format)
    yield f"weight_decay  {decays}, from the smallest batch at the largest rate to the reverse"
    share = f"batch / (learning rate x {timescale(budget):.3g} x D)"
    yield f"              = {share}  [Power Lines; muP, its coefficient is not verified]"
    b2 = _ends(found.adam_b2, "{:g}".format, " or ")
    yield f"adam_b2       {b2}: 0.95 above 524,288 tokens a batch, else 0.99  [OLMo ladder]"
    steps = f"{_ends(found.warmup_steps, '{:,.0f}'.format)} at {_count(found.best.middle)} tokens a batch"
    yield f"warmup_steps  {steps}: N tokens (OLMo ladder), 2,000 steps (DeepSeek)"
    yield from _ramp_lines(found.ramp, budget.tokens)
    yield ""
    title = "batches that this machine can train, near these"
    if any(legal.days for legal in found.legal):
        title += f", and their days at an MFU of {UTILIZATION.high:.0%} to {UTILIZATION.low:.0%}"
        if found.legal[0].fits is None:
            title += ", for C FLOPs; the memory of --parameters is unknown"
    yield title
    yield from map(_legal_line, found.legal)
    yield ""
    sources = {law.name: law.source for law in (*BATCH_LAWS, *RATE_LAWS)}
    yield from (f"{name}: {source}" for name, source in sources.items())
    yield "The laws were fitted on other data and models, and are extrapolated. The gradient noise scale of a run"
    yield "underestimates the critical batch of language models: Merrill et al. 2025, arXiv:2505.23971."


def _of_laws(
    found: Recommendation, laws: Sequence[Law], purpose: str, span: Interval, show: Callable[[float], str]
) -> Iterator[str]:
    yield ""
    yield _TITLES[purpose]
    for law in laws:
        if law.purpose == purpose:
            value = law.value(found.budget)
            text = "--loss ?" if value is None else show(value)
            yield f"  {law.name:<12} {text:>9}  = {law.formula}  [{law.fitted}]"
    yield f"  span: {_ends(span, show)}, a factor of {rounded_text(span.high / span.low, 2)}"


def _ramp_lines(ramp: Ramp, tokens: float) -> Iterator[str]:
    if ramp.refusal:
        yield f"ramp          none: {ramp.refusal}"
        return
    yield f"ramp          from {_count(ramp.batches[0])} tokens a batch, doubled as the critical batch grows:"
    for batch, start in zip(ramp.batches[1:], ramp.starts, strict=True):
        shares = Interval(100 * start.low / tokens, 100 * start.high / tokens)
        share = _ends(shares, functools.partial(rounded_text, digits=2))
        yield f"  {_count(batch):>12}  after {_ends(start, _count)} tokens, {share} % of the run"
    if ramp.overrides:
        yield "  a run doubles its batch once; for earlier doublings, resume it with twice the batch. The last one:"
        yield f"  {' '.join(ramp.overrides)}"


def _legal_line(legal: LegalBatch) -> str:
    line = f"  {_count(legal.tokens):>9} = {legal.examples:,} examples: {' '.join(legal.overrides)}"
    if legal.empty_slots:
        line += f"; {legal.empty_slots:,} of {legal.examples + legal.empty_slots:,} slots empty"
    if legal.days is not None:
        line += f"; {_ends(legal.days, functools.partial(rounded_text, digits=3))} days"
    return line + ("" if legal.fits is not False else "  (the plan needs more memory than the device has)")


def _ends(interval: Interval, show: Callable[[float], str], between: str = " to ") -> str:
    return between.join(dict.fromkeys((show(interval.low), show(interval.high))))


if __name__ == "__main__":
    sys.exit(run_command(main))
