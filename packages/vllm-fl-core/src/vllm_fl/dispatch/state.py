"""The policy in force: one for the process, and one that a thread or task may lay over it.

A context (:func:`policy_context`) is seen by its thread or asyncio task alone. A change of the
process-wide policy advances the epoch and is told to every manager, which re-binds live handles.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_fl.dispatch import config, discovery, env
from vllm_fl.dispatch.device import DeviceChoice, choose_device
from vllm_fl.dispatch.errors import ConfigError
from vllm_fl.dispatch.logging import get_logger
from vllm_fl.dispatch.policy import SelectionPolicy, name_set
from vllm_fl.dispatch.types import YES, Decision

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_fl.dispatch.backend import Device

SCOPED: ContextVar[SelectionPolicy | None] = ContextVar("vllm_fl_policy", default=None)

_lock = threading.Lock()
_policy: SelectionPolicy | None = None
_epoch = 0
_listeners: weakref.WeakSet[PolicyListener] = weakref.WeakSet()


class PolicyListener:
    """Base of what is told about process-wide changes of the policy."""

    def policy_changed(self) -> None:
        """Called after the process-wide policy has changed, in the changing thread."""
        raise NotImplementedError


def listen(listener: PolicyListener) -> None:
    """Tell ``listener`` (held weakly) about changes."""
    _listeners.add(listener)


def current_device() -> DeviceChoice:
    """Return the device of this machine, chosen once for what discovery found.

    Raises:
        ConfigError: VLLM_FL_PLATFORM names no usable backend.
    """
    return _choose_device(discovery.get_discovered_plugins(), env.PLATFORM.read())


_choose_device = functools.lru_cache(maxsize=1)(choose_device)


def absent_device() -> str:
    """Say that this machine has not the device that the user named, why, and what to do."""
    asked, here = current_device(), choose_device(discovery.get_discovered_plugins())
    advice = "No other backend has one here; pip install vllm-fl-reference for the CPU."
    if here.device is not None:
        advice = f"Unset it to run on {here.device.name!r} (backend {here.backend!r})."
    return (
        f"{env.PLATFORM.name}={env.PLATFORM.read()!r}: the backend {asked.backend!r} has no device "
        f"on this machine: {asked.present.reason}. {advice}"
    )


def may_run_on(device: Device | None) -> Decision:
    """Whether vLLM runs on a device of this name here, or on none; if not, on which it runs.

    For the ``is_available`` of backends with a device of their own.
    """
    in_use = current_device().device
    if device is not None and in_use is not None and in_use.name != device.name:
        return Decision.no(f"vLLM runs on the device {in_use.name!r} here")
    return YES


def device_arch() -> int | None:
    """Return the device's architecture as 10 * major + minor, or None."""
    device = current_device().device
    return device.arch() if device is not None else None


def current_config() -> config.Config:
    """Return the effective configuration for the device of this machine.

    Raises:
        ConfigError: a source holds something that is not allowed.
    """
    for variable in env.VARIABLES:
        variable.read()
    device = current_device().device
    return config.load(device.defaults if device is not None else None)


def use_tuned_file(path: Path | None) -> None:
    """Take a tuned configuration into the configuration, or out of it, and read that again.

    It goes into the environment, so that the processes that vLLM starts use it from their start.
    """
    if path != env.TUNED_FILE.read():
        env.TUNED_FILE.write(path)
        reset_global_policy()


def get_policy() -> SelectionPolicy:
    """Return the policy in force here: the innermost context's, else the process's."""
    return SCOPED.get() or get_global_policy()


def get_global_policy() -> SelectionPolicy:
    """Return the process-wide policy; the first call reads the configuration."""
    global _policy
    while True:
        policy, epoch = _policy, _epoch
        if policy is not None:
            return policy
        settings = current_config()
        loaded = settings.policy()
        report_unused(settings)
        with _lock:
            if epoch == _epoch and _policy is None:  # else a change has overtaken it
                _policy = loaded


def report_unused(settings: config.Config) -> None:
    """Name the settings that have no effect, or less than they could.

    Raises:
        ConfigError: one has none, and the policy is strict.
    """
    logger = get_logger()
    for text in (*settings.narrowed, *env.foreign_variables()):
        logger.warning("%s", text)
    problems = [
        f"{name} has no effect: {env.CONFIG.name} replaces it." for name in settings.ignored
    ]
    problems += settings.unused
    if env.COMPARE_LIMIT.is_set() and not env.COMPARE.is_set():
        problems.append(f"{env.COMPARE_LIMIT.name} has no effect: {env.COMPARE.name} is not set.")
    problems += [
        f"Unknown environment variable {name} has no effect. {advice}"
        for name, advice in env.unknown_variables()
    ]
    for problem in problems:
        if settings["strict"]:
            raise ConfigError(problem)
        logger.warning("%s", problem)


def get_policy_epoch() -> int:
    """Return a number that grows with every process-wide change."""
    return _epoch


def set_global_policy(policy: SelectionPolicy) -> SelectionPolicy:
    """Set the process-wide policy and re-bind live handles; return the policy before."""
    before = get_global_policy()
    _publish(policy)
    return before


def reset_global_policy() -> None:
    """Go back to what the configuration says, reading it again."""
    _publish(None)


def _publish(policy: SelectionPolicy | None) -> None:
    global _policy, _epoch
    with _lock:
        _policy = policy
        _epoch += 1
    for listener in tuple(_listeners):
        listener.policy_changed()


def policy_from_config(path: str | Path) -> SelectionPolicy:
    """Return the policy that a YAML file describes.

    Raises:
        ConfigError: the file does not exist or holds something that is not allowed.
    """
    return config.load(environ={env.CONFIG.name: str(path)}).policy()


@contextmanager
def policy_context(policy: SelectionPolicy) -> Iterator[SelectionPolicy]:
    """Lay ``policy`` over the process-wide one, for this thread or task, until the block ends."""
    with _overlay(lambda _: policy) as inner:
        yield inner


@contextmanager
def _overlay(
    change: Callable[[SelectionPolicy], SelectionPolicy],
) -> Iterator[SelectionPolicy]:
    policy = change(get_policy())
    token = SCOPED.set(policy)
    try:
        yield policy
    finally:
        SCOPED.reset(token)


@contextmanager
def with_strict_mode() -> Iterator[SelectionPolicy]:
    """Make the policy in force strict until the block ends."""
    with _overlay(lambda policy: replace(policy, strict=True)) as inner:
        yield inner


@contextmanager
def with_preference(prefer: str) -> Iterator[SelectionPolicy]:
    """Prefer "flagos", "vendor" or "reference" until the block ends."""
    with _overlay(lambda policy: replace(policy, prefer=prefer)) as inner:
        yield inner


@contextmanager
def with_allowed_vendors(*vendors: str) -> Iterator[SelectionPolicy]:
    """Allow only these vendors until the block ends."""
    with _overlay(
        lambda policy: replace(policy, allow_vendors=name_set("vendors", vendors))
    ) as inner:
        yield inner


@contextmanager
def with_denied_vendors(*vendors: str) -> Iterator[SelectionPolicy]:
    """Deny these vendors, too, until the block ends."""

    def deny(policy: SelectionPolicy) -> SelectionPolicy:
        denied = policy.deny_vendors | name_set("vendors", vendors)
        return replace(policy, deny_vendors=denied)

    with _overlay(deny) as inner:
        yield inner


def reinit_lock_after_fork() -> None:
    """Replace the lock in a forked child, where its holder no longer runs."""
    global _lock
    _lock = threading.Lock()
