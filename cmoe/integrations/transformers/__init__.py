"""The two ways into a transformers model: its experts switch, the replacement of its blocks."""

from cmoe.integrations.transformers.experts import cmoe_experts_forward, register
from cmoe.integrations.transformers.pretrained import from_pretrained
from cmoe.integrations.transformers.replace import ReplaceReport, replace_moe

__all__ = ["ReplaceReport", "cmoe_experts_forward", "from_pretrained", "register", "replace_moe"]
