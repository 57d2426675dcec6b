"""Classification and shares of what a profiler recorded; the command itself is in tests/."""

from __future__ import annotations

import gc
import importlib
import json
import sys
import types
from html.parser import HTMLParser
from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_fl.cli import main
from vllm_fl.dispatch.backend import Backend
from vllm_fl.dispatch.discovery import DiscoveredBackend
from vllm_fl.dispatch.errors import ConfigError
from vllm_fl.profiling import page
from vllm_fl.profiling.classify import GENERAL, Kernel, classify, patterns_of, short_name
from vllm_fl.profiling.report import summarise, unit
from vllm_fl.profiling.triton_kernels import home, triton_kernels
from vllm_fl.profiling.workload import Phase, Workload, has_no_weights

GELU = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::"
    "TensorIteratorBase&)::{lambda(float)#1}, std::array<char*, 2ul> >(int, std::array<char*, 2ul>)"
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Memcpy HtoD (Pageable -> Device)", Kernel("copy of memory", "runtime", False)),
        ("Memset (Device)", Kernel("copy of memory", "runtime", False)),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0",
         Kernel("fused by Inductor", "Inductor", True)),
        ("triton_poi_fused_mul_silu_slice_1", Kernel("fused by Inductor", "Inductor", True)),
        (GELU, Kernel("at::native::vectorized_elementwise_kernel", "PyTorch", False)),
        ("aten::addmm", Kernel("matrix product", "PyTorch", False)),
        ("aten::silu", Kernel("silu", "PyTorch", False)),
        ("vllm_fl::fused_experts", Kernel("vllm_fl::fused_experts", "vllm-fl", False)),
        ("void acme::mystery<int>(int*)", Kernel("acme::mystery", "other", False)),
    ],
)  # fmt: skip
def test_names_that_no_backend_declares(name, expected):
    assert classify(name, GENERAL, {}) == expected


MODULES = {
    "_rms_norm_kernel": ["acme.kernels.norm"],
    "_softmax": ["acme.kernels.softmax"],
    "_topk": ["vllm.v1.sample.ops", "acme.kernels.topk"],
    "_stray": ["other_wheel.kernels"],
    "_two": ["acme.kernels.norm", "other_wheel.kernels"],
    "nccl_like": ["acme.kernels.softmax"],
    "triton_per_token_quant": ["vllm.quant"],
    "triton_poi_fused_add_0": ["torch._inductor.runtime.compile_tasks.cabc"],
}
TABLE = {
    **GENERAL,
    "triton:acme.*": ("", "acme"),
    "triton:acme.kernels.norm": ("rms_norm", "acme"),
    "nccl*": ("communication", "NCCL"),
    "*acme::*": ("", "acme C++"),
    "*acme::gemm*": ("matrix product", "acme C++"),
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_rms_norm_kernel", Kernel("rms_norm", "acme", True)),
        ("_softmax", Kernel("_softmax", "acme", True)),
        ("_topk", Kernel("_topk", "acme or vLLM Triton", True)),
        ("_stray", Kernel("_stray", "other_wheel", True)),
        ("_two", Kernel("_two", "acme or other_wheel", True)),
        ("nccl_like", Kernel("nccl_like", "acme", True)),
        ("nccl_kernel", Kernel("communication", "NCCL", False)),
        ("triton_per_token_quant", Kernel("triton_per_token_quant", "vLLM Triton", True)),
        ("triton_poi_fused_add_0", Kernel("fused by Inductor", "Inductor", True)),
        ("void acme::gemm<2>(float*)", Kernel("matrix product", "acme C++", False)),
        ("void acme::add<2>(float*)", Kernel("acme::add", "acme C++", False)),
    ],
)
def test_triton_kernels_come_from_their_modules_and_the_longest_glob_counts(name, expected):
    assert classify(name, TABLE, MODULES) == expected
    assert classify(name, dict(reversed(TABLE.items())), MODULES) == expected


@given(st.text())
def test_every_name_is_classified(name):
    found = classify(name, GENERAL, {})
    assert found.origin
    assert found.op or not name.strip()


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("std::enable_if<(2)>(0), void>::type vllm::norm<c10::Half, 8>(c10::Half*)", "vllm::norm"),
        ("void (anonymous namespace)::softmax<float>(float*)", "softmax"),
        ("nvjet_tst_128x64_64x10_2x1_v_bz_TNT", "nvjet_tst_128x64_64x10_2x1_v_bz_TNT"),
    ],
)
def test_short_names(name, short):
    assert short_name(name) == short


def test_backends_declare_their_kernels():
    class Acme(Backend):
        name = "acme"
        kernels = {"acme_*": ("attention", "acme"), "Memset *": ("fill", "acme")}

    records = [DiscoveredBackend("acme", "here", backend=Acme()), DiscoveredBackend("f", "here")]
    table = patterns_of(records)
    assert classify("acme_flash", table, {}) == Kernel("attention", "acme", False)
    assert classify("Memset (Device)", table, {}).op == "fill"


