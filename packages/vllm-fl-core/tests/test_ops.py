from __future__ import annotations

import inspect

import pytest

from vllm_fl.dispatch import RegistrationError, UnknownOperatorError
from vllm_fl.dispatch.ops import CATALOGUE, get_spec


def test_the_signatures_users_know():
    known = {
        "silu_and_mul": "(x)",
        "gelu_and_mul": "(x, approximate='none')",
        "rms_norm": "(x, residual, weight, epsilon)",
        "gemma_rms_norm": "(x, residual, weight, epsilon)",
        "rotary_embedding": "(query, key, cos, sin, position_ids, is_neox_style)",
        "attention_backend": "(use_mla=False, use_sparse=False)",
    }
    for name, signature in known.items():
        empty = inspect.Parameter.empty
        bare = [p.replace(annotation=empty) for p in get_spec(name).signature.parameters.values()]
        assert str(inspect.Signature(bare)) == signature


def test_every_operator_is_documented_with_its_source():
    for spec in CATALOGUE.values():
        assert spec.summary.endswith((".", ":"))
        assert "Source:" in spec.doc


def test_an_unknown_operator_names_the_nearest():
    with pytest.raises(UnknownOperatorError, match="Did you mean 'silu_and_mul'"):
        get_spec("silu_mul")


@pytest.mark.parametrize(
    ("fn", "problem"),
    [
        (lambda x, residual, weight: 0, "parameter 'epsilon' is missing"),
        (lambda x, res, weight, epsilon: 0, "parameter 2 is 'res', not 'residual'"),
        (lambda x, weight, residual, epsilon: 0, "parameter 2 is 'weight', not 'residual'"),
        (lambda x, residual, weight, epsilon, out: 0, "requires a parameter 'out'"),
        (lambda x, residual, weight, epsilon, *, out: 0, "requires a parameter 'out'"),
    ],
)
def test_a_signature_that_does_not_fit_names_owner_and_both_signatures(fn, problem):
    with pytest.raises(RegistrationError) as caught:
        get_spec("rms_norm").check(fn, "vendor.acme (acme-fl 1.0)")
    assert "vendor.acme (acme-fl 1.0) does not fit operator 'rms_norm'" in str(caught.value)
    assert problem in str(caught.value)


def test_defaults_must_agree():
    check = get_spec("gelu_and_mul").check
    with pytest.raises(RegistrationError, match="defaults to 'tanh', the operator's default is"):
        check(lambda x, approximate="tanh": 0, "a")
    with pytest.raises(RegistrationError, match="'approximate' has no default"):
        check(lambda x, approximate: 0, "a")


@pytest.mark.parametrize(
    "fn",
    [
        lambda *args: 0,
        lambda x, *rest: 0,
        lambda a, b, c, d, /: 0,
        lambda x, residual, weight, epsilon, out=None: 0,
        lambda x, residual, weight, epsilon, **more: 0,
        print,
    ],
)
def test_signatures_that_can_stand_in(fn):
    get_spec("rms_norm").check(fn, "a")


def test_donation_depends_on_the_arguments():
    norm, rotary = get_spec("rms_norm"), get_spec("rotary_embedding")
    assert not norm.donates((1, None, 2, 1e-6), {})
    assert norm.donates((1, 3, 2, 1e-6), {})
    assert norm.donates((1,), {"residual": 3, "weight": 2, "epsilon": 1e-6})
    assert rotary.donates((1, None, 2, 3, 4, True), {})
    assert not get_spec("silu_and_mul").donates((1,), {})
