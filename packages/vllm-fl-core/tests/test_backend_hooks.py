"""What core asks of a backend beyond its operators: listed names, the start of workers, facts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_fl.dispatch import (
    BackendImplKind,
    ConfigError,
    RegistrationError,
    SelectionPolicy,
    UnknownOperatorError,
    discovery,
    set_global_policy,
)
from vllm_fl.dispatch.backend import Backend
from vllm_fl.dispatch.oplist import OpList
from vllm_fl.dispatch.types import Decision

ACME = """
from vllm_fl.dispatch.backend import Backend
class B(Backend):
    name = vendor = "acme"
    def knows(self, name):
        return True if name.startswith("at_") else "acme knows at_NAME."
    def facts(self):
        return {"driver": 3}
"""


class Acme(Backend):
    name = vendor = "acme"
    kind = BackendImplKind.VENDOR
    error: Exception | None = None

    def __init__(self):
        self.ranks = []

    def start_worker(self, rank):
        self.ranks.append(rank)
        if self.error is not None:
            raise self.error

    def knows(self, name):
        return True if name.startswith("at_") else "acme knows at_NAME."


@pytest.fixture
def acme(monkeypatch):
    backend = Acme()
    records = (
        discovery.DiscoveredBackend("acme", "by hand", backend=backend),
        discovery.DiscoveredBackend("plain", "by hand", register_builtins=lambda registry: None),
        discovery.DiscoveredBackend(
            "broken", "by hand", backend=Acme(), decision=Decision.no("it is broken")
        ),
    )
    monkeypatch.setattr(discovery, "get_discovered_plugins", lambda: records)
    return backend


@pytest.mark.parametrize("key", ["flagos_whitelist", "flagos_blacklist"])
def test_the_lists_take_what_a_backend_knows(acme, key):
    policy = SelectionPolicy.from_dict(**{key: ["at_mm", "rms_norm"]})
    assert SelectionPolicy.from_dict(**policy.to_dict()) == policy
    with pytest.raises(UnknownOperatorError, match=r"Unknown operator 'rms_nrm'.*acme knows at_"):
        SelectionPolicy.from_dict(**{key: ["rms_nrm"]})


def test_a_backend_that_cannot_say_what_it_knows_loses_this_question_alone(acme, monkeypatch):
    (first, *others) = discovery.get_discovered_plugins()

    class Broken(Acme):
        def knows(self, name):
            raise OSError("libacne.so")

    broken = discovery.DiscoveredBackend("acne", "by hand", backend=Broken())
    monkeypatch.setattr(discovery, "get_discovered_plugins", lambda: (broken, first, *others))
    assert SelectionPolicy(flagos_blacklist=["at_mm"]).flagos_blacklist == {"at_mm"}
    with pytest.raises(UnknownOperatorError, match=r"'mm'.* acne cannot say .* OSError: libacne"):
        SelectionPolicy(flagos_blacklist=["mm"])


def test_orders_are_for_operators_alone(acme):
    with pytest.raises(UnknownOperatorError, match="Unknown operator 'at_mm'"):
        SelectionPolicy.from_dict(per_op_order={"at_mm": ["vendor"]})


def test_no_backend_is_asked_about_an_operator(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(discovery, "get_discovered_plugins", lambda: pytest.fail("asked"))
        policy = SelectionPolicy(flagos_blacklist=["rms_norm"])
    assert policy.flagos_blacklist == {"rms_norm"}


def test_a_list_in_the_environment_and_facts_in_the_report(wheels):
    wheels.add("acme", ACME)
    code = """
