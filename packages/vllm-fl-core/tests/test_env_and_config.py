from __future__ import annotations

import pytest
from vllm_fl.dispatch import ConfigError, config, env


def load(tmp_path=None, text=None, defaults=None, **environ):
    if text is not None:
        file = tmp_path / "fl.yaml"
        file.write_text(text)
        environ["VLLM_FL_CONFIG"] = str(file)
    return config.load(defaults, environ)


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        (env.STRICT, "1", True),
        (env.STRICT, "False", False),
        (env.STRICT, " off ", False),
        (env.STRICT, "", False),
        (env.PREFER, "Vendor", "vendor"),
        (env.ALLOW_VENDORS, "a, b", ("a", "b")),
        (env.ALLOW_VENDORS, "", None),
        (env.PER_OP, "rms_norm=vendor|flagos; silu_and_mul=reference",
         {"rms_norm": ("vendor", "flagos"), "silu_and_mul": ("reference",)}),
        (env.LOG_LEVEL, "debug", "DEBUG"),
    ],
)  # fmt: skip
def test_values(variable, text, value):
    assert variable.read({variable.name: text}) == value


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        (env.STRICT, "2", "VLLM_FL_STRICT='2': not a boolean. Allowed: 1, true"),
        (env.PREFER, "flagoss", "VLLM_FL_PREFER='flagoss': Did you mean 'flagos'"),
        (env.DENY_VENDORS, "a,,b", "an entry between commas is empty"),
        (env.PER_OP, "rms_norm", "'rms_norm' is not of the form 'operator=token"),
        (env.PER_OP, "rms_norm=vendor|", "not of the form"),
        (env.PER_OP, "rms_norm=vendor;rms_norm=flagos", "appears twice"),
        (env.CONFIG, "/no/such/file.yaml", "no such file"),
        (env.LOG_LEVEL, "loud", "Allowed: critical, debug"),
    ],
)
def test_bad_values_say_what_is_allowed(variable, text, message):
    with pytest.raises(ConfigError, match=None) as caught:
        variable.read({variable.name: text})
    assert message in str(caught.value)


def test_every_variable_is_documented_once():
    names = [variable.name for variable in env.VARIABLES]
    assert len(names) == len(set(names))
    for variable in env.VARIABLES:
        assert variable.doc.endswith(".")
        assert variable.form


def test_unknown_variables_get_the_nearest_name():
    found = dict(env.unknown_variables({"VLLM_FL_PREFERR": "x", "VLLM_FL_STRICT": "1", "HOME": ""}))
    assert list(found) == ["VLLM_FL_PREFERR"]
    assert "Did you mean 'VLLM_FL_PREFER'" in found["VLLM_FL_PREFERR"]


def test_layers(tmp_path, monkeypatch):
    package = tmp_path / "acme_fl"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "acme.yaml").write_text("prefer: vendor\nstrict: true\ndeny_vendors: [b]\n")
    monkeypatch.syspath_prepend(tmp_path)
    loaded = load(defaults="acme_fl:acme.yaml", VLLM_FL_STRICT="0")
    assert {key: loaded[key] for key in loaded.values} == {
        "prefer": "vendor",
        "strict": False,
        "allow_vendors": None,
        "deny_vendors": ("b",),
        "op_backends": {},
    }
    assert loaded.values["prefer"].source == f"{package / 'acme.yaml'} (platform defaults)"
    assert loaded.values["strict"].source == "VLLM_FL_STRICT"
    assert loaded.values["op_backends"].source == "built-in default"


def test_the_user_s_file_replaces_every_other_source(tmp_path):
    loaded = load(tmp_path, "deny_vendors: 'a,b'", VLLM_FL_PREFER="vendor", VLLM_FL_STRICT="1")
    assert loaded["prefer"] == "flagos"
    assert loaded["strict"] is False
    assert loaded["deny_vendors"] == ("a", "b")
    assert "(VLLM_FL_CONFIG)" in loaded.values["deny_vendors"].source


def test_orders_as_list_and_as_text(tmp_path):
    text = "op_backends: {rms_norm: [vendor:acme, reference], silu_and_mul: vendor | flagos}"
    assert load(tmp_path, text).policy().per_op_order_dict == {
        "rms_norm": ("vendor:acme", "reference"),
        "silu_and_mul": ("vendor", "flagos"),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prefered: vendor", "unknown key 'prefered'. Did you mean 'prefer'?"),
        ("prefer: vendors", "prefer: Did you mean 'vendor'?"),
        ("prefer: 3", "prefer: 3 is not a text."),
        ("strict: 'false'", "strict: 'false' is not a boolean"),
        ("strict: 1", "strict: 1 is not a boolean"),
        ("allow_vendors: 3", "allow_vendors: 3 is not a list of names"),
        ("op_backends: [a]", "op_backends: ['a'] is not a mapping"),
        ("op_backends: {rms_norm: 3}", "rms_norm: 3 is not a list of tokens"),
        ("- a", "must hold a mapping of settings, not ['a']"),
        ("a: b: c", "is not YAML"),
    ],
)
def test_a_bad_file_says_where_and_what_is_allowed(tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert message in str(caught.value)
    assert "fl.yaml" in str(caught.value)


def test_a_missing_defaults_file_is_an_error():
    with pytest.raises(ConfigError, match="'no_such_wheel:a.yaml' does not exist"):
        load(defaults="no_such_wheel:a.yaml")
