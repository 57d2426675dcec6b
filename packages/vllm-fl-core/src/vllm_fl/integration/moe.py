"""vLLM's mixture-of-experts layer with routing and experts through dispatched operators.

Two classes of vLLM are replaced by name, through vLLM's own hook: the method that runs unquantised
experts, which vLLM leaves to the platform when that is out of tree, and the runner that holds a
layer's router. Everything around them is vLLM's: gate, shared experts, expert placement, load
balancing, all-reduce, data and expert parallelism. So are routers that no operator stands for.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeAlias

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.platforms import current_platform

from vllm_fl.dispatch import env
from vllm_fl.dispatch.backend import ExpertsShape
from vllm_fl.dispatch.handle import BoundOp
from vllm_fl.dispatch.logging import get_logger
from vllm_fl.dispatch.ops import EXPERT_ACTIVATIONS
from vllm_fl.integration import custom_ops
from vllm_fl.integration.adapters import adapter
from vllm_fl.integration.layers import bind

logger = get_logger("vllm_fl.integration")

_ANY_BACKEND = ("auto", "humming")  # vLLM takes the second, too, as no choice for these experts
_EXPERTS = frozenset({"experts", "text_experts", "vision_experts"})  # in vLLM's models

Routing: TypeAlias = tuple[torch.Tensor, torch.Tensor]

UnquantizedMethod: type[Any] = adapter().UnquantizedMethod


class UnquantizedFusedMoEMethodFL(UnquantizedMethod):  # type: ignore[misc]
    """vLLM's ``UnquantizedFusedMoEMethod`` through the operator ``fused_experts``.

    Without a modular kernel vLLM's runner routes first, then calls :meth:`apply`, and gathers and
    scatters tokens itself where data parallelism needs it.

    A layer that needs something that ``fused_experts`` does not have becomes vLLM's own, where
    vLLM has kernels and the user has not asked for the operator.

    Raises:
        ValueError: otherwise.
    """

    is_monolithic = False

    def __init__(self, moe: FusedMoEConfig) -> None:
        missing = _missing(moe)
        if missing:
            if current_platform.is_out_of_tree() or custom_ops.is_asked_for("fused_experts"):
                raise ValueError(_refusal(missing))
            logger.info("vLLM keeps its own experts, which need %s.", missing)
            self.__class__ = UnquantizedMethod
            UnquantizedMethod.__init__(self, moe)
            return
        super().__init__(moe)
        # On a platform of its own vLLM has chosen a kernel of its own here, with a layout to match.
        self.unquantized_backend, self.experts_cls = UnquantizedMoeBackend.OOT, None
        self._op = bind("fused_experts")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leave the weights as they are: their layout is the operator's."""

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: object,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """x [T, H], topk_weights and topk_ids [T, k] -> [T, H]; the runner has the shared experts.

        Not ``forward_oot``, which vLLM skips when its compilation mode switches custom operators
        off: this runs inside one opaque operator in any case, and vLLM has no other way to go.
        """
        call = (
            x,
            layer.w13_weight.data,
            layer.w2_weight.data,
            topk_weights,
            topk_ids,
            layer.activation.value,
            layer.apply_router_weight_on_input,
            layer.global_num_experts,
            layer.expert_map,
        )
        fn = self._op.fn
        try:
            return fn(*call)
        except Exception as error:
            return self._op.recover(fn, error, *call)


def _missing(moe: FusedMoEConfig) -> str:
    """Return what a layer needs that ``fused_experts`` does not have; "" if it has everything."""
    parallel = moe.moe_parallel_config
    all2all = parallel.use_all2all_kernels and not parallel.use_ag_rs_all2all_kernels
    needs = {
        f"the activation {moe.activation.value!r}": moe.activation.value not in EXPERT_ACTIVATIONS,
        "a limit on the activation (swiglu_limit)": moe.swiglu_limit is not None,
        "biases": moe.has_bias,
        f"the all2all backend {parallel.all2all_backend!r}": all2all,
        f"the kernel of --moe-backend {moe.moe_backend}": moe.moe_backend not in _ANY_BACKEND,
        # Adapters take a modular kernel of vLLM's, unless they stay away from the experts.
        "LoRA adapters (--lora-target-modules keeps them off the experts)": _adapts_experts(),
    }
    return ", ".join(what for what, needed in needs.items() if needed)


