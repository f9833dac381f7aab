"""The tiny models of hf_models.yml; more of them, of families that need one term of the decoder each."""

from tests.tables import read_table

TINY = read_table("hf_models.yml")
VARIANTS = TINY["variants"]
"""As `hf_models.MODELS`."""
