"""What runs in stock vLLM before it serves: attention's warm-up, and the steps backends ask for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Reference experts and attention that write down what is asked of them.
PLANTED = """
import json, os
from vllm_fl.dispatch import Backend

def note(*what):
    with open(os.environ["NOTES"], "a") as file:
        file.write(json.dumps(what) + "\\n")

class Planted(Backend):
    name = vendor = "planted"

    def warmup_tokens(self, most, experts):
        note("asked", most, [vars(shape) for shape in experts])
        return range(1, 2), range(20, 31), range(25, 40), range(most, most + 1)

    def attention_backend(self, use_mla=False, use_sparse=False):
        return "planted_attention:PlantedBackend"

    def fused_experts(self, hidden_states, w1, w2, topk_weights, topk_ids, activation="silu",
                      apply_router_weight_on_input=False, global_num_experts=-1, expert_map=None):
        from vllm_fl_reference.ops.moe import fused_experts
        note("experts", len(hidden_states), *w1.shape, w1.itemsize)
        return fused_experts(hidden_states, w1, w2, topk_weights, topk_ids, activation,
                             apply_router_weight_on_input, global_num_experts, expert_map)
"""
ATTENTION = """
import vllm_fl_reference.attention.backend as reference
from plug import note

class PlantedImpl(reference.ReferenceAttentionImpl):
    def warm_up(self, kv_cache, vllm_config, phases):
        note("attention", list(phases), kv_cache.dim(), vllm_config.scheduler_config.max_num_seqs)

class PlantedBackend(reference.ReferenceAttentionBackend):
    get_impl_cls = staticmethod(lambda: PlantedImpl)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    script = Path(__file__).with_name("make_models.py")
    subprocess.run([sys.executable, "-P", str(script), str(folder), "qwen3_moe"], check=True)
    return folder / "qwen3_moe"


@pytest.fixture
def notes(vllm, plugin, tmp_path, model):
    """Run a prompt with an attention order; return what was written down, and the log."""

    def run(order):
        env = plugin(PLANTED) | {"VLLM_FL_PLUGIN_MODULES": "plug:Planted"}
        (tmp_path / "planted_attention.py").write_text(ATTENTION)
        path = tmp_path / "notes"
        env |= {"NOTES": str(path), "VLLM_FL_PER_OP": f"fused_experts=vendor:planted;{order}"}
        result = vllm(
            model, [[5, 80, 200]], new_tokens=2, env=env, max_num_batched_tokens=64, max_num_seqs=8
        )
        return [json.loads(line) for line in path.read_text().splitlines()], result["log"]

    return run


def test_attention_and_steps_before_serving(notes, model):
    written, log = notes("attention_backend=vendor:planted")
    config = json.loads((model / "config.json").read_text())
    layers = config["num_hidden_layers"]
    hidden, inner, experts = config["hidden_size"], config["moe_intermediate_size"], 12

    asked = written.index(next(row for row in written if row[0] == "asked"))
    assert written[asked - layers : asked] == [["attention", ["decode", "prefill"], 4, 8]] * layers
    shape = {
        "k": config["num_experts_per_tok"], "routed": experts, "groups": 1, "experts": experts,
        "local": experts, "hidden": hidden, "inner": inner, "itemsize": 4, "ranks": 1,
    }  # fmt: skip
    assert written[asked] == ["asked", 64, [shape]]
    ran = written[asked + 1 :]
    assert {tuple(row[2:]) for row in ran} == {(experts, 2 * inner, hidden, 4)}
    # One count does for two ranges that overlap; on CPU vLLM has not run 64 to profile memory.
    counts = [1, 30, 64]
    assert [row[1] for row in ran][: 3 * layers] == [n for n in counts for _ in range(layers)]
    assert f"Warmed up: attention of {layers} layers; steps of {counts} tokens" in log


def test_each_phase_s_attention_warms_up_for_its_own(notes, model):
    order = "attention_backend.decode=vendor:planted;attention_backend.prefill=reference"
    written, _ = notes(order)
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    warmed = [row for row in written if row[0] == "attention"]
    assert warmed == [["attention", ["decode"], 4, 8]] * layers
