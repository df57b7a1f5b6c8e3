"""The router that reads the experts of a token from a table, by the token's id in the vocabulary.

T tokens, V vocabulary, E experts, K experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cmoe.config import MoEConfig
from cmoe.custom_ops.id_range import check_ids
from cmoe.custom_ops.route import sqrt_softplus
from cmoe.router.base import FusedMoERouter, RouterSlot
from cmoe.routing import RouterInputs, Routing


class HashRouter(FusedMoERouter):
    """ids = table[input_ids]; weights = sqrt(softplus(logits)) at those ids, renormalised, scaled.

    The hash layers of DeepSeek-V4, after Roller et al. 2021 (arXiv 2106.04426).
    table: [V, K] ids in [0, E), kept as the int32 buffer `hash_indices_table`, which checkpoints
        fill (`gate.tid2eid` in transformers' DeepSeek-V4).
    """

    requires = frozenset({"router_logits", "input_ids"})
    is_closed = True
    hash_indices_table: Tensor
    num_logits: int

    def __init__(self, config: MoEConfig, table: Tensor) -> None:
        super().__init__()
        if table.dim() != 2 or table.shape[1] != config.top_k or table.is_floating_point():
            raise ValueError(
                f"the hash table must hold ids [vocabulary, {config.top_k}]; "
                f"got {table.dtype} {tuple(table.shape)}"
            )
        self.num_logits = config.num_experts
        if not table.is_meta:
            self._check_ids(table)
        self.renormalize = config.router.renormalize
        self.renormalize_epsilon = config.router.renormalize_epsilon
        self.scaling = config.router.scale_on_weights()
        self.register_buffer("hash_indices_table", table.to(torch.int32))

    def checkpoint_slots(self) -> tuple[RouterSlot, ...]:
        """The table."""
        names = ("hash_indices_table", "tid2eid")
        return (RouterSlot(names, self.hash_indices_table, self._check_ids),)

    def _check_ids(self, table: Tensor) -> None:
        """On the CPU, so that a bad table is an error before it is written anywhere."""
        check_ids("the hash table's ids", table.cpu(), 0, self.num_logits)

    def forward(self, inputs: RouterInputs) -> Routing:
        """router_logits: [T, E]; input_ids: [T] in [0, V), ValueError for others."""
        logits, input_ids = inputs.router_logits, inputs.input_ids
        assert logits is not None
        assert input_ids is not None
        # An index below zero would read the table from its end.
        check_ids("input_ids", input_ids, 0, self.hash_indices_table.shape[0])
        wide = torch.promote_types(logits.dtype, torch.float32)
        ids = self.hash_indices_table[input_ids]
        scores = sqrt_softplus(torch.nan_to_num(logits.to(wide), nan=torch.finfo(wide).min))
        weights = scores.gather(1, ids.long())
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + self.renormalize_epsilon)
        return Routing(weights * self.scaling, ids)