def _adapts_experts() -> bool:
    """Whether vLLM may put adapters on the experts of some layer.

    As vLLM's ``is_in_target_modules`` for every name that a module of experts has in vLLM's models,
    without the model, which is not built yet: a target is such a name, or a path through one.
    """
    lora = get_current_vllm_config().lora_config
    if lora is None:
        return False
    targets = lora.target_modules
    return targets is None or any(not _EXPERTS.isdisjoint(name.split(".")) for name in targets)


def _refusal(missing: str) -> str:
    return (
        f"The model's unquantised experts need {missing}, which vllm-fl's operator fused_experts "
        f"does not have. It has the activations {' and '.join(EXPERT_ACTIVATIONS)}, without limit "
        "or biases, and expert parallelism by allgather_reducescatter. Where vLLM has kernels of "
        f"its own, {env.OOT_BLACKLIST.name}=fused_experts leaves the experts to it."
    )


class DispatchedRouter:
    """Mixin that takes over a router's settings and binds the operator that does its work.

    Attributes:
        operator: the operator.

    Args:
        router: the router that vLLM made.
    """

    operator: ClassVar[str]

    def __init__(self, router: BaseRouter) -> None:
        self.__dict__.update(vars(router))
        self._op = bind(self.operator)

    @staticmethod
    def serves(router: Any) -> bool:
        """Whether the operator computes what a router does."""
        return True


