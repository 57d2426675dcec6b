"""The dispatcher: which implementation of each operator runs. Imports neither torch nor vLLM."""

from vllm_fl.dispatch.backend import (
    BACKEND_API,
    Backend,
    Device,
    ExpertsShape,
    Implementation,
)
from vllm_fl.dispatch.default import (
    bind_op,
    call_op,
    get_default_manager,
    reset_default_manager,
    resolve_op,
    shared_op,
)
from vllm_fl.dispatch.discovery import (
    PLUGIN_GROUP,
    PLUGIN_MODULES_ENV,
    clear_discovered_plugins,
    discover_plugins,
    get_discovered_plugins,
)
from vllm_fl.dispatch.errors import (
    BackendLoadError,
    ConfigError,
    NoImplementationError,
    PredicateError,
    RegistrationError,
    UnknownOperatorError,
    VllmFLError,
)
from vllm_fl.dispatch.handle import BoundOp
from vllm_fl.dispatch.logging import get_logger, set_log_level
from vllm_fl.dispatch.manager import OpManager
from vllm_fl.dispatch.policy import (
    PREFER_DEFAULT,
    PREFER_REFERENCE,
    PREFER_VENDOR,
    SelectionPolicy,
    match_token,
)
from vllm_fl.dispatch.registry import OpRegistry, OpRegistrySnapshot
from vllm_fl.dispatch.state import (
    get_policy,
    get_policy_epoch,
    policy_context,
    policy_from_config,
    reset_global_policy,
    set_global_policy,
    with_allowed_vendors,
    with_denied_vendors,
    with_preference,
    with_strict_mode,
)
from vllm_fl.dispatch.types import BackendImplKind, BackendPriority, Decision, OpImpl

__all__ = [
    "BACKEND_API",
    "PLUGIN_GROUP",
    "PLUGIN_MODULES_ENV",
    "PREFER_DEFAULT",
    "PREFER_REFERENCE",
    "PREFER_VENDOR",
    "Backend",
    "BackendImplKind",
    "BackendLoadError",
    "BackendPriority",
    "BoundOp",
    "ConfigError",
    "Decision",
    "Device",
    "ExpertsShape",
    "Implementation",
    "NoImplementationError",
    "OpImpl",
    "OpManager",
    "OpRegistry",
    "OpRegistrySnapshot",
    "PredicateError",
    "RegistrationError",
    "SelectionPolicy",
    "UnknownOperatorError",
    "VllmFLError",
    "bind_op",
    "call_op",
    "clear_discovered_plugins",
    "discover_plugins",
    "get_default_manager",
    "get_discovered_plugins",
    "get_logger",
    "get_policy",
    "get_policy_epoch",
    "match_token",
    "policy_context",
    "policy_from_config",
    "reset_default_manager",
    "reset_global_policy",
    "resolve_op",
    "set_global_policy",
    "set_log_level",
    "shared_op",
    "with_allowed_vendors",
    "with_denied_vendors",
    "with_preference",
    "with_strict_mode",
]
