"""Files of arrays by name, .npz."""

import io
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from maxtext_lite.config.errors import writing
from maxtext_lite.config.whole_file import replacing


def write_arrays(shown: Path, path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays by name to a whole file; messages call it `shown`."""
    with writing(shown), replacing(path) as partial, partial.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)  # type: ignore[arg-type]


def read_arrays(content: bytes) -> dict[str, np.ndarray]:
    """The arrays in the content of such a file; raises ValueError if it is damaged, by the checksum of each array."""
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return dict(arrays.items())
    except (OSError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(str(error)) from None
