"""``shard_weights``: the weights of a model become shards, in place, one after the other.

Nothing else of the model changes: its modules, its names, and what it computes.  Each whole
weight is let go as soon as its shard is cut, so at no time is there a second model in memory.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from backstash.errors import ConfigError, LayoutError
from backstash.formats import Usage
from backstash.recipes import Operand, Phase, Recipe, Role, as_recipe
from backstash.tensors import QuantizedTensor
from backstash.weights.bundle import Bundle
from backstash.weights.channel import Channel
from backstash.weights.layout import Layout
from backstash.weights.options import Carrier, Others, ShardOptions
from backstash.weights.peers import PeerMemory
from backstash.weights.protocol import is_distributed_weight
from backstash.weights.sharded import ShardedWeight
from backstash.weights.sharding import Sharding
from backstash.weights.transfer import Member
from backstash.weights.travel import Travel, WeightKind

Filter = Callable[[str, nn.Parameter], bool]


@dataclasses.dataclass(frozen=True)
class _Place:
    """A parameter in the module: by name, and in each submodule that has it."""

    name: str
    owners: tuple[tuple[nn.Module, str], ...]

    @property
    def parameter(self) -> nn.Parameter:
        owner, attribute = self.owners[0]
        return getattr(owner, attribute)

    @property
    def bundle_key(self) -> tuple[Any, ...]:
        """Equal for weights that move together: those told apart by a number at their end."""
        owner, attribute = self.owners[0]
        base = re.sub(r"\d+$", "", attribute)
        p = self.parameter
        return (id(owner), base, p.dtype, p.device) if base != attribute else (self.name,)


def shard_weights(
    module: nn.Module,
    group: Any = None,
    *,
    filter: Filter | None = None,
    gather: Recipe | str = "high_precision",
    prefetch: int = 1,
    options: ShardOptions | None = None,
) -> Sharding:
    """Leave each rank of ``group`` a part of each weight of ``module``, in place.

    Every rank calls it, with the same model; the values are those of the group's first rank.
    Make the optimizer afterwards.

    Args:
        module: Whose forward is the forward of a step, as a rule the whole model.
        group: A process group, a one-dimensional ``DeviceMesh``, or None for all ranks.
        filter: Which parameters, by name and value; default all that the layers of this
            library ask for.  Modules of your own take part where the filter names their
            parameters and they ask with :func:`materialize_weight_for_forward`.
        gather: In what the weights travel: a recipe's format for weights, or a recipe's name.
        prefetch: How many gathers run ahead of the one in use; each holds a whole weight, or
            several small ones that move together (:class:`ShardOptions`).
        options: How weights are cut and gradients reduced.

    Returns:
        The handle with what was sharded, and its counters.

    Raises:
        ConfigError: Nothing to shard, a parameter that its module reads directly, or ranks
            that do not have the same model.
        RecipeError: Weights cannot travel in the recipe's format.
        ShapeError, LayoutError: A parameter that cannot be cut.
    """
    options = options or ShardOptions()
    recipe = as_recipe(gather)
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise ConfigError(f"prefetch is a number of gathers, zero or more, got {prefetch!r}")
    channel = Channel(_process_group(group))
    places = _chosen_places(module, filter)
    bundles = _in_bundles(places)
    members = [[_member(place, recipe, channel, options) for place in b] for b in bundles]
    _check_same_model(channel, members, (prefetch, options))
    sharding = Sharding(channel, prefetch, options)
    channel.peers = _peer_memory(places, members, channel, options)
    replicated = _replicated(module, places, options)
    for parameter in replicated:
        _take_from_first(parameter, channel)
    for index, (of_bundle, its_members) in enumerate(zip(bundles, members, strict=True)):
        bundle = Bundle(index, its_members, channel)
        bundle.attach([_cut(place, i, bundle, sharding) for i, place in enumerate(of_bundle)])
        sharding.bundles.append(bundle)
    sharding.watch(module, replicated)
    return sharding


def _peer_memory(
    places: list[_Place], members: list[list[Member]], channel: Channel, options: ShardOptions
) -> PeerMemory | None:
    """Room for all shards, where the other ranks can read them."""
    devices = {place.parameter.device for place in places}
    if options.carrier is Carrier.COLLECTIVE or channel.size == 1:
        return None
    kinds = [member.kind for bundle in members for member in bundle]
    nbytes = sum(PeerMemory.bytes_for(kind.layout, kind.dtype.itemsize) for kind in kinds)
    # A rank whose weights lie on several devices says so to the others, which ask it.
    device = devices.pop() if len(devices) == 1 else torch.device("cpu")
    return PeerMemory.reserve(channel.group, device, nbytes)


def _replicated(module: nn.Module, places: list[_Place], options: ShardOptions) -> list[Tensor]:
    """What stays whole on every rank, unless somebody else looks after it."""
    if options.others is Others.LEAVE:
        return []
    chosen = {id(place.parameter) for place in places}
    others = (p for p in module.parameters() if not is_distributed_weight(p))
    return [p for p in others if id(p) not in chosen]


def _process_group(group: Any) -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "shard_weights needs a process group and none is there; start the processes with "
            "torchrun and call torch.distributed.init_process_group first"
        )
    if group is None:
        return dist.distributed_c10d._get_default_group()
    if isinstance(group, dist.ProcessGroup):
        return group
    if hasattr(group, "get_group") and getattr(group, "ndim", 0) == 1:
        return group.get_group()
    raise ConfigError(
        f"group must be a process group or a one-dimensional DeviceMesh, got {group!r}; take one "
        'axis of a larger mesh with mesh["name"]'
    )


def _chosen_places(module: nn.Module, filter: Filter | None) -> list[_Place]:
    """The parameters to shard, each once, in the order of the model."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    names: dict[int, str] = {}
    for prefix, owner in module.named_modules():
        for attribute, parameter in owner.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((owner, attribute))
            names.setdefault(id(parameter), f"{prefix}.{attribute}" if prefix else attribute)
    places = [_Place(names[key], tuple(having)) for key, having in owners.items()]
    places = [place for place in places if _is_chosen(place, filter)]
    for place in places:
        _check_parameter(place)
    if not places:
        raise ConfigError(
            f"shard_weights found nothing to shard in {type(module).__name__}: it has no layer of "
            "this library, or its weights are sharded already, or the filter leaves none; use "
            "layers such as backstash.Linear, and shard a model once"
        )
    return places


