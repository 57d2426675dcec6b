"""Discovery, with real metadata on the path of fresh processes."""

from __future__ import annotations

import pytest

GOOD = """
from vllm_fl.dispatch import Backend, BackendImplKind
class B(Backend):
    name = {name!r}
    vendor = {name!r}
    operators = {{"silu_and_mul": "json:loads"}}
    def silu_and_mul(self, x): ...
    def gelu_and_mul(self, x, approximate="none"): return ({name!r}, x, approximate)
"""
REPORT = """
import json, sys
from vllm_fl.dispatch import get_default_manager, get_discovered_plugins
m = get_default_manager(); m.ensure_initialized()
print(json.dumps({
    "backends": {f"{b.name}/{b.distribution}": b.decision.reason for b in get_discovered_plugins()},
    "problems": {b.name: b.problems for b in get_discovered_plugins() if b.problems},
    "impls": {op: [[i.impl_id, i.wheel] for i in impls]
              for op, impls in m.registry.snapshot().impls_by_op.items()},
    "torch": "torch" in sys.modules,
}))
"""
USED = {
    "gelu_and_mul": [["vendor.acme", "acme 1.0"]],
    "silu_and_mul": [["vendor.acme", "acme 1.0"]],
}
OURS = tuple(f"vllm-fl-{name}" for name in ("reference", "flaggems", "cuda", "ascend"))


def only(report, name="acme"):
    """Drop the wheels of the environment that runs the tests."""
    return {
        **report,
        "backends": {k: v for k, v in report["backends"].items() if not k.endswith(OURS)},
        "impls": {
            op: kept
            for op, impls in report["impls"].items()
            if (kept := [i for i in impls if not i[1].startswith(OURS)])
        },
    }


@pytest.fixture
def acme(wheels):
    wheels.add("acme", GOOD.format(name="acme"))
    return wheels


def test_a_backend_class_with_functions_as_text_and_as_methods(acme):
    report = only(acme.python(REPORT))
    assert report["backends"] == {"acme/acme": ""}
    assert report["impls"] == USED
    assert report["torch"] is False
    called = acme.python(
        "import json; from vllm_fl.dispatch import call_op;"
        "print(json.dumps(call_op('gelu_and_mul', 3, 'tanh')))"
    )
    assert called == ["acme", 3, "tanh"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise OSError('libbad.so')", "it cannot be loaded: OSError: libbad.so"),
        ("def f(:", "it cannot be loaded: SyntaxError: "),
        ("import no_such_library", "it cannot be loaded: ModuleNotFoundError: No module named"),
        ("x = 1", "it cannot be loaded: AttributeError: module 'bad' has no attribute 'B'"),
        ("B = 3", "3 is neither a Backend class nor a function register_builtins(registry)"),
        (GOOD.format(name="bad") + "    api_version = (9, 0)\n", "written for backend API 9.0"),
        (GOOD.format(name="other"), "the entry point is named 'bad' but its backend 'other'"),
    ],
)
def test_a_broken_wheel_loses_itself_alone(acme, code, reason):
    acme.add("bad", code)
    report = only(acme.python(REPORT))
    assert set(report["backends"]) == {"acme/acme", "bad/bad"}
    assert reason in report["backends"]["bad/bad"]
    assert report["impls"] == USED


def test_a_broken_operator_loses_itself_alone(wheels):
    code = GOOD.format(name="acme").replace('x, approximate="none"', "x, mode")
    code = code.replace('"silu_and_mul": "json', '"silu_mul": "json:loads", "silu_and_mul": "json')
    wheels.add("acme", code)
    report = only(wheels.python(REPORT))
    assert report["impls"] == {"silu_and_mul": USED["silu_and_mul"]}
    unknown, signature = report["problems"]["acme"]
    assert "Unknown operator 'silu_mul'. Did you mean 'silu_and_mul'" in unknown
    assert "vendor.acme (acme 1.0) does not fit operator 'gelu_and_mul'" in signature


def test_two_wheels_of_one_name_and_the_owner_of_the_name_wins(wheels):
    wheels.add("aaa-acme", GOOD.format(name="acme"), entry="acme")
    wheels.add("vllm-fl-acme", GOOD.format(name="acme"), entry="acme")
    report = only(wheels.python(REPORT))
    assert report["backends"] == {
        "acme/vllm-fl-acme": "",
        "acme/aaa-acme": "the name 'acme' is taken by vllm-fl-acme; uninstall one of the two",
    }
    assert report["impls"]["silu_and_mul"] == [["vendor.acme", "vllm-fl-acme 1.0"]]


