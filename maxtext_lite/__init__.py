"""maxtext_lite: LLM training in JAX in which batch size is a first-class concept. Importing it imports no jax."""

from maxtext_lite.batching import make_plan
from maxtext_lite.config import load_config

__all__ = ["load_config", "make_plan"]
