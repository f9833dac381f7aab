"""The hosts that read, how many rows each reads, and in how many loads (`expansion_factor_real_data`)."""

from dataclasses import dataclass
from fractions import Fraction

from maxtext_lite.config import BatchConfig
from maxtext_lite.config.errors import number_text, unwhole_text
from maxtext_lite.config.violation import Violation, divisors_of

_ROUNDED = Fraction(1, 1000)


@dataclass(frozen=True)
class Loading:
    """How one step's examples are read.

    Attributes:
      factor: expansion_factor_real_data, with -1 resolved to 1.
      loading_hosts: the hosts that read; the others contribute only empty slots.
      loads_per_step: loads that make one step; 1 unless the factor is below 1.
    """

    factor: Fraction
    loading_hosts: tuple[int, ...]
    loads_per_step: int

    def global_batch_to_load(self, global_batch_to_train: int) -> int:
        """Row slots of one load over all hosts: batch x factor, rounded up to a whole slot, which then stays empty."""
        return -(-global_batch_to_train * self.factor.numerator // self.factor.denominator)

    def examples_per_loading_host(self, global_batch_to_train: int) -> Fraction:
        """Examples that one loading host reads in one load; a fraction where the shares of hosts differ by one."""
        return Fraction(global_batch_to_train, len(self.loading_hosts) * self.loads_per_step)


def loading_hosts(config: BatchConfig, num_hosts: int) -> Loading | Violation:
    """The loading hosts, or why the factor does not suit this number of hosts."""
    key, stated = "expansion_factor_real_data", config.expansion_factor_real_data
    factor = Fraction(1) if stated == -1 else stated
    if factor < 1:
        if factor.numerator == 1:
            return Loading(factor, tuple(range(num_hosts)), factor.denominator)
        loads = 1 / factor
        return Violation(
            key,
            f"{key}={number_text(factor)} is 1/x = {unwhole_text(loads)} loads per step, not a whole number.",
            (Fraction(1, int(loads) + 1), Fraction(1, int(loads))),
        )
    hosts = num_hosts / factor
    if hosts.denominator == 1:
        return Loading(factor, tuple(range(int(hosts))), 1)
    is_rounded = abs(hosts - round(hosts)) < _ROUNDED and hosts > 1
    meant = Fraction(num_hosts, round(hosts)) if is_rounded else None  # 2.6667 on 8 hosts is 8/3
    return Violation(
        key,
        f"{key}={number_text(factor)}: {num_hosts} hosts / {number_text(factor)} = "
        f"{unwhole_text(hosts)} loading hosts, not a whole number.",
        (meant,) if meant else (divisors_of(key, num_hosts, factor),),
    )
