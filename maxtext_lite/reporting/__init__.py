"""A run directory as one HTML page. Imports no jax and needs no network."""

from maxtext_lite.reporting.page import render_page, write_page
from maxtext_lite.reporting.run_data import read_runs

__all__ = ["read_runs", "render_page", "write_page"]