import json, sys
from vllm_fl.dispatch import get_default_manager, get_policy
from vllm_fl.dispatch.report import doctor
report = doctor(get_default_manager())
facts = {row["name"]: row["facts"] for row in report["backends"]}
print(json.dumps([sorted(get_policy().flagos_blacklist), facts["acme"], "torch" in sys.modules]))
"""
    known = wheels.python(code, VLLM_FL_FLAGOS_BLACKLIST="at_mm,rms_norm")
    assert known == [["at_mm", "rms_norm"], {"driver": 3}, False]


def test_use_flaggems_has_three_states(monkeypatch):
    from vllm_fl.dispatch import config

    for text, value in (("", None), ("1", True), ("off", False)):
        loaded = config.load(environ={"USE_FLAGGEMS": text})
        assert loaded["use_flaggems"] is value
        assert (loaded.policy().flagos_whitelist == frozenset()) is (value is False)


@pytest.fixture
def start(monkeypatch):
    pytest.importorskip("vllm")
    from vllm_fl.integration import worker

    return lambda rank: worker.start_backends(SimpleNamespace(additional_config={}), rank)


def test_a_worker_starts_every_usable_backend(acme, start, log):
    start(1)
    assert acme.ranks == [1]
    acme.error = ArithmeticError("no driver")
    start(0)
    assert [record.getMessage() for record in log][1:] == [
        "Backend acme could not start: ArithmeticError: no driver"
    ]


def test_a_refusal_stops_the_worker_and_strict_stops_it_at_any_error(acme, start):
    acme.error = ConfigError("named, and not to be had")
    with pytest.raises(ConfigError, match="not to be had"):
        start(0)
    acme.error = ArithmeticError("no driver")
    set_global_policy(SelectionPolicy(strict=True))
    with pytest.raises(ArithmeticError, match="no driver"):
        start(0)


def test_the_extension_goes_before_the_worker_s_own_methods(acme, monkeypatch):
    pytest.importorskip("vllm")
    from vllm_fl.integration import worker

    class Worker:
        def __init__(self, vllm_config, rank):
            self.vllm_config, self.rank, self.seen = vllm_config, rank, []

        def compile_or_warm_up_model(self):
            self.seen.append("warm")
            return 1.5

        def load_model(self, *, load_dummy_weights=False):
            self.seen.append((list(acme.ranks), load_dummy_weights))
            return "loaded"

    # What vLLM's WorkerWrapperBase does with an extension.
    Own = type("Own", (Worker,), {})
    Own.__bases__ = (*Own.__bases__, worker.WorkerExtensionFL)
    made = Own(SimpleNamespace(additional_config={}), rank=3)
    assert isinstance(made, Own)
    assert type(made).__name__ == "Own"
    assert made.load_model(load_dummy_weights=True) == "loaded"
    assert made.seen == [([3], True)]
    assert hasattr(made, "fl_operator_table")

    warmed = []
    monkeypatch.setattr(worker, "warm_up", lambda *given: warmed.append((given, *made.seen[1:])))
    made.model_runner = "runner"
    assert made.compile_or_warm_up_model() == 1.5
    # Before vLLM's own, which watches us then.
    assert warmed == [((made.vllm_config, "runner", False),)]
    assert made.seen[1:] == ["warm"]


@pytest.mark.parametrize("profiles", [True, False])
def test_the_extension_notes_whether_vllm_has_run_the_most_tokens(monkeypatch, profiles):
    pytest.importorskip("vllm")
    from vllm_fl.integration import worker

    class Runner:
        runs = 0

        def profile_run(self):
            self.runs += 1

    class Worker:
        vllm_config = "config"

        def determine_available_memory(self):
            if profiles:
                self.model_runner.profile_run()
            return 7

        def compile_or_warm_up_model(self):
            return 1.5

    warmed = []
    monkeypatch.setattr(worker, "warm_up", lambda *given: warmed.append(given))
    made = type("Own", (Worker, worker.WorkerExtensionFL), {})()
    made.model_runner = Runner()
    assert made.determine_available_memory() == 7
    assert vars(made.model_runner) == ({"runs": 1} if profiles else {})  # it has its own again
    made.compile_or_warm_up_model()
    assert warmed == [("config", made.model_runner, profiles)]


@pytest.mark.parametrize(
    ("mode", "captured", "profiled", "sizes"),
    [
        ("NONE", [], True, [4, 100]),
        ("NONE", [], False, [4, 100, 9999]),
        ("FULL_AND_PIECEWISE", [1, 2, 4], True, [100]),
        ("FULL", [2, 8, 60], True, []),
        ("FULL_DECODE_ONLY", [1, 2, 4], True, [4, 100]),
    ],
)
def test_bound_backends_say_what_to_warm_up(wheels, mode, captured, profiled, sizes):
    pytest.importorskip("vllm")
    wheels.add(
        "acme",
        ACME.replace(
            "def facts",
            "def warmup_tokens(self, most, experts):\n"
            "        assert experts == []\n"
            "        return range(2, 5), range(50, 101), range(3, 9), range(9000, most + 1)\n"
            "    def silu_and_mul(self, x): return x\n    def facts",
        ),
    )
    code = f"""
import json
from types import SimpleNamespace as N
from torch import nn
from vllm.config import CUDAGraphMode
from vllm_fl.dispatch import get_default_manager
from vllm_fl.integration.warmup import dummy_runs
config = N(scheduler_config=N(max_num_batched_tokens=9999),
           compilation_config=N(cudagraph_mode=CUDAGraphMode.{mode},
                                cudagraph_capture_sizes={captured!r}))
