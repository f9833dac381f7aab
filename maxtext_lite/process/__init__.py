"""What a command does to its own process. Needs the standard library only: it is imported before everything else."""
