"""Tuned configurations: what they say, which is chosen, how they enter the configuration."""

from __future__ import annotations

import pytest
import yaml

from vllm_fl.dispatch import (
    BackendImplKind,
    ConfigError,
    OpImpl,
    OpManager,
    config,
    config_file,
    discovery,
    reset_global_policy,
    state,
    tuned,
)
from vllm_fl.dispatch.backend import Backend
from vllm_fl.dispatch.discovery import DiscoveredBackend
from vllm_fl.dispatch.report import explain

SHAPE = {"architecture": "Qwen3ForCausalLM", "hidden_size": 256, "dtype": "bfloat16"}
HERE = tuned.Facts("NVIDIA H200", SHAPE, {"vllm": "0.28.0", "torch": "2.13.0"})
BLOCK = {
    "model": "tiny", "device": HERE.device, "shape": SHAPE, "versions": dict(HERE.versions),
    "workload": "chat", "objective": "throughput", "gain": {}, "noise": {}, "measured_in": "eager",
    "date": "2026-01-01T00:00:00+00:00",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    def write(name, block=None, **content):
        block = {} if block is None else {"tuned": {**BLOCK, **block}}
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**block, **content}))
        return path

    write.path = tmp_path
    return write


def choose(folder):
    return tuned.choose(config_file.read_blocks(folder.path), HERE)


def test_the_latest_one_that_fits_is_chosen(folder):
    device = folder("other-device", {"device": "NVIDIA A100", "date": "2027"})
    other = {**SHAPE, "hidden_size": 512, "dtype": "float16"}
    shape = folder("other-shape", {"shape": other, "date": "2027"})
    folder("other-model", {"shape": {**SHAPE, "architecture": "Other"}, "date": "2027"})
    older = folder("older", {"date": "2025"})
    folder("not-tuned", prefer="vendor")
    right = folder("right", {})
    assert choose(folder) == tuned.Choice(
        right,
        others=(
            f"{device} is not used: device was NVIDIA A100, is NVIDIA H200",
            f"{shape} is not used: dtype was float16, is bfloat16; hidden_size was 512, is 256",
            f"{older} is not used: {right} is newer",
        ),
    )


def test_other_versions_are_refused_with_the_reason(folder):
    path = folder("old", {"versions": {"vllm": "0.26.0", "torch": "2.13.0", "vllm-fl-cuda": "1"}})
    why = (
        f"{path} is not used: it was measured with other versions: vllm was 0.26.0, is 0.28.0; "
        "vllm-fl-cuda was 1, is absent"
    )
    assert choose(folder) == tuned.Choice(None, refused=(why,))


def test_a_choice_that_is_absent_refuses_the_file(folder):
    orders = {"rms_norm": ["impl:vendor.acme.fast", "reference"], "moe_sum": ["vendor:acme"],
              "attention_backend": {"decode": ["impl:vendor.acme"]}}  # fmt: skip
    path = folder("tuned", {}, op_backends=orders)
    asked = []

    def is_here(op_name, impl_id):
        asked.append((op_name, impl_id))
        return impl_id != "vendor.acme.fast"

    def is_complete(path):
        values = config_file.parse_file(path.read_text(), "")
        return tuned.names_what_is_here(values["op_backends"].value, is_here)

    found = tuned.choose(config_file.read_blocks(folder.path), HERE, is_complete)
    assert found.path is None
    assert found.refused == (
        f"{path} is not used: it chooses implementations that are absent here: "
        "rms_norm: vendor.acme.fast",
    )
    assert sorted(asked) == [
        ("attention_backend", "vendor.acme"), ("rms_norm", "vendor.acme.fast")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ([], "must be a mapping"),
        ({"modell": "x"}, "unknown key 'modell'. Did you mean 'model'"),
        ({**BLOCK, "device": 3}, "device: 3 is not the device's name"),
        ({"model": "x"}, "device, shape, versions, .* is missing"),
    ],
)
def test_a_bad_block_is_an_error(tmp_path, block, message):
    file = tmp_path / "fl.yaml"
    file.write_text(yaml.safe_dump({"tuned": block}))
    with pytest.raises(ConfigError, match=rf"fl\.yaml \(VLLM_FL_CONFIG\): tuned.*{message}"):
        config.load(environ={"VLLM_FL_CONFIG": str(file)})


def test_it_lies_between_the_platform_and_the_environment(folder, tmp_path, monkeypatch):
    package = tmp_path / "acme_fl"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "acme.yaml").write_text("prefer: vendor\nstrict: true\ndeny_vendors: [a]")
    monkeypatch.syspath_prepend(tmp_path)
    path = folder(
        "right", {}, prefer="reference", strict=False, op_backends={"rms_norm": ["vendor"]}
    )
    environ = {"VLLM_FL_STRICT": "1", "VLLM_FL_TUNED_FILE": str(path)}
    loaded = config.load("acme_fl:acme.yaml", environ)
    assert (loaded["prefer"], loaded["strict"]) == ("reference", True)
    assert loaded["deny_vendors"] == ("a",)
    assert loaded.values["op_backends"].source == f"{path} (tuned)"
    assert loaded.values["strict"].source == "VLLM_FL_STRICT"