class FusedTopKRouterFL(DispatchedRouter, FusedTopKRouter):  # type: ignore[misc]
    """vLLM's ``FusedTopKRouter`` through ``topk_softmax``.

    Other scoring functions are vLLM's own.
    """

    operator = "topk_softmax"

    def _compute_routing(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> Routing:
        """router_logits [T, E] -> weights [T, k] fp32 and expert ids [T, k]."""
        if self.scoring_func != "softmax":
            routing: Routing = super()._compute_routing(
                hidden_states, router_logits, indices_type, input_ids=input_ids
            )
            return routing
        shape = (router_logits.shape[0], self.top_k)
        # Other types of index than the operator's are made from int32 by the base class.
        wanted = torch.int64 if indices_type == torch.int64 else torch.int32
        weights = router_logits.new_empty(shape, dtype=torch.float32)
        ids = router_logits.new_empty(shape, dtype=wanted)
        places = router_logits.new_empty(shape, dtype=torch.int32)
        call = (weights, ids, places, router_logits, self.renormalize)
        fn = self._op.fn
        try:
            weights, ids = fn(*call)
        except Exception as error:
            weights, ids = self._op.recover(fn, error, *call)
        return _without_padding(weights, ids)


class GroupedTopKRouterFL(DispatchedRouter, GroupedTopKRouter):  # type: ignore[misc]
    """vLLM's ``GroupedTopKRouter`` through ``grouped_topk``.

    Groups that do not fit are vLLM's own.
    """

    operator = "grouped_topk"
    skip_padding = False  # only newer versions of vLLM let a model ask for it

    @staticmethod
    def serves(router: Any) -> bool:
        """Whether the operator computes what a router does."""
        return _is_grouped_topk(router)

    def _compute_routing(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> Routing:
        """router_logits [T, E] -> weights [T, k] fp32 and expert ids [T, k] int32."""
        experts, groups = router_logits.shape[-1], self.num_expert_group
        if experts <= groups or experts % groups:
            routing: Routing = super()._compute_routing(
                hidden_states, router_logits, indices_type, input_ids=input_ids
            )
            return routing
        weights, ids = _grouped(self._op, self, router_logits, groups, self.topk_group)
        return _without_padding(weights, ids) if self.skip_padding else (weights, ids)


class FusedTopKBiasRouterFL(DispatchedRouter, FusedTopKBiasRouter):  # type: ignore[misc]
    """vLLM's ``FusedTopKBiasRouter`` through ``grouped_topk``, all experts being one group."""

    operator = "grouped_topk"

    @staticmethod
    def serves(router: Any) -> bool:
        """Whether the operator computes what a router does."""
        return (
            _is_grouped_topk(router)
            and router.e_score_correction_bias is not None
            and router.global_num_experts > 1
            and router._hash_indices_table is None
            and getattr(router, "bias_vl", None) is None  # only newer versions of vLLM have it
        )

    def _compute_routing(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> Routing:
        """router_logits [T, E] -> weights [T, k] fp32 and expert ids [T, k] int32."""
        return _without_padding(*_grouped(self._op, self, router_logits, 1, 1))


def _is_grouped_topk(router: Any) -> bool:
    """Whether :func:`_grouped` knows a router's scores, and no choice is a shared expert's."""
    return router.scoring_func in ("softmax", "sigmoid") and router.num_fused_shared_experts == 0


def _grouped(
    op: BoundOp, router: Any, router_logits: torch.Tensor, groups: int, chosen: int
) -> Routing:
    """Call ``grouped_topk`` with the settings of a router; sigmoid is the operator's own."""
    sigmoid = router.scoring_func == "sigmoid"
    scores = router_logits
    if not sigmoid:
        scores = torch.softmax(router_logits, dim=-1, dtype=torch.float32)
    bias = router.e_score_correction_bias
    call = (
        scores,
        groups,
        chosen,
        router.top_k,
        router.renormalize,
        router.routed_scaling_factor,
        None if bias is None else bias.data,
        int(sigmoid),
    )
    fn = op.fn
    try:
        routing: Routing = fn(*call)
    except Exception as error:
        routing = op.recover(fn, error, *call)
    return routing


def _without_padding(weights: torch.Tensor, ids: torch.Tensor) -> Routing:
    """Give no experts to rows that only fill a batch up, where vLLM says which those are."""
    mask = adapter().padding_mask(len(ids))
    if mask is None:
        return weights, ids
    rows = mask.unsqueeze(1)
    return weights.masked_fill(rows, 0), ids.masked_fill(rows, -1)


ROUTERS: dict[type[BaseRouter], type[DispatchedRouter]] = {
    FusedTopKRouter: FusedTopKRouterFL,
    GroupedTopKRouter: GroupedTopKRouterFL,
    FusedTopKBiasRouter: FusedTopKBiasRouterFL,
}
"""vLLM's router -> the one that does its work through an operator."""


def dispatched(router: Any) -> Any:
    """Return the router that does what ``router`` does through an operator, or itself.

    A router of a subclass computes something else and stays as it is, as does one whose operator
    the configuration leaves to vLLM, or with settings that the operator does not have.
    """
    replacement = ROUTERS.get(type(router))
    if replacement is None or not custom_ops.decision(replacement.operator):
        return router
    return replacement(router) if replacement.serves(router) else router


class MoERunnerFL(MoERunner):
    """vLLM's ``MoERunner`` with a dispatched router where there is one."""

    router: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.router = dispatched(self.router)
        # The handle's place in the model, for reports by layer: a router is no module.
        self._op = getattr(self.router, "_op", None)


def expert_shapes(model: torch.nn.Module) -> list[ExpertsShape]:
    """Return the shapes of the layers that route or compute through an operator, each once."""
    found: dict[ExpertsShape, None] = {}
    for layer in model.modules():
        if not isinstance(layer, MoERunner):
            continue
        method, router = layer.routed_experts.quant_method, layer.router
        if isinstance(method, UnquantizedFusedMoEMethodFL) or isinstance(router, DispatchedRouter):
            moe = layer.moe_config
            shape = ExpertsShape(
                k=moe.experts_per_token,
                routed=moe.num_logical_experts,
                groups=getattr(router, "num_expert_group", 1) or 1,
                experts=moe.num_experts,
                local=moe.num_local_experts,
                hidden=moe.hidden_dim,
                inner=moe.intermediate_size_per_partition,
                itemsize=moe.in_dtype.itemsize,
                ranks=moe.moe_parallel_config.dp_size,
            )
            found[shape] = None
    return list(found)


def layer_classes() -> dict[str, dict[str, type[Any]]]:
    """Return operator -> vLLM class name -> the class that takes its place."""
    runner = {MoERunner.__name__: MoERunnerFL}
    return {
        "fused_experts": {"UnquantizedFusedMoEMethod": UnquantizedFusedMoEMethodFL},
        **{router.operator: runner for router in ROUTERS.values()},
    }