def test_an_editable_install_beside_its_source_tree_counts_once(acme, tmp_path):
    other = type(acme)(tmp_path / "other")
    other.add("acme", GOOD.format(name="acme"), version="0.9", metadata="egg-info")
    report = only(acme.python(REPORT, other.path))
    assert report["backends"] == {"acme/acme": ""}
    assert report["impls"] == USED


REGISTER = """
from vllm_fl.dispatch import BackendImplKind, OpImpl
def silu_and_mul(x): return ("acme", x)
silu_and_mul._is_available = lambda: True
def register_builtins(registry):
    registry.register_many([OpImpl(op_name="silu_and_mul", impl_id="vendor.acme",
        kind=BackendImplKind.VENDOR, fn=silu_and_mul, vendor="acme")])
"""


@pytest.mark.parametrize("value", ["acme", "acme:register_builtins"])
def test_register_builtins_through_an_entry_point(wheels, value):
    wheels.add("acme", REGISTER, value=value)
    report = only(wheels.python(REPORT))
    assert report["impls"] == {"silu_and_mul": [["vendor.acme", "acme 1.0"]]}


def test_what_a_failing_registration_did_is_rolled_back(wheels):
    wheels.add("acme", REGISTER + "    raise RuntimeError('half way')\n", value="acme")
    report = only(wheels.python(REPORT))
    assert report["impls"] == {}
    reason = "it cannot be registered: RuntimeError: half way"
    assert report["backends"] == {"acme/acme": reason}


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("plug", REGISTER),
        ("plug:register_builtins", REGISTER),
        ("plug:B", GOOD.format(name="acme")),
    ],
)
def test_plugin_modules(wheels, value, code):
    (wheels.path / "plug.py").write_text(code)
    report = only(wheels.python(REPORT, VLLM_FL_PLUGIN_MODULES=value))
    assert report["impls"]["silu_and_mul"] == [["vendor.acme", ""]]


@pytest.mark.parametrize(
    ("value", "code", "message"),
    [
        ("no_such_module", "", "No module named 'no_such_module'"),
        ("plug", "x = 1", "nor a module that has one"),
        ("plug:B", "x = 1", "'plug' has no 'B'"),
        ("plug", REGISTER + "    raise RuntimeError('half way')\n", "RuntimeError: half way"),
    ],
)
def test_a_plugin_module_that_was_named_must_work(wheels, value, code, message):
    (wheels.path / "plug.py").write_text(code)
    done = wheels.process(REPORT, VLLM_FL_PLUGIN_MODULES=value)
    assert done.returncode == 1
    assert f"BackendLoadError: VLLM_FL_PLUGIN_MODULES names '{value}', but it" in done.stderr
    assert message in done.stderr


HEAVY = ("torch", "vllm", "numpy", "triton", "flag_gems", "torch_npu", "transformers", "yaml")


def test_importing_and_listing_is_light(acme):
    loaded = acme.python(
        f"""
import json, sys
import vllm_fl, vllm_fl.dispatch
from vllm_fl.cli import main
assert main(["list"]) == 0
print(json.dumps([m for m in {HEAVY} if m in sys.modules]))
"""
    )
    assert loaded == []


def test_a_shadowed_module_loses_itself_alone(acme, tmp_path):
    acme.add("bolt", GOOD.format(name="bolt"), record=True)
    early = tmp_path / "early"
    early.mkdir()
    (early / "bolt.py").write_text(GOOD.format(name="bolt"))
    code = f"import sys; sys.path.insert(0, {str(early)!r})\n{REPORT}"
    report = only(acme.python(code))
    assert report["impls"] == USED
    reason = report["backends"]["bolt/bolt"]
    assert f"the module 'bolt' was imported from {early / 'bolt.py'}, not from" in reason
    assert only(acme.python(REPORT))["backends"]["bolt/bolt"] == ""


def test_a_wheel_without_metadata_is_still_found_by_its_entry_point(acme):
    (acme.path / "acme-1.0.dist-info" / "METADATA").unlink()
    report = only(acme.python(REPORT))
    assert report["backends"] == {"acme/": ""}
    assert report["impls"]["silu_and_mul"] == [["vendor.acme", ""]]


