"""What the kit is pointed at: the implementations of one backend on one device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

from vllm_fl.dispatch import discovery
from vllm_fl.dispatch.discovery import DiscoveredBackend
from vllm_fl.dispatch.errors import BackendLoadError, ConfigError, nearest
from vllm_fl.dispatch.registry import OpRegistry
from vllm_fl.dispatch.state import current_device
from vllm_fl.dispatch.types import OpImpl


@dataclass(frozen=True)
class Target:
    """Implementations to verify.

    Attributes:
        name: as the user gave it.
        device: torch's name of the device.
        implementations: of one or several operators.
        known_failures: glob over case ids -> reason.
    """

    name: str
    device: str
    implementations: tuple[OpImpl, ...]
    known_failures: Mapping[str, str] = field(default_factory=dict)

    def exclusions(self, case_ids: list[str]) -> dict[str, str]:
        """Return excluded case -> reason.

        Raises:
            ConfigError: an exclusion has no reason or matches no case.
        """
        found: dict[str, str] = {}
        for pattern, reason in self.known_failures.items():
            if not reason.strip():
                raise ConfigError(f"{self.name}: the known failure {pattern!r} has no reason")
            matching = [case_id for case_id in case_ids if fnmatchcase(case_id, pattern)]
            if not matching:
                raise ConfigError(f"{self.name}: the known failure {pattern!r} matches no case")
            found.update(dict.fromkeys(matching, reason))
        return found


def find_target(name: str, device: str | None = None) -> Target:
    """Find a backend or an implementation by name.

    Args:
        name: a backend's name, or an implementation's id.
        device: where to run; None for the backend's own device, or the one that vLLM would use.

    Raises:
        ConfigError: nothing has that name, or the device cannot be used.
        BackendLoadError: it cannot be loaded, has lost an operator, or is not available here.
    """
    installed = discovery.get_discovered_plugins()
    by_name = {record.name: record for record in installed}
    if name in by_name:
        records = [by_name[name]]
        found = _implementations(by_name[name])
    else:
        owned = {r.name: _implementations(r) for r in installed if r.decision}
        found = [impl for impls in owned.values() for impl in impls if impl.impl_id == name]
        records = [by_name[owner] for owner, impls in owned.items() if set(impls) & set(found)]
        if not found:
            known = {impl.impl_id for impls in owned.values() for impl in impls} | set(by_name)
            raise ConfigError(f"No backend and no implementation {name!r}. {nearest(name, known)}")
    for impl in found:
        decision = impl.availability()
        if not decision:
            raise BackendLoadError(f"{name!r} is not available here: {decision.reason}")
    failures: dict[str, str] = {}
    for record in records:
        failures |= getattr(record.backend, "known_failures", {})
    return Target(name, _device(device, records), tuple(found), failures)


def _implementations(record: DiscoveredBackend) -> list[OpImpl]:
    if not record.decision:
        raise BackendLoadError(f"Backend {record.name!r} cannot be used: {record.decision.reason}")
    registry = OpRegistry()
    record.register(registry)
    if record.problems:
        raise BackendLoadError(
            f"Backend {record.name!r} has lost operators: {'; '.join(record.problems)}"
        )
    groups = registry.snapshot().impls_by_op.values()
    return [impl for group in groups for impl in group]


def _device(given: str | None, records: list[DiscoveredBackend]) -> str:
    name = given or next((r.device.name for r in records if r.device is not None), None)
    if name is None:
        chosen = current_device().device
        name = chosen.name if chosen is not None else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"Device {name!r} cannot be used: {error}") from error
    return name
