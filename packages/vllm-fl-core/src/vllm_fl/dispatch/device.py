"""Choosing the device: which backend's device vLLM runs on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_fl.dispatch import env
from vllm_fl.dispatch.backend import Device
from vllm_fl.dispatch.discovery import DiscoveredBackend
from vllm_fl.dispatch.errors import ConfigError, nearest
from vllm_fl.dispatch.types import YES, Decision


@dataclass(frozen=True)
class DeviceChoice:
    """The chosen device and what was decided about every other.

    Attributes:
        backend: name of the backend whose device was chosen; None when there is none.
        device: the device.
        claims: backend name -> whether this machine has its device, and why not; of the one that
            the user named alone, where one was named.
    """

    backend: str | None
    device: Device | None
    claims: dict[str, Decision]

    @property
    def present(self) -> Decision:
        """Whether this machine has the chosen device: a user may name one that it has not."""
        return YES if self.backend is None else self.claims[self.backend]

    @property
    def rivals(self) -> list[str]:
        """Other backends that claim this machine with the same rank."""
        return [name for name, decision in self.claims.items() if decision and name != self.backend]

    def reasons(self) -> str:
        """One line a backend that brings a device and did not claim this machine."""
        refused = {name: d.reason for name, d in self.claims.items() if not d}
        return "; ".join(f"{name}: {reason}" for name, reason in refused.items())


def choose_device(backends: Sequence[DiscoveredBackend], forced: str | None = None) -> DeviceChoice:
    """Choose the device of highest rank that this machine has; ties go by the backend's name.

    Args:
        backends: what discovery found.
        forced: name of the backend to take (VLLM_FL_PLATFORM), whatever the others claim, or of a
            device that one backend alone brings.

    Raises:
        ConfigError: ``forced`` names no usable backend that brings a device.
    """
    offers = {b.name: b.device for b in backends if b.decision and b.device is not None}
    if forced is not None:
        by_device = [name for name, device in offers.items() if device.name == forced]
        if forced not in offers and len(by_device) == 1:
            forced = by_device[0]
        if forced not in offers:
            why = [
                f" {b.name}: {b.decision.reason or 'it brings no device'}."
                for b in backends
                if b.name == forced
            ]
            raise ConfigError(
                f"{env.PLATFORM.name}={forced!r} is not an installed backend with a device."
                f"{''.join(why)} {nearest(forced, offers)}"
            )
        return DeviceChoice(forced, offers[forced], {forced: _ask(offers[forced])})
    claims = {name: _ask(device) for name, device in sorted(offers.items())}
    present = [name for name, decision in claims.items() if decision]
    if not present:
        return DeviceChoice(None, None, claims)
    best = min(present, key=lambda name: (-offers[name].rank, name))
    top = offers[best].rank
    kept = {n: d for n, d in claims.items() if not d or offers[n].rank == top}
    return DeviceChoice(best, offers[best], kept)


def _ask(device: Device) -> Decision:
    try:
        return Decision.of(device.detect(), f"this machine has no {device.name} device")
    except Exception as error:
        return Decision.no(f"its detection raised {type(error).__name__}: {error}")