before = dummy_runs(config, nn.Linear(1, 1), {profiled})
handle = get_default_manager().bind("silu_and_mul")
print(json.dumps([before, dummy_runs(config, nn.Linear(1, 1), {profiled})]))
"""
    assert wheels.python(code, VLLM_FL_PER_OP="silu_and_mul=vendor") == [[], sizes]


def test_of_backends_named_by_hand_those_are_asked_that_run_something(wheels):
    pytest.importorskip("vllm")
    (wheels.path / "plug.py").write_text("""
from vllm_fl.dispatch.backend import Backend
class A(Backend):
    name = vendor = "a"
    def warmup_tokens(self, most, experts): return [range(1, 3)]
    def silu_and_mul(self, x): return x
class B(A):
    name = vendor = "b"
    def warmup_tokens(self, most, experts): return [range(5, 7)]
""")
    code = """
import json
from types import SimpleNamespace as N
from torch import nn
from vllm_fl.dispatch import get_default_manager
from vllm_fl.integration.warmup import dummy_runs
config = N(scheduler_config=N(max_num_batched_tokens=9),
           compilation_config=N(cudagraph_mode=None))
handle = get_default_manager().bind("silu_and_mul")
print(json.dumps(dummy_runs(config, nn.Linear(1, 1), True)))
"""
    for vendor, sizes in (("a", [2]), ("b", [6])):
        env = {"VLLM_FL_PER_OP": f"silu_and_mul=vendor:{vendor}"}
        assert wheels.python(code, VLLM_FL_PLUGIN_MODULES="plug:A,plug:B", **env) == sizes


@pytest.fixture
def sizes_of(monkeypatch):
    """Return the steps to run for a backend with a given ``warmup_tokens``; at most 64 tokens."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("vllm")
    from vllm_fl.integration import warmup

    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        compilation_config=SimpleNamespace(cudagraph_mode=None),
    )

    def run(method):
        backend = type("Named", (Acme,), {"warmup_tokens": method})()
        record = discovery.DiscoveredBackend(
            "acme", "by hand", backend=backend, registered=("silu",)
        )
        monkeypatch.setattr(discovery, "get_discovered_plugins", lambda: (record,))
        manager = SimpleNamespace(bound=lambda: {"silu", "norm"})
        monkeypatch.setattr(warmup, "get_default_manager", lambda: manager)
        return warmup.dummy_runs(config, torch.nn.Linear(1, 1), profiled=False)

    return run


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (None, "None"),
        (3, "3"),
        ("", "''"),
        (range(1, 5), "range(1, 5)"),
        (range(0), "range(0, 0)"),
        ([1, 2], "[1, 2]"),
        ("1-5", "'1-5'"),
        ([range(3), range(1, 5)], "[range(0, 3)]"),
        ([range(60, 66)], "[range(60, 66)]"),
        ([range(5, -1, -1)], "[range(5, -1, -1)]"),
        ([(1, 5)], "[(1, 5)]"),
    ],
)
def test_a_wrong_answer_about_tokens_stops_the_engine(sizes_of, answer, told):
    with pytest.raises(RegistrationError) as caught:
        sizes_of(lambda self, most, experts: answer)
    assert str(caught.value) == (
        f"Backend acme: warmup_tokens returned {told}. "
        "Allowed: an iterable of ranges of token counts within 1..64."
    )


def test_any_iterable_of_ranges_will_do(sizes_of):
    def ranges(self, most, experts):
        yield range(1, 2)
        yield range(90, most + 1)
        yield range(most, most + 1)

    assert sizes_of(ranges) == [1, 64]
    assert sizes_of(lambda self, most, experts: {range(64, 0, -1)}) == [1]
    assert sizes_of(lambda self, most, experts: ()) == []


def test_what_warmup_tokens_raises_is_told_or_stops_the_engine(sizes_of, log):
    def fails(self, most, experts):
        yield range(1, 2)
        raise ArithmeticError("no tile")

    def refuses(self, most, experts):
        raise ConfigError("not with this model")

    assert sizes_of(fails) == []
    assert [record.getMessage() for record in log] == [
        "warmup_tokens of backend acme failed, so its kernels may be compiled while a request "
        "waits: ArithmeticError: no tile"
    ]
    with pytest.raises(ConfigError, match="not with this model"):
        sizes_of(refuses)
    set_global_policy(SelectionPolicy(strict=True))
    with pytest.raises(ArithmeticError, match="no tile"):
        sizes_of(fails)


