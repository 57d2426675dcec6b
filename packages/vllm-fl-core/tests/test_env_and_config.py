from __future__ import annotations

import pytest

from vllm_fl.dispatch import ConfigError, config, config_file, env
from vllm_fl.dispatch.settings import SETTINGS
from vllm_fl.dispatch.yaml_text import parse


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
        (env.PER_OP, ";;", "VLLM_FL_PER_OP=';;': no order is given. Write 'operator=token|token'"),
        (env.PER_OP, "rms_norm=vendor;rms_norm=flagos", "appears twice"),
        (env.COMPARE, "rms_norm=reference,rms_norm=vendor", "'rms_norm' appears twice"),
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
    changed = {s.key: loaded[s.key] for s in SETTINGS if loaded[s.key] != s.variable.default}
    assert changed == {"prefer": "vendor", "deny_vendors": ("b",)}
    assert loaded.values["prefer"].source == f"{package / 'acme.yaml'} (platform defaults)"
    assert loaded.values["strict"].source == "VLLM_FL_STRICT"
    assert loaded.values["op_backends"].source == "built-in default"


def test_the_user_s_file_replaces_every_other_source(tmp_path):
    loaded = load(tmp_path, "deny_vendors: 'a,b'", VLLM_FL_PREFER="vendor", VLLM_FL_STRICT="1")
    assert loaded["prefer"] == "flagos"
    assert loaded["strict"] is False
    assert loaded["deny_vendors"] == ("a", "b")
    assert loaded.ignored == ("VLLM_FL_PREFER", "VLLM_FL_STRICT")
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
        ("prefer: vendor\nstrict: true\nprefer: flagos", "prefer is given twice: lines 1, 3."),
        ("'prefer': vendor\nprefer: vendor", "prefer is given twice: lines 1, 2."),
        ("op_backends:\n  rms_norm: [vendor]\n  rms_norm: [flagos]", "rms_norm is given twice"),
        ("op_backends: {attention_backend: {decode: vendor, decode: flagos}}", "decode is given"),
    ],
)
def test_a_bad_file_says_where_and_what_is_allowed(tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert message in str(caught.value)
    assert "fl.yaml" in str(caught.value)


def test_what_a_mapping_takes_over_from_another_is_not_given_twice(tmp_path):
    text = """
op_backends:
  rms_norm: &both {decode: [vendor], prefill: [vendor]}
  attention_backend: {<<: *both, prefill: [flagos]}
"""
    assert parse(text, "fl.yaml")["op_backends"] == {
        "rms_norm": {"decode": ["vendor"], "prefill": ["vendor"]},
        "attention_backend": {"decode": ["vendor"], "prefill": ["flagos"]},
    }


def test_a_missing_defaults_file_is_an_error():
    with pytest.raises(ConfigError, match=r"'no_such_wheel:a\.yaml' does not exist"):
        load(defaults="no_such_wheel:a.yaml")


@pytest.fixture
def defaults(tmp_path, monkeypatch):
    """A platform's defaults file with blacklists and orders."""
    package = tmp_path / "acme_fl"
    package.mkdir()
    (package / "acme.yaml").write_text(
        "flagos_blacklist: [silu_and_mul, gelu_and_mul]\noot_blacklist: [rms_norm]\n"
        "op_backends: {rms_norm: [vendor], attention_backend: {decode: [vendor]}}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "acme_fl:acme.yaml"


def test_a_blacklist_replaces_or_extends(defaults):
    replaced = load(defaults=defaults, VLLM_FL_FLAGOS_BLACKLIST="rms_norm")
    assert replaced["flagos_blacklist"] == ("rms_norm",)
    extended = load(defaults=defaults, VLLM_FL_FLAGOS_BLACKLIST="+rms_norm,+silu_and_mul")
    assert extended["flagos_blacklist"] == ("silu_and_mul", "gelu_and_mul", "rms_norm")
    assert extended.values["flagos_blacklist"].source.endswith(
        "(platform defaults), extended by VLLM_FL_FLAGOS_BLACKLIST"
    )
    with pytest.raises(ConfigError, match="mixes names that replace the list"):
        load(defaults=defaults, VLLM_FL_OOT_BLACKLIST="+a,b")


def test_orders_are_laid_over_each_other_operator_by_operator(defaults):
    loaded = load(
        defaults=defaults,
        VLLM_FL_PER_OP="attention_backend.prefill=flagos;moe_sum=reference",
    )
    assert loaded["op_backends"] == {
        "rms_norm": ("vendor",),
        "attention_backend.decode": ("vendor",),
        "attention_backend.prefill": ("flagos",),
        "moe_sum": ("reference",),
    }
    source = loaded.values["op_backends"].source
    assert source.startswith("VLLM_FL_PER_OP, over ")
    assert source.endswith("(platform defaults)")
    assert {name for name in loaded["op_backends"] if loaded.is_of_platform(name)} == {
        "rms_norm", "attention_backend.decode",
    }  # fmt: skip
    assert loaded.order_sources["moe_sum"] == "VLLM_FL_PER_OP"
    whole = load(defaults=defaults, VLLM_FL_PER_OP="attention_backend=flagos")
    assert whole["op_backends"] == {"rms_norm": ("vendor",), "attention_backend": ("flagos",)}


def test_an_order_takes_its_operator_off_the_blacklist_below(defaults):
    loaded = load(defaults=defaults, VLLM_FL_PER_OP="rms_norm=reference")
    assert loaded["oot_blacklist"] == ()
    source = loaded.values["oot_blacklist"].source
    assert source.endswith("(platform defaults), without what VLLM_FL_PER_OP orders")
    both = {"VLLM_FL_PER_OP": "rms_norm=reference", "VLLM_FL_OOT_BLACKLIST": "+rms_norm"}
    assert load(defaults=defaults, **both)["oot_blacklist"] == ("rms_norm",)
    other = load(defaults=defaults, VLLM_FL_PER_OP="moe_sum=reference")
    assert other["oot_blacklist"] == ("rms_norm",)


def test_an_order_goes_before_the_whitelist_of_the_defaults(tmp_path, monkeypatch):
    package = tmp_path / "bolt_fl"
    package.mkdir()
    (package / "bolt.yaml").write_text("oot_whitelist: [rms_norm]")
    monkeypatch.syspath_prepend(tmp_path)
    order = {"VLLM_FL_PER_OP": "silu_and_mul=reference"}
    loaded = load(defaults="bolt_fl:bolt.yaml", **order)
    layers = ("rms_norm", "silu_and_mul", "gelu_and_mul")
    assert [bool(loaded.oot_decision(op)) for op in layers] == [True, True, False]
    mine = load(defaults="bolt_fl:bolt.yaml", **order, VLLM_FL_OOT_WHITELIST="rms_norm")
    assert mine.oot_decision("silu_and_mul").reason == "oot_whitelist has only rms_norm"
    assert load(defaults="bolt_fl:bolt.yaml", VLLM_FL_PREFER="vendor")["oot_whitelist"] is None


def test_a_preference_goes_before_the_orders_and_lists_below(defaults, tmp_path):
    loaded = load(defaults=defaults, VLLM_FL_PREFER="reference", VLLM_FL_PER_OP="moe_sum=vendor")
    assert loaded["op_backends"] == {"moe_sum": ("vendor",)}
    assert loaded["oot_blacklist"] == ()
    assert loaded.values["oot_blacklist"].source == "overruled by VLLM_FL_PREFER"
    assert loaded["flagos_blacklist"] == ("silu_and_mul", "gelu_and_mul")  # may not run at all
    file = tmp_path / "tuned.yaml"
    file.write_text("op_backends: {silu_and_mul: [flagos]}\noot_blacklist: [gelu_and_mul]")
    tuned = {"VLLM_FL_TUNED_FILE": str(file)}
    assert "silu_and_mul" in load(defaults=defaults, **tuned)["op_backends"]
    over = load(defaults=defaults, **tuned, VLLM_FL_PREFER="vendor")
    assert (over["op_backends"], over["oot_blacklist"]) == ({}, ())
    file.write_text("prefer: flagos\nop_backends: {silu_and_mul: [flagos]}")
    complete = load(defaults=defaults, **tuned)
    assert (complete["op_backends"], complete["oot_blacklist"]) == (
        {"silu_and_mul": ("flagos",)}, (),
    )  # fmt: skip


def test_a_file_of_the_user_s_own_means_what_it_says(tmp_path):
    text = "prefer: vendor\nop_backends: {rms_norm: [reference]}\noot_blacklist: [rms_norm]"
    loaded = load(tmp_path, text)
    assert loaded["op_backends"] == {"rms_norm": ("reference",)}
    assert loaded.oot_decision("rms_norm").reason == "rms_norm is in oot_blacklist"


def test_what_a_tuned_file_repeats_stays_the_platform_s(defaults, tmp_path):
    tuned = tmp_path / "tuned.yaml"
    orders = "rms_norm: [vendor], attention_backend: {decode: [vendor]}, moe_sum: [flagos]"
    tuned.write_text(f"op_backends: {{{orders}}}")
    loaded = load(defaults=defaults, VLLM_FL_TUNED_FILE=str(tuned))
    assert loaded.is_of_platform("rms_norm")
    assert loaded.is_of_platform("attention_backend.decode")
    assert loaded.order_sources["moe_sum"] == f"{tuned} (tuned)"
    named = load(defaults=defaults, VLLM_FL_TUNED_FILE=str(tuned), VLLM_FL_PER_OP="rms_norm=vendor")
    assert not named.is_of_platform("rms_norm")


def test_a_whitelist_of_a_higher_layer_cancels_the_blacklist_below(defaults):
    loaded = load(defaults=defaults, VLLM_FL_FLAGOS_WHITELIST="rms_norm")
    assert loaded["flagos_whitelist"] == ("rms_norm",)
    assert loaded["flagos_blacklist"] == ()
    source = loaded.values["flagos_blacklist"].source
    assert source == "cancelled by VLLM_FL_FLAGOS_WHITELIST"
    assert loaded["oot_blacklist"] == ("rms_norm",)


def test_white_and_blacklist_together_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="flagos_whitelist and flagos_blacklist contradict"):
        load(VLLM_FL_FLAGOS_WHITELIST="a", VLLM_FL_FLAGOS_BLACKLIST="b")
    with pytest.raises(ConfigError, match="oot_whitelist and oot_blacklist contradict"):
        load(tmp_path, "oot_whitelist: [a]\noot_blacklist: [b]")


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"VLLM_FL_FLAGOS_BLACKLIST": "rms_norm"}, "rms_norm is in flagos_blacklist"),
        ({"VLLM_FL_FLAGOS_WHITELIST": "silu_and_mul"}, "flagos_whitelist has only silu_and_mul"),
        ({"USE_FLAGGEMS": "0"}, "the default backend is off"),
        ({"VLLM_FL_PREFER_ENABLED": "false"}, "the default backend is off"),
        ({"USE_FLAGGEMS": "1"}, ""),
    ],
)
def test_switches_of_the_default_backend(environ, reason):
    assert load(**environ).policy().flagos_decision("rms_norm").reason == reason


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({}, ""),
        ({"VLLM_FL_PREFER_ENABLED": "0"}, "VLLM_FL_PREFER_ENABLED is off"),
        ({"VLLM_FL_OOT_ENABLED": "0"}, "VLLM_FL_OOT_ENABLED is off"),
        ({"VLLM_FL_OOT_BLACKLIST": "rms_norm"}, "rms_norm is in oot_blacklist"),
        ({"VLLM_FL_OOT_WHITELIST": "silu_and_mul"}, "oot_whitelist has only silu_and_mul"),
        ({"VLLM_FL_OOT_WHITELIST": "rms_norm"}, ""),
    ],
)
def test_switches_of_the_layers(environ, reason):
    assert load(**environ).oot_decision("rms_norm").reason == reason