def recorded(*kernels):
    return {"kernels": kernels, "triton": MODULES}


PHASES = {
    "prefill": Phase(1, 0.5, [recorded(("aten::mm", 2, 30.0), ("_softmax", 1, 10.0))]),
    "decode": Phase(3, 0.25, [recorded(("aten::mm", 2, 20.0)), recorded(("aten::addmm", 4, 40.0))]),
}


def test_shares_are_of_all_workers_and_phases():
    found = summarise(PHASES, TABLE)
    assert list(found) == ["prefill", "decode", "all"]
    assert found["prefill"]["us"] == 40.0
    assert found["prefill"]["triton_share"] == 0.25
    assert found["decode"]["triton_share"] == 0.0
    everything = found["all"]
    assert (everything["steps"], everything["seconds"], everything["us"]) == (4, 0.75, 100.0)
    assert everything["origins"] == [
        {"origin": "PyTorch", "calls": 8, "us": 90.0, "share": 0.9},
        {"origin": "acme", "calls": 1, "us": 10.0, "share": 0.1},
    ]
    assert everything["operations"][0] == {
        "op": "matrix product", "origin": "PyTorch", "calls": 8, "us": 90.0, "share": 0.9,
    }  # fmt: skip
    assert [row["kernel"] for row in everything["kernels"]] == [
        "aten::mm",
        "aten::addmm",
        "_softmax",
    ]


def test_no_time_is_an_error():
    with pytest.raises(ConfigError, match="recorded no time"):
        summarise({"prefill": Phase(records=[recorded()])}, GENERAL)


def test_the_unit_follows_the_device():
    assert unit("cpu") == "CPU time"
    assert unit("npu") == "device time"


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.links = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for key, value in attrs if key in ("src", "href")]


def test_the_page_needs_no_network_and_escapes():
    data = {
        "model": "<model>", "device_type": "cuda", "unit": "device time",
        "workload": vars(Workload(2, 3, 4)), "phases": summarise(PHASES, TABLE),
    }  # fmt: skip
    parser = Links()
    text = page.render(data)
    parser.feed(text)
    assert parser.links == []
    assert "script" not in parser.tags
    assert "<model>" not in text
    assert '<meta name="viewport"' in text  # so that a phone does not shrink it
    assert 'title="PyTorch: 90.0%"' in text


