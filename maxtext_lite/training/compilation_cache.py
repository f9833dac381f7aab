"""What a run compiles, kept for its next start: jax's persistent compilation cache, below the base directory.

Tested with jax 0.10.2 and 0.11.2, to which `LRUCache` is private.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# jax declares some of its functions in part.

import hashlib
import os
import platform
import threading
from collections import Counter
from pathlib import Path

import jax
from jax._src.lru_cache import LRUCache

from maxtext_lite.config import RunConfig
from maxtext_lite.config.bucket import is_bucket
from maxtext_lite.training.run_files import run_directory

DIRECTORY = ".compiled"
_CPU = Path("/proc/cpuinfo")

_found: Counter[int] = Counter()
_put = LRUCache.put


def keep_compiled(config: RunConfig) -> None:
    """Has jax keep what takes it a second or more to compile; call it in a command, before anything is compiled.

    Where the user has told jax a directory (JAX_COMPILATION_CACHE_DIR), that one stays, and
    JAX_ENABLE_COMPILATION_CACHE=false turns it off. A run in a bucket keeps nothing.
    """
    base = run_directory(config).parent
    if not is_bucket(base) and jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(base.absolute() / DIRECTORY / _processor()))
    jax.monitoring.register_event_listener(_note)
    LRUCache.put = _put_whole


def num_found() -> int:
    """How many programs this thread has found in the cache so far."""
    return _found[threading.get_ident()]


def _put_whole(self: LRUCache, key: str, value: bytes) -> None:
    """Jax replaces no entry: what a kill cut short while it was written would be compiled anew at every start."""
    entry = Path(str(self.path)) / f"{key}-cache"
    if self.eviction_enabled or not entry.parent.is_dir():  # with a file beside each entry, or in a bucket
        _put(self, key, value)
    elif not entry.exists():
        part = entry.with_name(f"{entry.name}.{os.getpid()}")
        part.write_bytes(value)
        part.replace(entry)


def _note(event: str, **_: object) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _found[threading.get_ident()] += 1


def _processor() -> str:
    """A name for the instructions that this machine has: what XLA makes for one CPU may stop on another."""
    lines = _CPU.read_text(encoding="utf-8").splitlines() if _CPU.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"
