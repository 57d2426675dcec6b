"""Bounds flag_gems' tuning, and keeps it from graph capture, shared arguments and a broken cache.

flag_gems times the configurations of a kernel at its first call with new shapes, on the arguments
of that call, and keeps the fastest in an SQLite file that all processes share.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vllm_fl.dispatch.logging import get_logger

logger = get_logger("vllm_fl.flaggems")

ROWS = "M"
"""What flag_gems' kernels call the number of rows: in a model that serves, of tokens."""
FEWEST_ROWS = 32
"""Down to so many rows share a configuration; flag_gems' own step for matrix products."""


def cache_files() -> list[Path]:
    """Return the tuning caches that flag_gems may open, by its own two variables."""
    url = os.environ.get("FLAGGEMS_DB_URL", "")
    if url:
        path = Path(url.partition("sqlite:///")[2])
        return [path] if path.is_file() else []
    folder = os.environ.get("FLAGGEMS_CACHE_DIR")
    root = Path(folder) if folder else Path.home() / ".flaggems"
    return sorted(root.glob("config_cache/*.db"))


def set_damaged_caches_aside() -> None:
    """Rename each cache that SQLite finds damaged, so that flag_gems makes a new one."""
    for path in cache_files():
        damage = _damage(path)
        if damage:
            aside = path.with_name(f"{path.name}.damaged")
            try:
                os.replace(path, aside)
            except FileNotFoundError:  # another worker was faster
                continue
            logger.warning(
                "The tuning cache %s is damaged (%s); it is now %s.", path, damage, aside
            )


