"""Hugging Face directories: their tensors onto the mesh and back, by one table of names for each family."""

from maxtext_lite.hf.carried import new_ends, store_files
from maxtext_lite.hf.entries import flat
from maxtext_lite.hf.export import export_model, export_parameters
from maxtext_lite.hf.importing import load_hf_parameters
from maxtext_lite.hf.peft import export_adapters, read_peft_adapters

__all__ = [
    "export_adapters",
    "export_model",
    "export_parameters",
    "flat",
    "load_hf_parameters",
    "new_ends",
    "read_peft_adapters",
    "store_files",
]
