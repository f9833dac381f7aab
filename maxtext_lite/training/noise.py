"""The gradient noise scale: the examples per step at which the gradient's noise equals the gradient in size.

Source: McCandlish et al. 2018, arXiv:1812.06162, section 2.2 and appendix A.1, with groups of unequal size.

A step of W target tokens consists of n groups (one replica's part of one micro-batch); group g has w_g tokens and mean
gradient m_g, with expectation mu and covariance of trace S / w_g. Weighted by tokens,

    E[sum_g (w_g / W) |m_g|^2] = |mu|^2 + n S / W     and     E[|sum_g (w_g / W) m_g|^2] = |mu|^2 + S / W

Their difference gives unbiased estimates of S and |mu|^2; the ratio S / |mu|^2 is the noise scale.
"""

import dataclasses
import math

_LONGEST_MEMORY = 2000  # steps


@dataclasses.dataclass(frozen=True)
class NoiseScale:
    """Running means of S, per example, and of |mu|^2. Pure: `after` returns the next one.

    A step's weight grows with its number up to step 2,000, and from there on the mean is exponential: the means forget
    the beginning of a run as fast as the run grows. Checkpoints save its `dataclasses.asdict`.

    Attributes:
      steps: steps that gave an estimate.
      weight_squares: sum of squared weights, the inverse of the effective number of independent steps.
      noise: mean of S per example; noise_squared and signal_squared: of the squares; product: of the products.
      signal: mean of |mu|^2.
    """

    steps: int = 0
    weight_squares: float = 1.0
    noise: float = 0.0
    signal: float = 0.0
    noise_squared: float = 0.0
    signal_squared: float = 0.0
    product: float = 0.0

    def after(self, *, group_squares: float, groups: int, grad_norm: float, examples: int) -> "NoiseScale":
        """The means after another step; unchanged by one with fewer than two groups or a non-finite gradient.

        Args:
          group_squares: sum over groups of (w_g / W) |m_g|^2, as in `gradients.StepGradients`.
          groups: n, the groups with a target token.
          grad_norm: norm of the whole step's gradient.
          examples: examples of the step.
        """
        whole = grad_norm**2
        if groups < 2 or not math.isfinite(group_squares) or not math.isfinite(whole):
            return self
        variance = (group_squares - whole) / (groups - 1)  # of the step's gradient: S / W
        noise = variance * examples
        signal = whole - variance
        steps = self.steps + 1
        weight = max(2 / (steps + 1), 2 / (_LONGEST_MEMORY + 1))

        def mean(old: float, new: float) -> float:
            return (1 - weight) * old + weight * new

        return NoiseScale(
            steps,
            (1 - weight) ** 2 * self.weight_squares + weight**2,
            mean(self.noise, noise),
            mean(self.signal, signal),
            mean(self.noise_squared, noise**2),
            mean(self.signal_squared, signal**2),
            mean(self.product, noise * signal),
        )

    @property
    def examples(self) -> float | None:
        """The noise scale in examples; None while the mean of the gradient or of its noise is not positive."""
        return self.noise / self.signal if self.noise > 0 and self.signal > 0 else None

    @property
    def relative_error(self) -> float | None:
        """The relative standard error of `examples`, to first order; None before the second step.

        Steps count as independent. Drift during the run counts as scatter, so the error is an overestimate. After few
        steps it is wider, by Student's t, because the scatter is itself an estimate.
        """
        if self.examples is None or self.weight_squares >= 1:
            return None
        noise, signal, both = self._scatter
        scatter = noise / self.noise**2 + signal / self.signal**2 - 2 * both / (self.noise * self.signal)
        return math.sqrt(max(scatter, 0.0))

    @property
    def interval(self) -> tuple[float, float | None] | None:
        """The 68 % confidence interval of the noise scale; None where `relative_error` is.

        It contains each r for which noise - r signal is within one standard error of 0. Its upper end is None while the
        gradient itself is within one standard error of 0: then the noise scale has no upper bound.

        Source: Fieller 1954, "Some Problems in Interval Estimation", J. R. Stat. Soc. B 16(2).
        """
        if self.examples is None or self.weight_squares >= 1:
            return None
        noise, signal, both = self._scatter
        a = self.signal**2 - signal
        b = self.noise * self.signal - both
        c = self.noise**2 - noise
        root = math.sqrt(max(b * b - a * c, 0.0))
        if a > 0:
            return max((b - root) / a, 0.0), (b + root) / a
        low = (b - root) / a if a < 0 else 0.0  # with a < 0, all numbers but those between the roots
        return max(low, 0.0) if c > 0 else 0.0, None

    @property
    def _scatter(self) -> tuple[float, float, float]:
        """Squared standard errors of `noise` and `signal`, and the covariance of the two errors."""
        freedom = 1 / self.weight_squares - 1
        student = 1 + 0.5 / freedom + 0.25 / freedom**2 + 0.0625 / freedom**3  # t at one standard deviation, expanded
        factor = student**2 / freedom
        return (
            factor * (self.noise_squared - self.noise**2),
            factor * (self.signal_squared - self.signal**2),
            factor * (self.product - self.noise * self.signal),
        )

    def record(self, global_batch: int) -> dict[str, float | None]:
        """The entries in a line of metrics.jsonl."""
        examples = self.examples
        low, high = self.interval or (None, None)
        return {
            "gradient_noise_scale": examples,
            "gradient_noise_scale_ratio": None if examples is None else examples / global_batch,
            "gradient_noise_scale_error": self.relative_error,
            "gradient_noise_scale_low": low,
            "gradient_noise_scale_high": high,
        }


def why_unknown(*, num_replicas: int, accumulation: int, local_updates: bool, interleaved: bool) -> str | None:
    """Why a run has no noise scale; None where it has one.

    Args:
      interleaved: the pipeline schedule is 1f1b, in which micro-batches have no separate gradients.
    """
    if local_updates:
        return "replicas have parameters of their own (enable_diloco), so their gradients are not samples of one"
    if interleaved and num_replicas == 1:
        return "pipeline_schedule=1f1b adds up the micro-batches of one replica on the data axis; it takes two replicas"
    if num_replicas * accumulation > 1:
        return None
    return "a step has one gradient (gradient_accumulation_steps=1 and one replica on the data axis); it takes two"
