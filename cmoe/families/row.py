"""What a row of the table of families can say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Attr:
    """A value read from the Hugging Face config, under the given attribute.

    other_name: what other versions of the config call it. default: the value where the config has
        neither, None: that is an error. Where there is one of the two, a null attribute counts as
        one that the config does not have.
    """

    name: str
    other_name: str | None = None
    default: Any = None


@dataclass(frozen=True, slots=True)
class Choice:
    """A value that hangs on the value of another attribute: `values[config.<attribute>]`."""

    attribute: str
    values: Mapping[Any, Any]


def _attributes(value: Any) -> Iterator[Attr]:
    if isinstance(value, Attr):
        yield value
    elif isinstance(value, Choice):
        yield Attr(value.attribute)
        for chosen in value.values.values():
            yield from _attributes(chosen)


@dataclass(frozen=True, kw_only=True, slots=True)
class Modules:
    """Dotted names in the sparse block of transformers.

    gate: the module with the router's weight [E, H] (and bias). correction_bias: the tensor of E
    values that takes part in the choice only. shared_experts: dense experts for every token, under
    the scalar shared_expert_gate. input_transform, output_transform: projections around the routed
    experts. None: the block has none; a module that some configs leave out may be absent.
    """

    gate: str = "gate"
    correction_bias: str | None = None
    shared_experts: str | None = None
    shared_expert_gate: str | None = None
    input_transform: str | None = None
    output_transform: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How the fused expert weights lie.

    transposed: [E, in, out] instead of [E, out, in]; None: both are found, the shape tells.
    interleaved: gate rows alternate with up rows.
    """

    transposed: bool | None = False
    interleaved: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One row of the table.

    model_type: `config.model_type` of the innermost transformers model around the block; block: the
        class of the sparse block in transformers.
    config, router, activation: fields of MoEConfig, RouterConfig, Activation.
    modules: what the block consists of beside its `experts`.
    layout: the fused weights as transformers keeps them; file_layout: as checkpoints have them,
        where that is not the same.
    returns_router_scores: the block returns (hidden_states, scores) instead of hidden_states.
    gated: the experts' first projection has an up part; without one, `_no_mul` is added to the
        activation's name.
    renames: parts of tensor names, (in checkpoints, in the model), where they differ.
    holds_when: attributes of the config, each with the value under which the row is true.
    """

    model_type: str
    block: str
    config: Mapping[str, Any]
    router: Mapping[str, Any]
    activation: Mapping[str, Any] = field(default_factory=lambda: {"name": Attr("hidden_act")})
    modules: Modules = Modules()
    layout: Layout = Layout()
    file_layout: Layout | None = None
    returns_router_scores: bool = False
    gated: bool = True
    renames: tuple[tuple[str, str], ...] = ()
    holds_when: Mapping[str, Any] = field(default_factory=dict)

    def attributes(self) -> Iterator[Attr]:
        """Every attribute of the config that the row may read."""
        for fields in (self.config, self.router, self.activation):
            for value in fields.values():
                yield from _attributes(value)

    def departures(self, hf_config: Mapping[str, Any]) -> Iterator[str]:
        """What the config says that the row is not true for."""
        for name, value in self.holds_when.items():
            actual = hf_config.get(name, value)
            if actual != value:
                yield f"config.{name} is {actual}, a replaced block does what {value} does"

    def runner_names(self) -> tuple[tuple[str, str], ...]:
        """(in the block of transformers, in the block's MoERunner): names, beginnings of names.

        What ends in a dot is a beginning; the first pair that fits a name is its pair.
        """
        modules = self.modules
        w13 = "gate_up_proj" if self.gated else "up_proj"
        pairs = [
            (f"experts.{w13}", "routed_experts.w13_weight"),
            ("experts.down_proj", "routed_experts.w2_weight"),
            (f"experts.{w13}_bias", "routed_experts.w13_bias"),
            ("experts.down_proj_bias", "routed_experts.w2_bias"),
        ]
        if modules.correction_bias is not None:
            pairs.append((modules.correction_bias, "router.e_score_correction_bias"))
        places = {
            "gate.": modules.gate,
            "shared_experts.mlp.": modules.shared_experts,
            "shared_experts.gate.": modules.shared_expert_gate,
            "input_transform.": modules.input_transform,
            "output_transform.": modules.output_transform,
        }
        return (*pairs, *((f"{name}.", place) for place, name in places.items() if name))