def test_a_token_twice_in_an_order_is_an_error_wherever_it_is_given(tmp_path):
    message = "op_backends: The order of operator 'rms_norm' has 'reference' twice"
    with pytest.raises(ConfigError, match=f"^VLLM_FL_PER_OP: {message}: reference > reference"):
        load(VLLM_FL_PER_OP="rms_norm=reference|reference")
    for order in ("[reference, vendor, reference]", "reference|vendor|reference"):
        with pytest.raises(ConfigError, match=message):
            load(tmp_path, f"op_backends: {{rms_norm: {order}}}")


def test_an_empty_list_of_layers_is_called_empty(tmp_path):
    loaded = load(tmp_path, "oot_whitelist: []")
    assert loaded.oot_decision("rms_norm").reason == "oot_whitelist is empty"


def test_the_documented_switches_are_those_that_no_file_holds():
    switches = [setting.variable.name for setting in SETTINGS if setting.parse is None]
    assert sorted(switches) == ["USE_FLAGGEMS", "VLLM_FL_OOT_ENABLED", "VLLM_FL_PREFER_ENABLED"]
    assert all(name in env.CONFIG.doc for name in switches)


def test_the_switches_hold_beside_a_user_s_file(tmp_path):
    loaded = load(tmp_path, "prefer: vendor", USE_FLAGGEMS="0", VLLM_FL_PREFER="reference")
    assert loaded["prefer"] == "vendor"
    assert not loaded.policy().flagos_decision("rms_norm")
    assert loaded.ignored == ("VLLM_FL_PREFER",)