def _damage(path: Path) -> str:
    try:
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=1)
        try:
            (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        finally:
            connection.close()
    except sqlite3.OperationalError:  # in use, or not readable: no damage that is known
        return ""
    except sqlite3.DatabaseError as error:
        return str(error)
    return "" if verdict == "ok" else str(verdict)


class Remembered:
    """What flag_gems takes for its database: remembers, and asks the database for the rest.

    A database that is locked or full costs the sharing of results, never a request. It is not
    asked again: each time, SQLite waits five seconds for a lock.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: dict[tuple[object, ...], Any] = {}
        self._works = True

    def get_config(self, name: str, keys: Any) -> Any:
        """Return the best configuration, or None."""
        return self._get((name, *keys), self._model.get_config, name, keys)

    def put_config(self, name: str, keys: Any, config: Any) -> None:
        """Keep the best configuration."""
        self._known[(name, *keys)] = config
        self._ask(self._model.put_config, name, keys, config)

    def get_benchmark(self, name: str, keys: Any, config: Any) -> Any:
        """Return the times of a configuration, or None."""
        at = (name, *keys, str(config))
        return self._get(at, self._model.get_benchmark, name, keys, config)

    def put_benchmark(self, name: str, keys: Any, config: Any, benchmark: Any) -> None:
        """Keep the times of a configuration."""
        self._known[(name, *keys, str(config))] = benchmark
        self._ask(self._model.put_benchmark, name, keys, config, benchmark)

    def _get(self, at: tuple[object, ...], ask: Callable[..., Any], *args: Any) -> Any:
        if at not in self._known:
            answer = self._ask(ask, *args)
            if answer is None:
                return None
            self._known[at] = answer
        return self._known[at]

    def _ask(self, ask: Callable[..., Any], *args: Any) -> Any:
        from sqlalchemy.exc import SQLAlchemyError

        try:
            return ask(*args) if self._works else None
        except (SQLAlchemyError, sqlite3.Error, OSError) as error:
            self._works = False
            reason = str(error).partition("\n")[0]
            logger.warning("flag_gems goes on without its tuning cache: %s", reason)
            return None


def remember() -> None:
    """Put ``Remembered`` in front of the database, for every kernel."""
    cache = sys.modules["flag_gems.utils.libentry"].libcache
    if isinstance(getattr(cache, "model", None), Remembered) or not hasattr(cache, "model"):
        return
    cache.model = Remembered(cache.model)
    for pool in (cache.config_cache_pool, cache.benchmark_cache_pool):
        for entry in pool.values():
            entry.model = cache.model


def guard_tuners(folder: Path) -> None:
    """Let the tuners of flag_gems' kernels tune seldom, and never where it would do harm.

    By itself flag_gems tunes a matrix product anew for every 32 rows, on an H200 for four seconds,
    and other kernels for every number of rows: with the prompts that come, requests would wait for
    that without end. Here all numbers of rows up to the next power of two share a configuration.

    Args:
        folder: where flag_gems is; its modules have several top-level names.
    """
    for tuner in list(_tuners(folder)):
        if "run" not in vars(tuner):
            tuner.run = _guarded(tuner)
            if ROWS in tuner.keys:
                _share_rows(tuner, tuner.keys.index(ROWS))


def _share_rows(tuner: Any, position: int) -> None:
    if hasattr(tuner, "strategy"):  # flag_gems' own kind of tuner
        tuner.strategy[position] = shared_rows
    else:
        tuner.cache = SharedByRows(position)


def shared_rows(rows: int) -> int:
    """Return the most rows that share a configuration with so many: a power of two."""
    return max(FEWEST_ROWS, 1 << (rows - 1).bit_length())


class SharedByRows(dict[tuple[Any, ...], Any]):
    """What one of Triton's tuners takes for its memory: numbers of rows share an entry.

    Args:
        position: of the number of rows in a key.
    """

    def __init__(self, position: int) -> None:
        super().__init__()
        self._position = position

    def _shared(self, key: tuple[Any, ...]) -> tuple[Any, ...]:
        before, after = key[: self._position], key[self._position + 1 :]
        return (*before, shared_rows(key[self._position]), *after)

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(self._shared(key))

    def __getitem__(self, key: tuple[Any, ...]) -> Any:
        return super().__getitem__(self._shared(key))

    def __setitem__(self, key: tuple[Any, ...], config: Any) -> None:
        super().__setitem__(self._shared(key), config)


def _tuners(folder: Path) -> Iterator[Any]:
    from triton.runtime import Autotuner

    for module in list(sys.modules.values()):
        if str(getattr(module, "__file__", None) or "").startswith(f"{folder}{os.sep}"):
            for value in list(vars(module).values()):
                kernel = value
                while hasattr(kernel, "fn") and hasattr(kernel, "arg_names"):
                    if isinstance(kernel, Autotuner):
                        yield kernel
                    kernel = kernel.fn


def _guarded(tuner: Any) -> Callable[..., Any]:
    run = tuner.run

    def guarded(*args: Any, **kwargs: Any) -> Any:
        configs = tuner.configs
        if len(configs) == 1 or not _would_do_harm(args) or _is_tuned(tuner, args, kwargs):
            return run(*args, **kwargs)
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        try:
            # With one configuration a tuner neither times nor keeps anything.
            tuner.configs = tuner.prune_configs(kwargs)[:1]
            return run(*args, **kwargs)
        finally:
            tuner.configs = configs

    return guarded


def _would_do_harm(args: tuple[Any, ...]) -> bool:
    """Whether trials would be captured, or would read what they have written."""
    from flag_gems.runtime import torch_device_fn

    capturing = getattr(torch_device_fn, "is_current_stream_capturing", None)
    if capturing is not None and capturing():
        return True
    storages = [a.untyped_storage().data_ptr() for a in args if hasattr(a, "untyped_storage")]
    return len(set(storages)) < len(storages)


def _is_tuned(tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    named = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
    named = {name: value for name, value in named.items() if name in tuner.arg_names}
    if hasattr(tuner, "get_key"):  # flag_gems' own kind of tuner
        return tuner.get_key(named) in tuner.cache
    dtypes = (str(value.dtype) for value in named.values() if hasattr(value, "dtype"))
    return (*(named[key] for key in tuner.keys if key in named), *dtypes) in tuner.cache