def _is_chosen(place: _Place, filter: Filter | None) -> bool:
    owner, attribute = place.owners[0]
    asks_for = getattr(owner, "materialized_parameters", None)
    if asks_for is not None and attribute not in asks_for:
        return False
    if filter is None:
        return asks_for is not None and not is_distributed_weight(place.parameter)
    return filter(place.name, place.parameter)


def _check_parameter(place: _Place) -> None:
    parameter = place.parameter
    if is_distributed_weight(parameter):
        raise ConfigError(f"{place.name} is sharded already; shard a model once")
    for owner, _ in place.owners:
        if type(owner).__module__.startswith("torch.nn.") and not _is_container(owner):
            raise ConfigError(
                f"{place.name} belongs to a torch.nn.{type(owner).__name__}, which reads its "
                "weight directly; use the layer of this library, or leave it out with filter="
            )
    if isinstance(parameter.data, QuantizedTensor) or isinstance(parameter, QuantizedTensor):
        raise LayoutError(
            f"{place.name} is kept in low precision and cannot be cut; make the model in high "
            "precision and give shard_weights gather=: the shards then travel quantized"
        )


def _is_container(owner: nn.Module) -> bool:
    return isinstance(owner, nn.ParameterList | nn.ParameterDict)


def _in_bundles(places: list[_Place]) -> list[list[_Place]]:
    bundles: dict[tuple[Any, ...], list[_Place]] = {}
    for place in places:
        bundles.setdefault(place.bundle_key, []).append(place)
    return list(bundles.values())


