"""XLA's compilers: targets that are not attached, compiler flags, and the analysis of compiled programs."""
