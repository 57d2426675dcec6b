"""Studies and their storage, and who does what of a study when several processes tune."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import optuna
import sqlalchemy
import sqlalchemy.exc
from optuna.trial import TrialState

from vllm_fl.dispatch.errors import ConfigError

PATIENCE_SECONDS = 3600
"""After so long a claim from another machine no longer counts."""

HEARTBEAT_SECONDS = 5
"""A running trial tells its study so often that it is alive."""
STALE_SECONDS = 3 * HEARTBEAT_SECONDS
"""After so long without a sign a trial's process counts as dead."""

STORAGE_ATTEMPTS = 5


@contextlib.contextmanager
def experimental() -> Iterator[None]:
    """Leave out Optuna's warnings that an interface may change; its version is bounded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


@contextlib.contextmanager
def open_storage(url: str) -> Iterator[optuna.storages.RDBStorage]:
    """Open or make the storage of studies for the block, and close its connections after it.

    Args:
        url: any that SQLAlchemy takes.

    Raises:
        ConfigError: it cannot be opened.
    """
    storage = _connect(url)
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


def _connect(url: str) -> optuna.storages.RDBStorage:
    attempt = 1
    while True:
        try:
            return _make_storage(url)
        except sqlalchemy.exc.DBAPIError as error:
            # Optuna makes its tables without a lock: another process may be making them now.
            if attempt == STORAGE_ATTEMPTS:
                raise ConfigError(f"The storage {url} cannot be opened: {error}") from error
            attempt += 1
            time.sleep(1)
        except (sqlalchemy.exc.SQLAlchemyError, ImportError) as error:
            raise ConfigError(
                f"{url!r} is no storage: {error}. Write it as in 'sqlite:///study.db'."
            ) from error


def _make_storage(url: str) -> optuna.storages.RDBStorage:
    options: dict[str, Any] = {}
    if url.startswith("sqlite"):
        options = {"connect_args": {"timeout": 60}}  # others write, too
    with experimental():
        storage = optuna.storages.RDBStorage(
            url,
            engine_kwargs=options,
            heartbeat_interval=HEARTBEAT_SECONDS,
            grace_period=STALE_SECONDS,
            heartbeat_stale_trial_callback=_retry(),
        )
    if storage.engine.dialect.name == "sqlite":
        _lock_whole_transactions(storage.engine)
    return storage


def _lock_whole_transactions(engine: sqlalchemy.Engine) -> None:
    """Let a transaction lock the file when it begins, not when it first writes.

    Optuna looks whether a trial waits and then takes it. For other databases it locks the row; in
    SQLite two processes would take the same one.
    """

    def connected(connection: Any, record: object) -> None:
        connection.isolation_level = None  # the driver begins no transactions of its own

    def begun(connection: sqlalchemy.Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    engine.dispose()  # connections from before
    sqlalchemy.event.listen(engine, "connect", connected)
    sqlalchemy.event.listen(engine, "begin", begun)


def study_name(content: Mapping[str, Any]) -> str:
    """Return the name of the study of what is tuned; the same in every process."""
    text = json.dumps(content, sort_keys=True)
    return f"autotune {content['model']} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def open_study(
    name: str,
    storage: optuna.storages.BaseStorage,
    sampler: optuna.samplers.BaseSampler,
    resume: bool,
) -> optuna.Study:
    """Make a study, or with ``resume`` join the one that there is.

    Raises:
        ConfigError: there is one already, and it was not asked to be continued.
    """
    try:
        return optuna.create_study(
            study_name=name,
            storage=storage,
            sampler=sampler,
            direction="maximize",
            load_if_exists=resume,
        )
    except optuna.exceptions.DuplicatedStudyError as error:
        raise ConfigError(
            f"The storage holds this study already ({name}). --resume continues it or joins the "
            "process that runs it; another --storage starts afresh."
        ) from error


def _retry() -> optuna.storages.RetryHeartbeatStaleTrialCallback:
    with experimental():
        return optuna.storages.RetryHeartbeatStaleTrialCallback(max_retry=1)


@dataclass
class DeadTrials:
    """Fails a study's trials whose processes have died, and queues each of them once more.

    Optuna does so for trials that had a heartbeat. One whose process died before the first would
    run for ever; it is known by not having begun.
    """

    study: optuna.Study
    _unbegun_since: dict[int, float] = field(default_factory=dict)

    @staticmethod
    def begin(trial: optuna.Trial) -> None:
        """Note that a trial has begun and lives; Optuna's own thread may be late to say so."""
        heartbeat = getattr(trial.study._storage, "record_heartbeat", None)  # not every storage has
        if heartbeat is not None:
            heartbeat(trial._trial_id)
        trial.set_user_attr("begun", trial.number)  # a repeated trial inherits another's

    def fail(self) -> None:
        """Fail what has been without a sign for too long."""
        with experimental():
            optuna.storages.fail_stale_trials(self.study)
        now = time.monotonic()
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        unbegun = {t.number: t for t in running if t.user_attrs.get("begun") != t.number}
        self._unbegun_since = {n: self._unbegun_since.get(n, now) for n in unbegun}
        for number, since in self._unbegun_since.items():
            if now - since > STALE_SECONDS:
                self.study.tell(number, state=TrialState.FAIL, skip_if_finished=True)
                _retry()(self.study, unbegun[number])


@contextlib.contextmanager
def claim(study: optuna.Study, storage: optuna.storages.BaseStorage, what: str) -> Iterator[bool]:
    """Take on a part of a study's work for the block; False while a living process has it."""
    mine = _claim(study.study_name, storage, what)
    try:
        yield mine is not None
    finally:
        if mine is not None:
            mine.set_user_attr("owner", {})


def _claim(study: str, storage: optuna.storages.BaseStorage, what: str) -> optuna.Study | None:
    """Make a study that stands for the claim: what every storage does atomically."""
    number = 0
    while True:
        name = f"{study}: {what} {number}"
        try:
            mine = optuna.create_study(study_name=name, storage=storage)
        except optuna.exceptions.DuplicatedStudyError:
            if is_alive(_owner(name, storage)):
                return None
            number += 1
            continue
        mine.set_user_attr("owner", me())
        return mine


def _owner(claim: str, storage: optuna.storages.BaseStorage) -> dict[str, Any]:
    """Return who made a claim, which is noted right after it is made; {} if it died in between."""
    until = time.monotonic() + STALE_SECONDS
    while True:
        owner: dict[str, Any] | None = optuna.load_study(
            study_name=claim, storage=storage
        ).user_attrs.get("owner")
        if owner is not None:
            return owner
        if time.monotonic() > until:
            return {}
        time.sleep(0.2)


def me() -> dict[str, Any]:
    """Say who this process is."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}


def is_alive(owner: Mapping[str, Any]) -> bool:
    """Whether the process that claimed something still lives, as far as can be told from here."""
    if not owner:
        return False  # it has done its part
    if owner["host"] != socket.gethostname():
        return bool(time.time() - owner["time"] < PATIENCE_SECONDS)
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
