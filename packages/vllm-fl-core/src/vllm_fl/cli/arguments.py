"""Arguments of an operator's call, written on the command line."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

from vllm_fl.dispatch.errors import ConfigError, nearest
from vllm_fl.dispatch.spec import OpSpec

_TENSOR = re.compile(r"(?P<dtype>[a-z]+\d+\w*|bool)\[(?P<shape>[\d,\s]*)\]")


def parse_call(spec: OpSpec, texts: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Parse ``["x=bfloat16[8,256]", "approximate='tanh'"]`` into the arguments of a call.

    A tensor is written ``dtype[shape]`` and made on the meta device; anything else is a Python
    literal.

    Raises:
        ConfigError: an argument cannot be read, or they do not fit the operator.
    """
    values = {}
    for text in texts:
        name, separator, written = text.partition("=")
        if not separator:
            raise ConfigError(
                f"{text!r} is not of the form 'parameter=value'. The operator: {spec.declaration}."
            )
        if name not in spec.signature.parameters:
            raise ConfigError(
                f"{text!r}: {spec.name} has no parameter {name!r}. "
                f"{nearest(name, spec.signature.parameters)}"
            )
        if name in values:
            raise ConfigError(f"{name!r} is given twice.")
        values[name] = _value(written, spec.signature.parameters[name].annotation)
    try:
        bound = spec.signature.bind(**values)
    except TypeError as error:
        raise ConfigError(f"{error}. The operator: {spec.declaration}.") from error
    return bound.args, bound.kwargs


def _value(written: str, annotation: object) -> Any:
    tensor = _TENSOR.fullmatch(written.strip())
    if tensor is None:
        if annotation == "str" and written.isidentifier():
            return written
        try:
            return ast.literal_eval(written)
        except (ValueError, SyntaxError):
            raise ConfigError(
                f"{written!r} is neither a tensor like bfloat16[8,256] nor a Python literal."
            ) from None
    import torch

    dtype = getattr(torch, tensor["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"{tensor['dtype']!r} is not a torch dtype. Write bfloat16[8,256].")
    shape = [int(size) for size in tensor["shape"].split(",") if size.strip()]
    try:
        return torch.empty(shape, dtype=dtype, device="meta")
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"{written!r} is not a tensor: {error}") from error
