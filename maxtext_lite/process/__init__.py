"""A command's own process: signals, streams, phases, watchdog. Imports only the standard library, as it comes first."""
