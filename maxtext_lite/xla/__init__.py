"""XLA's compilers: targets that are not attached, compiler flags, and the analysis of compiled programs."""

from maxtext_lite.xla.described import as_default_device, assumed_of, topology_devices

__all__ = ["as_default_device", "assumed_of", "topology_devices"]