def test_the_schema_describes_what_files_may_hold():
    schema = config_file.json_schema()
    assert schema["additionalProperties"] is False
    assert sorted(schema["properties"]) == [
        "allow_vendors", "deny_vendors", "flagos_blacklist", "flagos_whitelist", "oot_blacklist",
        "oot_whitelist", "op_backends", "prefer", "strict", "tuned",
    ]  # fmt: skip
    assert all(len(entry) > 1 for entry in schema["properties"].values())


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe", b"prefer: 2024-13-45", b"deny_vendors: ['']", b"flagos_whitelist: [+a]"],
)
def test_whatever_a_file_holds_is_an_error_of_ours(tmp_path, content):
    file = tmp_path / "fl.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"fl\.yaml"):
        config.load(environ={"VLLM_FL_CONFIG": str(file)})


def test_blanks_are_as_good_as_nothing():
    blank = {"VLLM_FL_ALLOW_VENDORS": " ", "VLLM_FL_PLATFORM": " ", "VLLM_FL_STRICT": "\t"}
    assert load(**blank).policy() == load().policy()
    assert env.PLATFORM.read(blank) is None


def test_contradictions_of_the_policy_name_their_sources():
    with pytest.raises(ConfigError, match=r"denied: a\. \(from VLLM_FL_ALLOW.*, VLLM_FL_DENY"):
        load(VLLM_FL_ALLOW_VENDORS="a", VLLM_FL_DENY_VENDORS="a").policy()
