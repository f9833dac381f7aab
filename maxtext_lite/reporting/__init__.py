"""A run directory as one HTML page. Imports no jax and needs no network."""

from maxtext_lite.reporting.page import render_page, write_page
from maxtext_lite.reporting.run_data import Run, read_runs

__all__ = ["Run", "read_runs", "render_page", "write_page"]
