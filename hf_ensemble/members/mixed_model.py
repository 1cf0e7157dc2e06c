"""One model for several members at once, each in its own rows: adapters on one set of weights."""

import copy
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .adapted import active_adapters, base_model, plain_twin, restore_trained, trained_weights, wrapped_modules
from .member_model import MemberModel

_PLAIN = "__base__"
"""The name in `peft` for the model without an adapter."""


class MixedModel(MemberModel):
    """The members' common weights with all their adapters; each row of a batch uses one adapter or none.

    Weights and adapters are the members' tensors. The thread that runs it knows which row uses which adapter, and no
    adapter is ever switched on or off.

    Args:
        members: Members that share their weights and can mix.
    """

    def __init__(self, members: Sequence[MemberModel]):
        self._names = {id(member.model): f"member{n}" for n, member in enumerate(members)}
        self._of_thread = threading.local()
        super().__init__(_mixed(members, self._names, self._of_thread), " + ".join(member.name for member in members))

    def __contains__(self, member: MemberModel) -> bool:
        return id(member.model) in self._names

    def run(self, members: Sequence[MemberModel], counts: Sequence[int], *inputs: Any) -> Tensor:
        """Run it like `forward`, with consecutive rows for each member.

        Args:
            members: The members.
            counts: Number of rows of each.
            *inputs: Arguments of `forward`.
        """
        names = [self._names[id(member.model)] for member in members]
        self._of_thread.names = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
        try:
            return self.forward(*inputs)
        finally:
            self._of_thread.names = None


def _mixed(members: Sequence[MemberModel], names: Mapping[int, str], of_thread: Any) -> Any:
    import peft

    bases = {names[id(member.model)]: base_model(member.model) for member in members}
    model = plain_twin(next(iter(bases.values())))
    flags = trained_weights(model)
    for name, base in bases.items():
        acting = active_adapters(base)
        if not acting:
            continue
        config = copy.deepcopy(base.peft_config[acting[0]])
        config.inference_mode, config.init_lora_weights = True, False
        with torch.random.fork_rng(devices=[]):
            peft.inject_adapter_in_model(config, model, adapter_name=name, low_cpu_mem_usage=True)
        del model.peft_config  # otherwise the next one causes a warning
        _take_weights(model, name, base, acting[0])
    restore_trained(flags)
    for module in wrapped_modules(model).values():
        if isinstance(module, peft.utils.other.AuxiliaryTrainingWrapper):
            # It checks that it knows the active adapter, and then uses the row's.
            module._active_adapter = []
        module.register_forward_pre_hook(_Names(of_thread), with_kwargs=True)
    return model.eval()


def can_mix(member: MemberModel) -> bool:
    """Whether a member can share a batch with others: without an adapter, or with one LoRA other than DoRA."""
    base = base_model(member.model)
    if member.model.training or not getattr(base, "peft_config", None):
        return not member.model.training
    import peft

    configs = [base.peft_config[name] for name in active_adapters(base)]
    is_merged = any(getattr(module, "merged", False) for module in wrapped_modules(base).values())
    is_lora = all(type(config) is peft.LoraConfig and not config.use_dora for config in configs)
    return is_lora and len(configs) < 2 and not is_merged


def _take_weights(model: Any, name: str, base: Any, of_base: str) -> None:
    """Replace the tensors that an adapter was created with by a member's."""
    for key, _ in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        parts = key.split(".")
        if name in parts:
            source: Any = base
            for part in parts:
                source = _child(source, of_base if part == name else part)
            parent = model
            for part in parts[:-1]:
                parent = _child(parent, part)
            held = parent._parameters if parts[-1] in parent._parameters else parent._buffers
            held[parts[-1]] = source


def _child(module: Any, name: str) -> Any:
    own = vars(module)
    return next(own[kind][name] for kind in ("_modules", "_parameters", "_buffers") if name in own[kind])


class _Names:
    """Tells a module with adapters, before it runs, which of them each row uses.

    Args:
        of_thread: Holds the names of this thread's rows.
    """

    def __init__(self, of_thread: Any):
        self._of_thread = of_thread

    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Add the names to the module's arguments."""
        known = getattr(module, "_adapters", None)
        names = [name if known is None or name in known else _PLAIN for name in self._of_thread.names]
        return args, {**kwargs, "adapter_names": names}
