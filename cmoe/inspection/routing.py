"""A routing formula in words."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cmoe.config import MoEConfig

_SCORES: Mapping[str, str] = {
    "softmax": "softmax over all experts",
    "sigmoid": "sigmoid of the logit",
    "sqrtsoftplus": "square root of the softplus of the logit",
}


def routing_in_words(config: MoEConfig) -> str:
    """Which experts a token goes to, then the weights that it gives them."""
    router = config.router
    by = "score plus correction bias" if router.e_score_correction_bias else "score"
    words = f"the {config.top_k} of {config.num_experts} experts of highest {by}"
    if router.use_grouped_topk:
        groups = "sum of its two best" if router.e_score_correction_bias else "best"
        words += (
            f", within the {router.topk_group} best of {router.num_expert_group} groups "
            f"(a group counts by the {groups})"
        )
    score = _SCORES[router.scoring_func]
    if router.softmax_after_topk:
        words += "; score: the logit; weights: softmax over the chosen"
    else:
        words += f"; score: {score}; weights: the score"
        if router.renormalize:
            epsilon = router.renormalize_epsilon
            words += ", divided by the sum of the chosen"
            words += f" plus {epsilon:g}" if epsilon > torch.finfo(torch.float32).eps else ""
    if router.routed_scaling_factor != 1.0:
        what = "the experts' sum" if router.apply_routed_scale_to_output else "they are"
        words += f"; {what} times {router.routed_scaling_factor:g}"
    if router.apply_router_weight_on_input:
        words += "; the weight multiplies the expert's input"
    return words