def _member(place: _Place, recipe: Recipe, channel: Channel, options: ShardOptions) -> Member:
    parameter = place.parameter
    ways = _ways(place, recipe)
    block = max(way.block for way in ways.values())
    split: Any = options.split
    layout = Layout.even(parameter.shape, channel.size, split=split, block=block)
    return Member(place.name, WeightKind(layout, parameter.dtype), ways)


def _ways(place: _Place, recipe: Recipe) -> dict[Usage, Travel]:
    """How the weight travels for each usage: as the recipe reads it in each pass."""
    owner, attribute = place.owners[0]
    linear = attribute.removesuffix("weight").rstrip("_")
    name = ".".join(part for part in (getattr(owner, "name", ""), linear) if part)
    role = Role(Operand.WEIGHT, Phase.FORWARD, type(owner).__name__, name)
    backward = dataclasses.replace(role, phase=Phase.BACKWARD)
    # Where backward reads what forward read, that is what travels again.
    read = Usage.COLUMNWISE if recipe.backward_override is None else Usage.ROWWISE
    return {
        Usage.ROWWISE: Travel(recipe.format(role), Usage.ROWWISE),
        Usage.COLUMNWISE: Travel(recipe.format(backward), read),
    }


def _check_same_model(channel: Channel, members: list[list[Member]], how: tuple[Any, ...]) -> None:
    mine = [(m.name, m.layout.shape, str(m.kind.dtype)) for bundle in members for m in bundle]
    theirs: list[Any] = [None] * channel.size
    hows: list[Any] = [None] * channel.size
    dist.all_gather_object(theirs, mine, group=channel.group)
    dist.all_gather_object(hows, how, group=channel.group)
    for rank, other in enumerate(hows):
        if other != hows[0]:
            raise ConfigError(
                f"every rank must shard with the same prefetch and options, but rank {rank} has "
                f"{other} and rank 0 has {hows[0]}; pass the same on all ranks"
            )
    for rank, other in enumerate(theirs):
        if other != theirs[0]:
            differing = [pair for pair in zip(theirs[0], other, strict=False) if pair[0] != pair[1]]
            raise ConfigError(
                f"every rank must shard the same weights, but rank {rank} has {len(other)} and "
                f"rank 0 has {len(theirs[0])}, the first that differ are {differing[:1]}; make the "
                "same model and pass the same filter on all ranks"
            )


def _take_from_first(parameter: Tensor, channel: Channel) -> None:
    if channel.size == 1 or parameter.is_meta:
        return
    local = getattr(parameter, "to_local", lambda: parameter.data)()
    dist.broadcast(local.detach(), group=channel.group, group_src=0)


def _cut(place: _Place, position: int, bundle: Bundle, sharding: Sharding) -> ShardedWeight:
    """Put this rank's shard where the whole weight was."""
    parameter, layout = place.parameter, bundle.members[position].layout
    _take_from_first(parameter, sharding.channel)
    shard = layout.shard(parameter.detach(), sharding.channel.rank)
    peers = sharding.channel.peers
    shard = shard.clone() if peers is None else peers.place(shard, layout)
    shard.requires_grad_(parameter.requires_grad)
    weight = ShardedWeight.of(shard, position, bundle, sharding)
    for owner, attribute in place.owners:
        setattr(owner, attribute, weight)
        hook = owner.register_load_state_dict_pre_hook(_WholeLoader(attribute))
        # Before the hook with which layers join keys of single experts: it counts shards.
        hooks: Any = owner._load_state_dict_pre_hooks
        hooks.move_to_end(hook.id, last=False)
    return weight


class _WholeLoader:
    """Takes this rank's rows of a state dict that holds whole weights."""

    def __init__(self, attribute: str) -> None:
        self.attribute = attribute

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        weight: Any = getattr(module, self.attribute)
        layout, key = weight.cut, prefix + self.attribute
        keys = [f"{key}{g}" for g in range(layout.groups or 0)]
        if keys and all(k in state for k in keys):
            state[key] = torch.stack([state.pop(k) for k in keys])
        whole = state.get(key)
        if whole is not None and whole.shape == layout.shape:
            state[key] = layout.shard(whole, weight.sharding.channel.rank)
