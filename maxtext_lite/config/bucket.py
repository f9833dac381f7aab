"""Paths in buckets, such as gs://bucket/runs: which are known, and what an installation needs for them."""

import importlib.util
from pathlib import Path
from typing import cast

from maxtext_lite.config.errors import UserError, value_text

_NEEDS = {"gs": ("gcs", "gcsfs"), "s3": ("s3", "s3fs")}  # the extra, and the package of it that reads and writes


def bucket_scheme(path: object) -> str:
    """`gs` or `s3` of a path in a bucket; "" of any other."""
    scheme, mark, _ = str(path).partition("://")
    return scheme if mark and scheme in _NEEDS else ""


def is_bucket(path: object) -> bool:
    """Whether a path is one in a bucket, and not of this machine's file system."""
    return bucket_scheme(path) != ""


def any_path(path: str | Path, key: str) -> Path:
    """A path as an object: pathlib's, or, in a bucket, etils', which has the same methods but no rename and no append.

    Raises:
      UserError: the extra that a bucket needs is not installed; names `key`.
    """
    scheme = bucket_scheme(path)
    if not scheme:
        return Path(path)
    extra, package = _NEEDS[scheme]
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{key}={value_text(str(path))} needs {package}: pip install 'maxtext-lite[{extra}]'.")
    from etils import epath  # a tenth of a second, which only those wait for who have a bucket

    return cast("Path", epath.Path(path))
