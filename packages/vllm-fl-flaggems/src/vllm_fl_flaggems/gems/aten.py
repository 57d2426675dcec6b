"""Which ATen operators flag_gems runs: the level is on or off, and a list. Pure decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_fl.dispatch.config import Config
from vllm_fl.dispatch.errors import nearest
from vllm_fl.dispatch.ops import CATALOGUE
from vllm_fl.dispatch.policy import SelectionPolicy
from vllm_fl.dispatch.types import YES, Decision
from vllm_fl_flaggems.gems.source import Installed

_RANDOM = (
    "reads the seed on the host and freezes it in a CUDA graph; another random stream than torch's"
)
_INDEX = "computes offsets in 32 bits (FlagGems issues 4153 and 6411)"
_COPY = "also stands behind copies to and from the host, and can call itself (FlagGems pull 4962)"
_UNUSED = "flag_gems' own list for NVIDIA leaves it out, but its enable() does not look there"

DECLINED: Mapping[str, str] = {
    **dict.fromkeys(
        ("bernoulli_", "exponential_", "multinomial", "normal", "normal_", "rand", "rand_like",
         "randn", "randn_like", "randperm", "uniform_", "native_dropout"),
        _RANDOM,
    ),
    **dict.fromkeys(("index", "index_put", "index_put_", "_index_put_impl_"), _INDEX),
    **dict.fromkeys(("copy_", "_to_copy"), _COPY),
    **dict.fromkeys(("add", "cos", "cumsum"), _UNUSED),
    "nonzero": "waits for the device, and its result has no size that a graph could hold",
}  # fmt: skip
"""ATen operator, with all overloads -> why flag_gems does not run it unless it is listed."""


@dataclass(frozen=True)
class Selection:
    """The ATen operators that flag_gems shall run.

    Attributes:
        keys: their names with overload.
        named: those that the user's whitelist asks for: they must be had.
        declined: operator -> why not, for those that only a whitelist brings in.
    """

    keys: frozenset[str]
    named: frozenset[str] = frozenset()
    declined: Mapping[str, str] | None = None


def is_asked_for(config: Config, policy: SelectionPolicy) -> Decision:
    """Say whether flag_gems shall run ATen operators: by USE_FLAGGEMS, or by a name on the list."""
    if not config["prefer_enabled"] or config["use_flaggems"] is False:
        return Decision.no("the default backend is off")
    if config["use_flaggems"] or names_aten_operators(policy):
        return YES
    return Decision.no("USE_FLAGGEMS is not set, and flagos_whitelist names no ATen operator")


def names_aten_operators(policy: SelectionPolicy) -> bool:
    """Whether the whitelist has a name that only flag_gems can run."""
    return bool((policy.flagos_whitelist or frozenset()) - CATALOGUE.keys())


def select(found: Installed, policy: SelectionPolicy) -> Selection:
    """Choose among the operators of an installed flag_gems.

    A whitelist is the whole choice, whatever the default list declines. Without one, it is
    everything that neither the blacklist nor the default list names.
    """
    if policy.flagos_whitelist is not None:
        named = found.matching(policy.flagos_whitelist)
        return Selection(named, named)
    every = frozenset(entry.key for entry in found.entries)
    declined = {key: DECLINED[key.partition(".")[0]] for key in every if _is_declined(key)}
    return Selection(
        every - declined.keys() - found.matching(policy.flagos_blacklist), declined=declined
    )


def _is_declined(key: str) -> bool:
    return key.partition(".")[0] in DECLINED


def knows(found: Installed | None, name: str) -> Decision:
    """Say whether a name that the catalogue does not have means ATen operators of flag_gems."""
    if found is None:
        return Decision.no("flag_gems, whose ATen operators may be listed, too, is not installed.")
    if name in found.names:
        return YES
    advice = nearest(name, found.names).partition(" Allowed:")[0]
    return Decision.no(f"flag_gems {found.version} has no ATen operator of that name. {advice}")
