"""What is tried on each operator: one module a family, found by being here.

A module has a function ``cases()`` that yields :class:`~vllm_fl.testing.case.Case` objects. An
operator on plain tensors needs its float64 oracle and its inputs, see
:class:`~vllm_fl.testing.checks.TensorOperator`; the common checks follow from the catalogue.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from vllm_fl.dispatch.ops import CATALOGUE, get_spec
from vllm_fl.testing.case import Case


@cache
def all_cases() -> dict[str, tuple[Case, ...]]:
    """Return operator -> its cases, for every operator of the catalogue.

    Raises:
        UnknownOperatorError: a case is for an operator that is not in the catalogue.
        ValueError: two cases have the same id.
    """
    found: dict[str, list[Case]] = {op_name: [] for op_name in CATALOGUE}
    ids = set()
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        for case in importlib.import_module(module.name).cases():
            found[get_spec(case.op_name).name].append(case)
            if case.id in ids:
                raise ValueError(f"two cases have the id {case.id!r}")
            ids.add(case.id)
    return {op_name: tuple(cases) for op_name, cases in found.items()}
