"""Device memory of a compiled program, by its compiler."""

from dataclasses import dataclass
from typing import Any

from jax.stages import Compiled


@dataclass(frozen=True)
class ProgramMemory:
    """Bytes per device by XLA's `memory_analysis()`.

    Attributes:
      arguments: for a train step, state and batch.
      outputs: new state and metrics; `aliased` bytes of them reuse arguments.
      temporaries: everything else the program allocates.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    generated_code: int

    @classmethod
    def of(cls, compiled: Compiled) -> "ProgramMemory":
        """The memory of an executable."""
        stats: Any = compiled.memory_analysis()
        held = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
        # On a TPU temp_size_in_bytes exceeds what is allocated: programs compile that would not fit by it.
        allocated = getattr(stats, "total_allocation_bytes", 0)  # since jax 0.11
        return cls(
            arguments=stats.argument_size_in_bytes,
            outputs=stats.output_size_in_bytes,
            aliased=stats.alias_size_in_bytes,
            temporaries=allocated - held if allocated else stats.temp_size_in_bytes,
            generated_code=stats.generated_code_size_in_bytes,
        )

    @property
    def total(self) -> int:
        """Bytes at the program's peak."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.generated_code
