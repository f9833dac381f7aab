"""Batches of other sizes over the same examples, and the size from which the loss suffers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from maxtext_lite.config import UserError
from maxtext_lite.config.errors import number_text
from maxtext_lite.config.nearest import divisors

WORSE = 0.01
"""The relative excess over the best loss from which a loss counts as worse."""
_LAST_SHARE = Fraction(1, 4)


@dataclass(frozen=True)
class BranchSizes:
    """How one branch divides the examples into steps.

    Attributes:
      batch: examples per step, `factor` times the run's.
      accumulation: micro-batches per step, equal and as few as possible without one larger than the run's.
    """

    factor: Fraction
    batch: int
    accumulation: int
    steps: int


def branch_sizes(factors: Sequence[Fraction], *, batch: int, accumulation: int, steps: int) -> list[BranchSizes]:
    """What each factor makes of `steps` batches of a run.

    Raises:
      UserError: factor 1 is missing, or a factor does not divide the examples into whole batches; names the nearest.
    """
    examples, problems = batch * steps, list[str]()
    if 1 not in factors:
        problems.append("--factors has no 1, which the others are compared with. Nearest that works: 1 beside them.")
    for factor in factors:
        wanted = factor * batch
        if factor > 0 and wanted.denominator == 1 and examples % wanted.numerator == 0:
            continue
        whole = divisors(examples)
        near = {
            max((e for e in whole if e < wanted), default=1),
            min((e for e in whole if e > wanted), default=examples),
        }
        named = " or ".join(f"{number_text(Fraction(each, batch))} ({each})" for each in sorted(near))
        problems.append(
            f"--factors={number_text(factor)}: --steps={steps} x {batch} examples = {examples} are not a whole number "
            f"of batches of {number_text(wanted)}. Nearest that work: {named}."
        )
    if problems:
        raise UserError(problems)

    def sizes(factor: Fraction) -> BranchSizes:
        branch = int(factor * batch)
        fewest = next(each for each in divisors(branch) if each >= factor * accumulation)
        return BranchSizes(factor, branch, fewest, int(steps / factor))

    return [sizes(factor) for factor in sorted(set(factors))]


def compared_examples(sizes: Sequence[BranchSizes]) -> int:
    """The number of final examples whose training losses are averaged: a quarter, or the largest batch if larger."""
    largest = max(each.batch for each in sizes)
    return max(int(_LAST_SHARE * sizes[0].batch * sizes[0].steps), largest)


def critical_batch(losses: Mapping[int, float]) -> float | None:
    """The batch at which the loss after equally many examples exceeds the best by `WORSE`; None: beyond the largest.

    Between measured batches it is interpolated over the logarithm of the batch.

    Args:
      losses: by batch in examples.
    Source: McCandlish et al. 2018, arXiv:1812.06162, section 2.2, for the idea of a batch beyond which more examples a
      step no longer pay; the threshold is ours.
    """
    before = min(losses, key=lambda batch: losses[batch])
    limit = (1 + WORSE) * losses[before]
    for batch in sorted(each for each in losses if each > before):
        if losses[batch] > limit:
            share = (limit - losses[before]) / (losses[batch] - losses[before])
            return before * (batch / before) ** share
        before = batch
    return None
