"""Try a run's trained parameters on shapes: what no gradient of the loss reaches is not trained, nor are modules of
which peft would not read the published adapter back.

The forward and backward passes of a row run on fake tensors, which have shapes without values. They take seconds for a
model of any size.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from zerolora.compat import bitsandbytes_patches
from zerolora.compat.peft_patches import not_read_back
from zerolora.config.settings import RenderSettings
from zerolora.errors import UserError, shown
from zerolora.log import LOGGER
from zerolora.methods.method import TrainableMethod, is_named
from zerolora.methods.peft_format import PREFIX, adapted_module, read_alike
from zerolora.methods.registry import TRAINABLE
from zerolora.methods.without_gradient import NUMBER, expressions, modules_with
from zerolora.model.architecture import built_on_meta, config_of
from zerolora.model.fake_pass import BY_SHAPES, faked, silent
from zerolora.model.weight_files import few
from zerolora.train.attention import IMPLEMENTATIONS
from zerolora.train.engines.engine import trained
from zerolora.types import Attention
from zerolora.units import counted

TOKENS = 8
"""Of the row."""


def left_out(settings: RenderSettings, attention: Attention, model: Path) -> list[str]:
    """Return regular expressions of the trained modules that no gradient reaches, or of which peft would not read the
    published adapter back, with full fine-tuning of the weights, for a run on the model of directory `model`.

    Raises UserError if these are all modules of a name in the method's targets, or one of modules_to_save.
    """
    bitsandbytes_patches.load()
    method = TRAINABLE[settings.method.name]
    config = config_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # training shows them
        built = built_on_meta(config, IMPLEMENTATIONS.get(attention, attention))
        with torch.device("meta"):
            built = method.build(built, settings.sections)
        lost = _not_read_back(method, built, config)
        names, parameters = without_gradient(built), dict(built.named_parameters())
    section = method.sections[0] if method.sections else ""
    if saved := [name for name in names if ".modules_to_save." in name]:
        raise UserError(
            f"train.{section}.modules_to_save: no gradient reaches {few(saved)}, so that it would not be trained; "
            "leave it out"
        )
    unreached, adapted = names, list(trained(built))
    if method.peft_type:
        unreached, adapted = modules_with(built, (parameters[name] for name in names))
    kind = built.config.model_type
    if other := sorted(lost - {*adapted}):
        raise UserError(f"peft would not read back {few(other)} of the adapter of a {kind}; train with method: full")
    lost -= {*unreached}
    targets = getattr(getattr(settings.sections, section, None), "targets", None)
    for name in targets if isinstance(targets, list) else ():
        named = {path for path in adapted if is_named(path, (name,))}
        if named and named <= {*unreached} | lost:
            raise UserError(
                f"train.{section}.targets: {shown(name)} is in no path to the loss of a {kind}, so that no gradient "
                "would train it; leave it out"
                if named <= set(unreached)
                else f"train.{section}.targets: peft reads the adapter of {few(sorted(named))} of a {kind} under other "
                "names, and would lose it; leave it out"
            )
    if len(unreached) == len(adapted):
        raise UserError(f"no gradient reaches any trained module of a {kind}; train another base model")
    if len(unreached) + len(lost) == len(adapted):
        raise UserError(f"peft would read back no adapter of a {kind}; train with method: full")
    for why, paths in (("no gradient reaches", unreached), ("peft would not read back", sorted(lost))):
        if paths:
            LOGGER.info(
                "%s %d of %s: %s; training leaves them out",
                why,
                len(paths),
                counted(len(adapted), "trained module"),
                few(list(dict.fromkeys(NUMBER.sub("{}", path) for path in paths))),
            )
    return expressions([path for path in adapted if path in lost or path in unreached], adapted)


def _not_read_back(method: type[TrainableMethod], built: Any, config: Any) -> set[str]:
    """Return the paths of the modules of which peft would not read the published adapter back; none for a method
    without an adapter."""
    if not method.peft_type:
        return set()
    published = {name: tensor.detach() for name, tensor in method.published(built, trained(built)).items()}
    return {
        adapted_module(name).removeprefix(PREFIX)
        for name in not_read_back(built_on_meta(config), read_alike(built), published)
    }


def without_gradient(model: Any) -> list[str]:
    """Return the names of the trained parameters of a model on the meta device that no gradient reaches; none if the
    passes need values. Raises UserError if the model cannot compute with its attention."""
    model.set_experts_implementation(BY_SHAPES)
    model.train()
    try:
        # transformers does not read the values of fake tensors to detect packed rows.
        with silent(), FakeTensorMode(), faked(model), _EveryTrue():  # type: ignore[no-untyped-call]
            tokens = torch.zeros((1, TOKENS), dtype=torch.int64)
            model(input_ids=tokens, use_cache=False).logits.float().sum().backward()
            return [name for name, each in model.named_parameters() if each.requires_grad and each.grad is None]
    except UserError:
        raise
    except Exception as error:  # a class may read values, as of its experts' tokens, and raise errors of any type
        LOGGER.debug("on shapes alone, the passes end with %s", error)
        return []


class _EveryTrue(TorchDispatchMode):
    """Lets the number of elements that are not zero, which depends on values, be that of all: which parameters a
    gradient reaches does not depend on it."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if function is torch.ops.aten.nonzero.default:
            (tensor,) = arguments
            return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)
        return function(*arguments, **(named or {}))
