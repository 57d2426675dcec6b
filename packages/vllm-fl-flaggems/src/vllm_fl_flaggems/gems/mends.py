"""The ledger: each fault of flag_gems that is mended before its kernels run, and why.

An entry is asked whether it is needed from the source of flag_gems and the version of Triton, so
that `vllm-fl doctor` can tell without importing either, and applied after flag_gems has been
imported. The tests show the faults without their mends on the installed flag_gems: they fail when
a newer one no longer has them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

from vllm_fl.dispatch.types import YES, Decision
from vllm_fl_flaggems.availability import triton_version
from vllm_fl_flaggems.gems.source import TESTED, Installed


@dataclass(frozen=True)
class Mend:
    """One fault of flag_gems and its mend.

    Attributes:
        name: what is mended.
        why: what goes wrong without it.
        versions: of flag_gems and Triton that have the fault.
        until: what has to happen before the entry can be deleted.
        needed: tells whether the installed flag_gems has the fault with the installed Triton.
        apply: mends it in this process, where flag_gems has been imported; may be repeated.
    """

    name: str
    why: str
    versions: str
    until: str
    needed: Callable[[Installed], bool]
    apply: Callable[[], None]


_LIBENTRY = "flag_gems.utils.libentry"
_OLD_TRITON_TEST = "3 <= minor_version <= 6"


def _triton() -> tuple[int, int]:
    return triton_version() or (0, 0)


def _launcher_is_faulty(found: Installed) -> bool:
    return _triton() >= (3, 7) and _OLD_TRITON_TEST in found.text("utils", "libentry.py")


def _mend_launcher() -> None:
    # The attribute ``libentry`` of flag_gems.utils is a function that hides the module.
    importlib.import_module(_LIBENTRY)
    vars(sys.modules[_LIBENTRY])["minor_version"] = 6


def _prefers_block_pointers(found: Installed) -> bool:
    return _triton() >= (3, 7) and "prefer_block_pointer" in found.text(
        "utils", "codegen_config_utils.py"
    )


def _mend_pointwise() -> None:
    utils = importlib.import_module("flag_gems.utils.codegen_config_utils")
    # Kernels are generated at their first call, from this very object.
    utils.get_codegen_config().prefer_block_pointer = False


MENDS = (
    Mend(
        "launcher",
        "LibEntry keeps the constexpr arguments of a launch only for Triton 3.3 to 3.6. Triton's "
        "launcher counts them in every version, so that from the second call on a kernel with a "
        "constexpr before its last argument gets other pointers than it was called with "
        "(FlagGems issue 3353). It is told that it runs on 3.6.",
        "flag_gems 5.0.2 with Triton 3.7 and newer.",
        "FlagGems pull request 3350 is in a release.",
        _launcher_is_faulty,
        _mend_launcher,
    ),
    Mend(
        "pointwise kernels",
        "They are generated with block pointers: Triton 3.7 warns of them, 3.8 does not compile "
        "them, 3.9 does not have them. The generator has another way.",
        "flag_gems 5.0.2 with Triton 3.7 and newer.",
        "flag_gems no longer generates block pointers.",
        _prefers_block_pointers,
        _mend_pointwise,
    ),
)


def refusal_of_kernels(source: str) -> str:
    """Say why no kernel of a module may run on this Triton, from its source; "" if they may."""
    if _triton() >= (3, 8) and "make_block_ptr(" in source:
        return f"its kernel uses block pointers, which Triton {_short(_triton())} does not have"
    return ""


def usable(found: Installed) -> Decision:
    """Say whether flag_gems' kernels can be run here, mended where needed, without importing it."""
    launcher = found.text("utils", "libentry.py")
    if _triton() >= (3, 7) and found.version != TESTED and _OLD_TRITON_TEST not in launcher:
        return Decision.no(
            f"the launcher of flag_gems {found.version} is another one than that of {TESTED}, "
            f"which is tested with Triton {_short(_triton())}; install flag_gems {TESTED}"
        )
    return YES


def _short(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
