"""The step after a load that packs the expert weights of a layer or a model, with its inverse."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from cmoe.custom_ops.packing import is_packed, lay_out, pack
from cmoe.errors import UnsupportedError
from cmoe.quant.unquantized import Unquantized
from cmoe.routed_experts import RoutedExperts


def pack_weights(module: nn.Module) -> None:
    """Packs the weights of every RoutedExperts in the module, for inference on a CPU.

    Outer products, which the kernels then form, pay where experts have several tokens each. A
    packed weight has as many bytes, no second copy is kept; while the call runs there is memory for
    one parameter more. Parameters stay the same objects, with other storage. `state_dict`,
    `load_state_dict`, `load_weights`, files of checkpoints speak the checkpoint's layout as before;
    `state_dict` holds copies of packed weights. Moved or converted to where the kernels read no
    packed weights, a layer is unpacked. Packed layers stay as they are. No call of a layer may be
    running in another thread: it would lose the memory that it reads, as with `module.to`.
    ValueError for a module without RoutedExperts; UnsupportedError, before any change, with the
    reasons of every layer that cannot be packed.
    """
    layers = _layers_of(module)
    refused = {name: why for name, experts in layers.items() if (why := list(_faults_of(experts)))}
    if refused:
        reasons = [f"  {name or 'the layer'} : {'; '.join(why)}" for name, why in refused.items()]
        raise UnsupportedError(
            "\n".join(["these weights cannot be packed (nothing was changed):", *reasons])
        )
    for experts in layers.values():
        for name in _unpacked(experts):
            lay_out(experts.get_parameter(name), pack)


def unpack_weights(module: nn.Module) -> None:
    """Gives the weights of every RoutedExperts in the module the checkpoint's layout again.

    The inverse of pack_weights, exact to the bit, with memory for one parameter more. Layers that
    are not packed stay as they are. No call may be running, see pack_weights. ValueError for a
    module without RoutedExperts; UnsupportedError for a packed weight that a parametrization was
    registered on.
    """
    for experts in _layers_of(module).values():
        experts.unpack_weights()


def _layers_of(module: nn.Module) -> dict[str, RoutedExperts]:
    layers = {name: m for name, m in module.named_modules() if isinstance(m, RoutedExperts)}
    if not layers:
        raise ValueError(
            f"{type(module).__name__} has no RoutedExperts, whose weights could be packed: the "
            "experts switch keeps transformers' own parameters; replace_moe(model) or "
            "from_pretrained(folder) of cmoe.integrations.transformers give a model cmoe's layers"
        )
    return layers


def _faults_of(experts: RoutedExperts) -> Iterator[str]:
    """Why the layer cannot be packed; nothing where it can, or is packed."""
    if not isinstance(experts.quant_method, Unquantized):
        yield f"{type(experts.quant_method).__name__} has a layout of its own"
        return
    if absent := [name for name, w in experts.weights().items() if not isinstance(w, Tensor)]:
        yield f"{', '.join(absent)}: set to something that is no tensor"
        return
    unpacked, config = _unpacked(experts), experts.config
    if not unpacked:
        return
    created = experts.quant_method.create_weights(config, experts.placement.num_local_experts())
    for name, weight in unpacked.items():
        found = (tuple(weight.shape), weight.dtype)
        if found != (expected := (created[name][0], experts.activation_dtype())):
            yield f"{name} is {found[0]} {found[1]}, not {expected[0]} {expected[1]}"
    own = dict(experts.named_parameters(recurse=False))
    if computed := [name for name in unpacked if name not in own]:
        yield f"{', '.join(computed)}: computed by a parametrization; remove it first"
    if trained := [name for name, w in unpacked.items() if w.requires_grad or w.grad is not None]:
        yield (
            f"{', '.join(trained)}: with gradients, while packed weights are for inference; "
            "requires_grad_(False) and zero_grad() first"
        )
    logical = (config.hidden_size, config.intermediate_size)
    padded = (config.padded_hidden_size(), config.padded_intermediate_size())
    if logical != padded:
        yield f"sizes {logical} are padded to {padded}; packed weights have no padding"
    if any(weight.is_meta for weight in unpacked.values()):
        yield "on the meta device, without values; load them first"
    else:
        yield from experts.refuses_packed()


def _unpacked(experts: RoutedExperts) -> dict[str, Tensor]:
    """The weights that are not packed yet, by name."""
    weights = experts.weights().items()
    return {name: w for name, w in weights if name.endswith("_weight") and not is_packed(w)}
