"""The conformance kit: does a backend do what the operator catalogue says?

It needs pytest and torch (``pip install vllm-fl-core[testing]``), vLLM for the attention cases,
and nothing of the backend but its installed wheel. Four ways to run it:

On the command line, with a table at the end::

    vllm-fl verify NAME [--device cuda] [-k EXPRESSION] [--json]

With pytest and all its options (``-p`` makes ``--fl-backend``, ``--fl-device`` and ``--fl-every``,
which runs a sample, known)::

    pytest -p vllm_fl.testing.plugin --pyargs vllm_fl.testing --fl-backend=NAME

In a wheel's own tests, as a file of two lines::

    from vllm_fl.testing.suite import conformance_test

    test_conformance = conformance_test("NAME")

From Python: :func:`vllm_fl.testing.suite.items` yields what there is to run.

NAME is a backend as ``vllm-fl list`` shows it, or the id of an implementation. A case has an id
of the form ``operator/check/what it is tried on``; what fails for a known reason is stated in the
backend as data::

    class AcmeBackend(Backend):
        known_failures = {"rms_norm/values/float32-*-columns*": "strided columns: fixed in 2.1"}

An excluded case that passes fails the run, and so do an exclusion without a reason and one that
matches no case. Calls that an implementation declines (by its dtypes, architecture or ``supports``
predicate) and layers that an attention class refuses in ``validate_configuration`` are reported
with the reason given.

The checks of an operator on plain tensors:

=============  ====================================================================================
values         every result of a first and a second call against a float64 oracle
contract       form of the results; no byte overwritten that was neither donated nor an output; no
               result in any other argument
offsets        rows 2^31 elements apart
refusal        what the operator does not have is refused, not computed as something else
rounding       the stated order of rounding, where two orders can be told apart
determinism    two calls give the same bits
rows           reported only: whether a row alone gives the bits that it gives in a batch
compile        an implementation that declares itself traceable is, in one graph
opcheck        torch's own check of a torch custom operator
=============  ====================================================================================

Attention has its own, see :mod:`vllm_fl.testing.operators.attention`. Another operator needs one
more module in :mod:`vllm_fl.testing.operators`.
"""
