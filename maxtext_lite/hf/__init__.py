"""Hugging Face directories: their tensors onto the mesh and back, by one table of names for each family."""
