"""The compiled programs of a run, kept for its next start in jax's persistent compilation cache.

Tested with jax 0.10.2 and 0.11.2, in which `LRUCache` is private.
"""

import contextlib
import hashlib
import math
import platform
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax._src.lru_cache import LRUCache

from maxtext_lite.config import RunConfig
from maxtext_lite.config.bucket import is_bucket
from maxtext_lite.config.whole_file import replacing
from maxtext_lite.training.run_files import run_directory

DIRECTORY = ".compiled"
_WHERE = "jax_compilation_cache_dir"
_LEAST_SECONDS = "jax_persistent_cache_min_compile_time_secs"
_ABANDONED_SECONDS = 3600.0
_CPU = Path("/proc/cpuinfo")

_found: Counter[int] = Counter()
_put = LRUCache.put


def keep_compiled(config: RunConfig) -> None:
    """Has jax keep programs that take a second or more to compile, below the base directory.

    To be called in a command, before anything is compiled. A directory set by the user (JAX_COMPILATION_CACHE_DIR)
    stays, and JAX_ENABLE_COMPILATION_CACHE=false turns the cache off. A run in a bucket keeps nothing.
    """
    if (kept := _directory(config)) is not None:
        _remove_parts(kept)
        jax.config.update(_WHERE, str(kept))
    jax.monitoring.register_event_listener(_note)
    LRUCache.put = _put_whole


@contextlib.contextmanager
def reading_compiled(config: RunConfig) -> Iterator[None]:
    """Within it jax uses programs that `keep_compiled` had it keep, and keeps none: they stay those of the run."""
    before: dict[str, Any] = {name: getattr(jax.config, name) for name in (_WHERE, _LEAST_SECONDS)}
    if (kept := _directory(config)) is not None and kept.is_dir():  # jax would make it
        jax.config.update(_WHERE, str(kept))
    jax.config.update(_LEAST_SECONDS, math.inf)
    jax.monitoring.register_event_listener(_note)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def _directory(config: RunConfig) -> Path | None:
    """Where programs are kept below the base directory; None if the user has set a place, or for a bucket."""
    base = run_directory(config).parent
    if is_bucket(base) or getattr(jax.config, _WHERE) is not None:
        return None
    return base.absolute() / DIRECTORY / _processor()


def num_found() -> int:
    """The number of programs that this thread has found in the cache so far."""
    return _found[threading.get_ident()]


def _put_whole(self: LRUCache, key: str, value: bytes) -> None:
    """Writes an entry atomically. Jax never replaces one: after a kill, a partial one would cost a compilation at every
    start."""
    entry = Path(str(self.path)) / f"{key}-cache"
    if self.eviction_enabled or not entry.parent.is_dir():  # with a file beside each entry, or in a bucket
        _put(self, key, value)
    elif not entry.exists():
        with replacing(entry) as part:
            part.write_bytes(value)


def _remove_parts(kept: Path) -> None:
    """Removes what killed processes, on any machine, left half-written more than an hour ago."""
    for part in kept.glob("*-cache.*"):
        with contextlib.suppress(OSError):  # another start removes it too, or may not
            if time.time() - part.stat().st_mtime > _ABANDONED_SECONDS:
                part.unlink()


def _note(event: str, **_: object) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _found[threading.get_ident()] += 1


def _processor() -> str:
    """A name for this machine's instruction set: a program that XLA compiles for one CPU may crash on another."""
    lines = _CPU.read_text(encoding="utf-8").splitlines() if _CPU.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"
