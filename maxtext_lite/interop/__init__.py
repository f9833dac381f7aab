"""Hugging Face directories: their tensors onto the mesh and back, by one table of names for each family."""

from maxtext_lite.interop.carried import carry_files, stop_ids_of
from maxtext_lite.interop.chat import ChatTemplate
from maxtext_lite.interop.export import export_parameters
from maxtext_lite.interop.load import load_hf_parameters

__all__ = ["ChatTemplate", "carry_files", "export_parameters", "load_hf_parameters", "stop_ids_of"]