def test_a_user_s_file_replaces_it_and_says_so(folder):
    path = folder("right", {}, prefer="reference")
    environ = {"VLLM_FL_CONFIG": str(path), "VLLM_FL_TUNED_DIR": str(folder.path)}
    loaded = config.load(environ=environ)
    assert loaded["prefer"] == "reference"
    assert loaded.ignored == ("VLLM_FL_TUNED_DIR",)


def test_explain_says_tuned(folder):
    manager = OpManager(register_builtins=False)

    def run(input, output):
        raise NotImplementedError

    for vendor in "ab":
        manager.registry.register_impl(
            OpImpl("moe_sum", f"vendor.{vendor}", BackendImplKind.VENDOR, run, vendor=vendor)
        )
    reset_global_policy()
    assert explain(manager, "moe_sum")["chosen"] == "vendor.a"
    assert explain(manager, "moe_sum")["source"] == state.current_config().values["prefer"].source
    path = folder("right", {}, op_backends={"moe_sum": ["impl:vendor.b", "impl:vendor.a"]})
    epoch = manager.policy_epoch
    state.use_tuned_file(path)
    try:
        assert manager.policy_epoch > epoch
        report = explain(manager, "moe_sum")
        assert (report["chosen"], report["source"]) == ("vendor.b", f"{path} (tuned)")
    finally:
        state.use_tuned_file(None)
    assert explain(manager, "moe_sum")["chosen"] == "vendor.a"


def test_the_block_is_in_the_schema():
    schema = config_file.json_schema()["properties"]["tuned"]
    assert schema["required"] == list(BLOCK)
    assert schema["additionalProperties"] is False


def test_versions_hold_what_decides_about_speed():
    found = tuned.installed_versions()
    assert found["vllm-fl-core"]
    assert all(isinstance(number, str) for number in found.values())


def test_versions_hold_what_backends_name(monkeypatch):
    class Acme(Backend):
        name = "acme"
        packages = ("pytest", "acme-runtime-that-is-absent")

    found = DiscoveredBackend("acme", "a test", "acme-fl", "1.2", backend=Acme())
    monkeypatch.setattr(discovery, "get_discovered_plugins", lambda: (found,))
    versions = tuned.installed_versions()
    assert versions["pytest"] == pytest.__version__
    assert versions["acme-fl"] == "1.2"
    assert "acme-runtime-that-is-absent" not in versions


def test_a_written_file_gives_the_same_settings_over_other_defaults(folder, tmp_path, monkeypatch):
    """Tuned under a file that dispatches every layer, used over defaults that dispatch none."""
    pytest.importorskip("optuna")
    from vllm_fl.autotune.result import file_content, write

    package = tmp_path / "acme_fl"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "acme.yaml").write_text(
        "prefer: vendor\nstrict: true\noot_whitelist: []\nflagos_blacklist: [moe_sum]\n"
        "op_backends: {rotary_embedding: [vendor]}"
    )
    monkeypatch.syspath_prepend(tmp_path)
    base = folder("base", op_backends={"rms_norm": ["flagos"]})
    settings = config.load(environ={"VLLM_FL_CONFIG": str(base)})
    pair = {"decode": ["impl:vendor.a"], "prefill": ["impl:vendor.b"]}
    orders = {f"attention_backend.{phase}": order for phase, order in pair.items()}
    content = file_content(settings, {"moe_sum": ["impl:vendor.b"], **orders}, BLOCK)
    assert content["op_backends"]["attention_backend"] == pair
    path = tmp_path / "out" / "tuned.yaml"
    write(path, content)
    for environ in ({"VLLM_FL_CONFIG": str(path)}, {"VLLM_FL_TUNED_FILE": str(path)}):
        loaded = config.load("acme_fl:acme.yaml", environ)
        assert loaded.policy().per_op_order_dict == {
            "rms_norm": ("flagos",),
            "moe_sum": ("impl:vendor.b",),
            "attention_backend.decode": ("impl:vendor.a",),
            "attention_backend.prefill": ("impl:vendor.b",),
        }
        assert (loaded["prefer"], loaded["strict"]) == ("flagos", False)
        assert loaded.oot_decision("rms_norm")
        assert loaded.policy().flagos_decision("moe_sum")


@pytest.mark.parametrize(
    ("key", "name"), [("oot_whitelist", "OOT"), ("flagos_whitelist", "FLAGOS")]
)
def test_a_whitelist_is_written_without_its_blacklist(folder, tmp_path, key, name):
    pytest.importorskip("optuna")
    from vllm_fl.autotune.result import file_content, write

    settings = config.load(environ={f"VLLM_FL_{name}_WHITELIST": "rms_norm"})
    write(tmp_path / "tuned.yaml", file_content(settings, {}, BLOCK))
    loaded = config.load(environ={"VLLM_FL_CONFIG": str(tmp_path / "tuned.yaml")})
    assert loaded[key] == ("rms_norm",)
