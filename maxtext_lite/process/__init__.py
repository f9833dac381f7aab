"""A command's own process: signals, streams, phases, watchdog; a run's records and goodput. Only the standard library,
as it is imported before everything else."""
