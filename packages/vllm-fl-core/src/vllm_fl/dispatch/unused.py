"""What is set in vain, since another setting rules it out. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_fl.dispatch.ops import CATALOGUE
from vllm_fl.dispatch.settings import BY_KEY, Value
from vllm_fl.dispatch.types import BackendImplKind

_FLAGOS = BackendImplKind.DEFAULT.value
_PREFERENCE, _ORDERS = f"prefer {_FLAGOS}", f"only {_FLAGOS}"
_LAYER_ORDERS, _LAYER_NAMES = "orders of layers", "names of layers"
_OTHER_ORDERS = f"only {_FLAGOS}, of others"
_LAYERS = ("oot_whitelist", "oot_blacklist", _LAYER_ORDERS)
_LISTS = ("flagos_whitelist", "flagos_blacklist", _PREFERENCE)

_RULED_OUT: Mapping[str, tuple[str, ...]] = {
    "prefer_enabled": (*_LAYERS, *_LISTS, _OTHER_ORDERS),
    "oot_enabled": (*_LAYERS, _LAYER_NAMES),
    "use_flaggems": (*_LISTS, _ORDERS),
}
"""Switch -> what is set in vain while it is off."""
_SWITCHES_OF_LAYERS = ("prefer_enabled", "oot_enabled")

BESIDE_LAYERS = frozenset({"attention_backend", "reshape_and_cache_flash"})
"""Operators that run whichever layers vLLM keeps: attention, and what it calls."""


def unused(layer: Mapping[str, Value]) -> tuple[str, ...]:
    """Say, a sentence each, what a source sets in vain."""
    told = [] if _switch_of_layers(layer) else _by_blacklist(layer)
    given = _given(layer)
    for switch, ruled_out in _RULED_OUT.items():
        if _is_off(layer, switch):
            # The first switch that is off tells it.
            found = [given.pop(what) for what in ruled_out if what in given]
            told += [f"{text}: {layer[switch].source} is off." for text in found]
    return tuple(told)


def narrowed(layer: Mapping[str, Value]) -> tuple[str, ...]:
    """Say, a sentence each, what of a source acts on attention alone, as vLLM keeps its layers."""
    switch = _switch_of_layers(layer)
    if switch is None:
        return ()
    in_vain = "prefer_enabled", "use_flaggems"
    keys = ["prefer", "allow_vendors", "deny_vendors"]
    if any(_is_off(layer, s) for s in in_vain) and _PREFERENCE in _given(layer):
        keys.remove("prefer")  # it is among what is unused
    return tuple(
        f"{_name(layer, key)} acts on attention alone: {layer[switch].source} is off."
        for key in keys
        if key in layer
    )


def _is_off(layer: Mapping[str, Value], switch: str) -> bool:
    return switch in layer and layer[switch].value is False


def _switch_of_layers(layer: Mapping[str, Value]) -> str | None:
    """Return the switch that leaves every layer to vLLM, if one is off."""
    return next((switch for switch in _SWITCHES_OF_LAYERS if _is_off(layer, switch)), None)


def _given(layer: Mapping[str, Value]) -> dict[str, str]:
    """Return what a switch may rule out -> the beginning of a sentence about it."""
    given = {key: f"{_name(layer, key)} has no effect" for key in layer}
    if "prefer" in layer and layer["prefer"].value == _FLAGOS:
        given[_PREFERENCE] = f"{_name(layer, 'prefer')}={_FLAGOS} cannot be had"
    if "op_backends" in layer:
        where, orders = _name(layer, "op_backends"), layer["op_backends"].value
        of_layers = [name for name in orders if _is_of_layers(name)]
        alone = [name for name, order in orders.items() if set(order) == {_FLAGOS}]
        others = [name for name in alone if name not in of_layers]
        if of_layers:
            given[_LAYER_ORDERS] = f"{where}: the order of {', '.join(of_layers)} has no effect"
        for what, names in ((_ORDERS, alone), (_OTHER_ORDERS, others)):
            if names:
                given[what] = f"{where}: {_FLAGOS} alone for {', '.join(names)} cannot be had"
    if "flagos_blacklist" in layer:
        names = [n for n in layer["flagos_blacklist"].value if _is_of_layers(n.removeprefix("+"))]
        if names:
            where = _name(layer, "flagos_blacklist")
            given[_LAYER_NAMES] = f"{where}: {', '.join(names)} has no effect"
    return given


def _is_of_layers(name: str) -> bool:
    """Whether an operator, or one in a phase, is called by dispatched layers alone."""
    op_name = name.partition(".")[0]
    return op_name in CATALOGUE and op_name not in BESIDE_LAYERS


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