def test_an_operator_that_names_no_function_is_told(wheels):
    code = GOOD.format(name="acme").replace('{"silu', '{"rms_norm": 3, "silu')
    wheels.add("acme", code)
    problems = wheels.python(REPORT)["problems"]["acme"]
    assert problems == [
        "acme: operators['rms_norm'] is 3. Allowed: 'module:function', or an Implementation."
    ]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys; sys.exit('bye')", "it cannot be loaded: SystemExit: bye"),
        (GOOD.format(name="bad") + "    device = 'npu'\n", "its device is 'npu', not a Device or"),
        (GOOD.format(name="bad") + "    operators = ['a']\n", "['a'], not a mapping from"),
        (GOOD.format(name="bad") + "    api_version = '1.0'\n", "its api_version is '1.0'"),
    ],
)
def test_a_wheel_that_states_nonsense_loses_itself_alone(acme, code, reason):
    acme.add("bad", code)
    report = only(acme.python(REPORT))
    assert reason in report["backends"]["bad/bad"]
    assert report["impls"] == USED


def test_a_named_backend_whose_operator_does_not_fit_must_work(wheels):
    code = GOOD.format(name="acme").replace('x, approximate="none"', "x, mode")
    (wheels.path / "plug.py").write_text(code)
    done = wheels.process(REPORT, VLLM_FL_PLUGIN_MODULES="plug:B")
    assert done.returncode == 1
    assert "does not fit operator 'gelu_and_mul'" in done.stderr


def test_a_module_named_twice_counts_once(wheels):
    (wheels.path / "plug.py").write_text(GOOD.format(name="acme"))
    report = only(wheels.python(REPORT, VLLM_FL_PLUGIN_MODULES="plug:B,plug:B"))
    assert report["impls"]["silu_and_mul"] == [["vendor.acme", ""]]


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("plug:B", GOOD.format(name="acme").replace('x, approximate="none"', "x, mode")),
        ("plug", REGISTER + "    raise RuntimeError('half way')\n"),
        (
            "plug:B",
            GOOD.format(name="acme")
            + "    def implementations(self):\n"
            + "        yield from super().implementations()\n"
            + "        raise RuntimeError('half way')\n",
        ),
    ],
)
def test_a_named_module_that_fails_does_so_every_time_and_leaves_nothing(wheels, value, code):
    (wheels.path / "plug.py").write_text(code)
    tries = """
import json
from vllm_fl.dispatch import BackendLoadError, call_op, get_default_manager
manager = get_default_manager()
said = []
for attempt in (manager.ensure_initialized, lambda: call_op("silu_and_mul", 1)) * 2:
    try:
        attempt()
    except BackendLoadError as error:
        said.append(str(error))
impls = manager.registry.get_implementations("silu_and_mul")
print(json.dumps({"said": said, "acme": [i.impl_id for i in impls if i.vendor == "acme"]}))
"""
    report = wheels.python(tries, VLLM_FL_PLUGIN_MODULES=value)
    assert len(report["said"]) == 4
    assert len(set(report["said"])) == 1
    assert report["said"][0].startswith("VLLM_FL_PLUGIN_MODULES names ")
    assert report["acme"] == []


def test_a_module_that_was_repaired_is_used(wheels):
    (wheels.path / "plug.py").write_text(REGISTER + "    if broken: raise RuntimeError\nbroken = 1")
    code = """
import json, plug
from vllm_fl.dispatch import BackendLoadError, call_op, get_default_manager
from vllm_fl.dispatch import get_discovered_plugins
try:
    get_default_manager().ensure_initialized()
except BackendLoadError:
    plug.broken = 0
get_default_manager().ensure_initialized()
answer = get_default_manager().registry.get_implementation("silu_and_mul", "vendor.acme").fn(1)
(record,) = (b for b in get_discovered_plugins() if b.name == "plug")
print(json.dumps([answer, record.decision.reason]))
"""
    assert wheels.python(code, VLLM_FL_PLUGIN_MODULES="plug") == [["acme", 1], ""]


def test_the_vendor_of_a_backend_that_cannot_be_used_is_no_misspelling(acme):
    acme.add("bolt", "raise OSError('libbolt.so')")
    code = """
import json
from vllm_fl.dispatch import SelectionPolicy, get_default_manager
policy = SelectionPolicy.from_dict(deny_vendors=["bolt", "acme", "bold"])
print(json.dumps(get_default_manager().unmatched_vendors(policy)))
"""
    (said,) = acme.python(code)
    assert "no backend here is of the vendor 'bold'. Did you mean 'bolt'?" in said
