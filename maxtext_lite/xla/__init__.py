"""XLA's compilers: machines that are not there, compiler flags, and what a compiled program does."""

from maxtext_lite.xla.described import as_default_device, assumed_of, topology_devices

__all__ = ["as_default_device", "assumed_of", "topology_devices"]
