"""The tiny models of hf_models.yml; more of them, of families that need one term of the decoder each."""

from pathlib import Path

import yaml

TINY = yaml.load(
    Path(__file__).with_name("hf_models.yml").read_text(encoding="utf-8"),
    yaml.CSafeLoader,
)
VARIANTS = TINY["variants"]
"""As `hf_models.MODELS`."""
