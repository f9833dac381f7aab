"""Parts of a training run that maxtext_lite finds by entry points; see pyproject.toml."""