def test_a_folder_without_weights(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        has_no_weights(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert has_no_weights(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert not has_no_weights(str(tmp_path))
    assert not has_no_weights("org/name")


@pytest.mark.parametrize(("sizes", "name"), [((0, 1, 2), "batch"), ((1, 1, 1), "output")])
def test_workloads_that_cannot_be_had(sizes, name):
    with pytest.raises(ConfigError, match=f"The workload's {name}"):
        Workload(*sizes)


def test_prompts_are_the_same_every_time():
    prompts = Workload(3, 5, 2).prompts(100)
    assert prompts == Workload(3, 5, 2).prompts(100)
    assert [len(ids) for ids in prompts] == [5, 5, 5]
    assert {token < 100 for ids in prompts for token in ids} == {True}


def test_other_commands_take_no_arguments_of_vllm(capsys):
    with pytest.raises(SystemExit) as refused:
        main(["list", "--enforce-eager"])
    assert refused.value.code == 2
    assert "unrecognized arguments: --enforce-eager" in capsys.readouterr().err


@pytest.mark.skipif(
    not (find_spec("torch") and find_spec("vllm")), reason="the command asks for them first"
)
def test_a_page_that_is_a_folder_is_refused_before_vllm_starts(capsys, tmp_path):
    assert main(["profile", "model", "--html", str(tmp_path)]) == 1
    assert "is a folder. Name a file." in capsys.readouterr().err


def test_the_data_is_json():
    assert json.loads(json.dumps(summarise(PHASES, TABLE)))["all"]["us"] == 100.0


class JITFunction:
    """What is read of Triton's class of this name; the real ones are in vllm-fl-flaggems' tests."""

    def __init__(self, module, name, src=""):
        self.__module__, self.__name__, self.src = module, name, src or f"def {name}(x): {module}"


class CompiledKernel:
    def __init__(self, source, name=""):
        self.src = source
        self.name = name or source.fn.__name__


@pytest.fixture
def triton(monkeypatch):
    """Put a Triton in place whose functions and kernels a test makes."""
    jit = types.SimpleNamespace(JITFunction=JITFunction)
    compiler = types.SimpleNamespace(CompiledKernel=CompiledKernel)
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", jit)
    monkeypatch.setitem(sys.modules, "triton.compiler.compiler", compiler)


def compiled(*functions):
    return [CompiledKernel(types.SimpleNamespace(fn=function)) for function in functions]


COPY = "torch._inductor.runtime.compile_tasks.cabc"


def test_only_what_has_been_compiled_counts(triton):
    functions = [JITFunction(m, "norm") for m in ("vllm.norm", "acme.norm", "other.norm")]
    assert triton_kernels() == {}
    kernels = compiled(functions[1], functions[1])
    assert triton_kernels() == {"norm": ["acme.norm"]}
    kernels += compiled(functions[0])
    assert triton_kernels() == {"norm": ["acme.norm", "vllm.norm"]}


def test_a_kernel_may_have_another_name_than_its_function(triton):
    function = JITFunction("acme.mm", "mm")
    kernels = [CompiledKernel(types.SimpleNamespace(fn=function), "mm_NT_fp8")]
    assert triton_kernels() == {kernels[0].name: ["acme.mm"]}


def test_kernels_without_a_function_have_no_module(triton):
    kernels = [CompiledKernel(types.SimpleNamespace(path="a.ttir"), "from_text")]
    assert triton_kernels() == {}
    del kernels


@pytest.mark.parametrize(
    ("originals", "expected"),
    [
        ([("vllm.norm", "def norm(x): 1\n"), ("acme.norm", "def norm(x): 2")], ["vllm.norm"]),
        ([("vllm.norm", "def norm(x): 3"), ("acme.norm", "def norm(x): 2")],
         ["acme.norm", "vllm.norm"]),
        ([], [COPY]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("launched_by_triton", [True, False])
def test_a_copy_in_a_compiled_graph_counts_for_what_it_was_copied_from(
    triton, originals, expected, launched_by_triton
):
    functions = [JITFunction(module, "norm", src) for module, src in originals]
    copy = JITFunction(COPY, "norm", "def norm(x): 1")
    kernels = compiled(copy) if launched_by_triton else []
    assert triton_kernels() == {"norm": expected}
    del functions, kernels


def test_inductor_names_its_modules_so(tmp_path):
    tasks = pytest.importorskip("torch._inductor.runtime.compile_tasks")
    (tmp_path / "graph.py").touch()
    module = tasks._reload_python_module("cabc", str(tmp_path / "graph.py"), False)
    assert module.__name__ == COPY


def test_what_is_hidden_from_the_garbage_collector_is_found_and_stays_hidden(triton):
    """vLLM freezes the heap after it has warmed up."""
    kernels = compiled(JITFunction("acme.norm", "norm"))
    try:
        gc.freeze()
        hidden = gc.get_freeze_count()
        assert not any(thing is kernels[0] for thing in gc.get_objects())
        assert triton_kernels() == {"norm": ["acme.norm"]}
        assert gc.get_freeze_count() >= hidden
    finally:
        gc.unfreeze()
    assert triton_kernels() == {"norm": ["acme.norm"]}
    assert gc.get_freeze_count() == 0


def test_proxies_are_left_asleep(triton):
    class Proxy:
        @property
        def __class__(self):
            raise AssertionError("asked")

    proxy = Proxy()
    assert triton_kernels() == {}
    del proxy


def test_without_triton_there_are_no_kernels(monkeypatch):
    monkeypatch.delitem(sys.modules, "triton.runtime.jit", raising=False)
    assert triton_kernels() == {}


def test_modules_are_named_from_the_outermost_package(tmp_path, monkeypatch):
    """flag_gems puts folders of its own on the path."""
    folder = tmp_path / "acme_gems" / "backend" / "ops"
    folder.mkdir(parents=True)
    for package in (folder, *folder.parents[:2]):
        (package / "__init__.py").touch()
    (folder / "mm_by_acme.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(folder.parent)
    for module, named in (
        ("ops.mm_by_acme", "acme_gems.backend.ops.mm_by_acme"),
        ("ops", "acme_gems.backend.ops"),
        ("acme_gems.backend", "acme_gems.backend"),
        ("json.decoder", "json.decoder"),
    ):
        importlib.import_module(module)
        assert home(module) == named
    for module in ("ops", "ops.mm_by_acme", "acme_gems", "acme_gems.backend"):
        del sys.modules[module]
    assert home("no.such_module") == "no.such_module"


def test_the_recorder_counts_operators_of_the_cpu():
    torch = pytest.importorskip("torch")
    from vllm_fl.profiling.recorder import Recorder

    recorder = Recorder("cpu")
    for _ in range(3):
        torch.ones(8, 8) @ torch.ones(8, 8)
    found = {name: (calls, spent) for name, calls, spent in recorder.stop()["kernels"]}
    assert found["aten::mm"][0] == 3
    assert found["aten::mm"][1] > 0