@pytest.fixture
def warm_up_layers():
    """Warm up layers of these implementations; return for how many one did."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("vllm")
    from vllm_fl.integration.warmup import warm_up_attention

    def run(*impls):
        layers = {
            str(number): SimpleNamespace(impl=impl, kv_cache=torch.zeros(3))
            for number, impl in enumerate(impls)
        }
        config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
        return warm_up_attention(config)

    return run


class AcmeImpl:
    def __init__(self, error=None):
        self.error = error
        self.called = 0

    def warm_up(self, kv_cache, vllm_config, phases):
        self.called += 1
        if self.error is not None:
            raise self.error


WHERE = f"{__name__}.AcmeImpl"


def test_an_implementation_that_fails_to_warm_up_is_told_once(warm_up_layers, log):
    failing, another = AcmeImpl(ArithmeticError("no tile")), AcmeImpl()
    able = type("Able", (AcmeImpl,), {})()
    assert warm_up_layers(failing, another, able, able) == 2
    assert (failing.called, another.called, able.called) == (1, 0, 2)
    assert [record.getMessage() for record in log] == [
        f"warm_up of {WHERE} failed, so its kernels may be compiled while a request waits: "
        "ArithmeticError: no tile"
    ]


def test_a_refusal_to_warm_up_stops_the_engine_and_strict_does_at_any_error(warm_up_layers):
    with pytest.raises(ConfigError, match="not with this cache"):
        warm_up_layers(AcmeImpl(ConfigError("not with this cache")))
    set_global_policy(SelectionPolicy(strict=True))
    with pytest.raises(ArithmeticError, match="no tile"):
        warm_up_layers(AcmeImpl(ArithmeticError("no tile")))


@pytest.mark.parametrize(
    ("method", "problem"),
    [
        (3, "is 3, which cannot be called"),
        (None, "is None, which cannot be called"),
        (
            lambda kv_cache, vllm_config: None,
            "takes (kv_cache, vllm_config) after self: too many positional arguments",
        ),
    ],
)
def test_a_warm_up_that_cannot_be_called_so_stops_the_engine(warm_up_layers, method, problem):
    impl = AcmeImpl()
    impl.warm_up = method
    with pytest.raises(RegistrationError) as caught:
        warm_up_layers(impl)
    assert str(caught.value) == (
        f"{WHERE}: warm_up {problem}. Wanted: warm_up(self, kv_cache, vllm_config, phases)."
    )


def test_attention_warms_up_where_it_can_and_has_a_cache():
    torch = pytest.importorskip("torch")
    pytest.importorskip("vllm")
    from vllm_fl.integration.warmup import warm_up_attention

    called = []
    able = SimpleNamespace(warm_up=lambda *given: called.append(given))
    cache = torch.zeros(3)
    layers = {
        "able": SimpleNamespace(impl=able, kv_cache=cache),
        "without a cache": SimpleNamespace(impl=able, kv_cache=cache[:0]),
        "not able": SimpleNamespace(impl=SimpleNamespace(), kv_cache=cache),
        "experts": SimpleNamespace(),
    }
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    assert warm_up_attention(config) == 1
    assert called == [(cache, config, ("decode", "prefill"))]


def test_lines_are_added_once_in_one_write(tmp_path):
    path = tmp_path / "ops.txt"
    listed = OpList(path)
    listed.add(["b", "a", "b"])
    listed.note("rms_norm", "reference.torch")
    listed.add(["a"])
    assert path.read_text() == "b\na\n[DEBUG] vllm_fl.dispatch.ops.rms_norm: reference.torch\n"
    path.unlink()
    listed.add(["b"])
    assert not path.exists()


def test_a_user_s_extension_must_be_one_of_vllm_fl_s():
    pytest.importorskip("vllm")
    from vllm_fl.integration.platform import WORKER_EXTENSION, _worker_extension

    assert _worker_extension("") == _worker_extension(WORKER_EXTENSION) == WORKER_EXTENSION
    with pytest.raises(ConfigError, match="make the class a subclass of vllm_fl"):
        _worker_extension("json.JSONDecoder")
    mine = f"{__name__}.Mine"
    assert _worker_extension(mine) == mine


def __getattr__(name):
    """``Mine``, a user's extension; its base class imports vLLM."""
    if name != "Mine":
        raise AttributeError(name)
    from vllm_fl.integration.worker import WorkerExtensionFL

    return type("Mine", (WorkerExtensionFL,), {})
