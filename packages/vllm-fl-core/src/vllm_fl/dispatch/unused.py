"""What one source sets in vain, since another setting of that source rules it out. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_fl.dispatch.settings import BY_KEY, Value
from vllm_fl.dispatch.types import BackendImplKind

_FLAGOS = BackendImplKind.DEFAULT.value
_PREFERENCE, _ORDERS = f"prefer {_FLAGOS}", f"only {_FLAGOS}"
_LAYERS = ("oot_whitelist", "oot_blacklist")
_BACKEND = ("flagos_whitelist", "flagos_blacklist", _PREFERENCE, _ORDERS)

_RULED_OUT: Mapping[str, tuple[str, ...]] = {
    "prefer_enabled": (*_LAYERS, *_BACKEND),
    "oot_enabled": _LAYERS,
    "use_flaggems": _BACKEND,
}
"""Switch -> what is set in vain while it is off."""


def unused(layer: Mapping[str, Value]) -> tuple[str, ...]:
    """Say, a sentence each, what a source sets in vain.

    Other preferences and orders keep their effect whatever is off: on attention, which is always
    dispatched.
    """
    told = _by_blacklist(layer)
    given = _given(layer)
    for switch, ruled_out in _RULED_OUT.items():
        if switch in layer and layer[switch].value is False:
            # The first switch that is off tells it.
            found = [given.pop(what) for what in ruled_out if what in given]
            told += [f"{text}: {layer[switch].source} is off." for text in found]
    return tuple(told)


def _given(layer: Mapping[str, Value]) -> dict[str, str]:
    """Return what a switch may rule out -> the beginning of a sentence about it."""
    given = {key: f"{_name(layer, key)} has no effect" for key in layer}
    if "prefer" in layer and layer["prefer"].value == _FLAGOS:
        given[_PREFERENCE] = f"{_name(layer, 'prefer')}={_FLAGOS} cannot be had"
    if "op_backends" in layer:
        orders = layer["op_backends"].value
        alone = [name for name, order in orders.items() if set(order) == {_FLAGOS}]
        if alone:
            where = _name(layer, "op_backends")
            given[_ORDERS] = f"{where}: {_FLAGOS} alone for {', '.join(alone)} cannot be had"
    return given


def _by_blacklist(layer: Mapping[str, Value]) -> list[str]:
    if not {"op_backends", "oot_blacklist"} <= layer.keys():
        return []
    kept = {name.removeprefix("+") for name in layer["oot_blacklist"].value}
    return [
        f"{_name(layer, 'op_backends')}: the order of {name} has no effect: "
        f"{_name(layer, 'oot_blacklist')} leaves the layer to vLLM."
        for name in layer["op_backends"].value
        if name.partition(".")[0] in kept
    ]


def _name(layer: Mapping[str, Value], key: str) -> str:
    """Return what the user wrote: the variable, or the key and its file."""
    setting, source = BY_KEY[key], layer[key].source
    return source if source == setting.variable.name else f"{key} in {source}"
