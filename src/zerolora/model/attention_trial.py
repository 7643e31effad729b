"""Whether a model can compute with an attention of this project, which gets rows without a mask: tried on its class.

Passes on fake tensors, which have shapes without values, show where the class's masks go: every one is to reach the
attention that transformers lets replace, untouched, and to be causal, with the window that the attention is told. What
a class does only in rows longer than a number of its config, such as the tokens that an indexer chooses, shows in a row
that is longer than all of these. One layer of each kind shows what all layers do.
"""

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import AttentionInterface, AttentionMaskInterface

from zerolora.log import LOGGER
from zerolora.model.architecture import built_on_meta, model_class
from zerolora.model.fake_pass import BY_SHAPES, faked, silent, tensors_in
from zerolora.model.layer_kinds import keep_one_of_each_kind, stack_of

NAME = "tried"
TOKENS = 256
"""Of a row: more than the window or the block of a tiny model; a class may compute token by token."""
FEWER = 128
"""Of the row without masks."""
MORE = 1.25
"""Operations of a pass on the longest row, over those on FEWER tokens: a class with more computes in steps, token by
token or in chunks; it is tried on TOKENS instead."""
FARTHEST = 2**17
"""Tokens over which a mask is looked at."""
QUERIES = 64
"""How many of them see what their mask says."""
KNOWN = ("position_ids", "s_aux", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k")
"""Tensors for an attention that change no score of a row, or that this project's attention takes."""
BUILT_IN, UNDECIDED = "has its attention built in", "cannot be tried with attention without a mask"
UNTOLD = "does not tell its attention the window of its mask"
FULL = 0
"""The window of a causal mask without one."""


def why_not(config: Any, believed: bool = False) -> str | None:
    """Return why a model cannot compute with this project's attention, as in "needs a mask for its attention"; None if
    it can, or if its class says so and a trial shows no window that it would lose. `believed`: without that trial."""
    model = model_class(config)
    declared = model._supports_attention_backend and model._supports_flash_attn
    if declared and believed:
        return None
    key = f"{model.__name__} {config.to_json_string(use_diff=False)}"
    if key not in _KNOWN:
        _KNOWN[key] = tried(config)
    return None if declared and _KNOWN[key] != UNTOLD else _KNOWN[key]


def tried(config: Any) -> str | None:
    """Return `why_not` of passes, whatever the class declares."""
    result = _tried(config, whole=False)
    return _tried(config, whole=True) if result == UNDECIDED else result


def _tried(config: Any, whole: bool) -> str | None:
    """Return `why_not` of passes of one layer of each kind or, if `whole`, of all layers, which some classes need."""
    try:
        model = built_on_meta(copy.deepcopy(config), NAME)
    except (KeyError, ValueError):  # of classes that have their own attention by name
        return BUILT_IN
    if not whole and (path := stack_of(model)):
        keep_one_of_each_kind(model, path)
    model.set_experts_implementation(BY_SHAPES)
    model.eval()
    unmasked, operations = _fault(model, False, FEWER)
    longer = beyond(config) if operations else TOKENS
    try:
        masked, _ = _fault(model, True, longer, round(MORE * operations))
    except _InStepsError:
        masked, _ = _fault(model, True, TOKENS)
    return masked or unmasked


def _fault(model: Any, masked: bool, tokens: int, most: int = 0) -> tuple[str | None, int]:
    """Return what a pass on a row shows, as `why_not`, and its number of operations, 0 if it does not end. Raises
    _InStepsError if they are more than `most`, unless that is 0."""
    _TRIAL.begin(masked)
    watch = _Watch(most)
    try:
        with silent(), FakeTensorMode(), torch.no_grad(), faked(model), watch:
            row = torch.zeros((1, tokens), dtype=torch.int64)
            # Without a mask of padding transformers would look for packed rows, whose mask depends on values.
            model(input_ids=row, attention_mask=torch.ones_like(row), use_cache=False)
    except _InStepsError:
        if _TRIAL.fault:
            return _TRIAL.fault, 0
        raise
    except Exception as error:  # a class may read values, and raise errors of any type
        LOGGER.debug("on shapes alone, the pass ends with %s", error)
        return _TRIAL.fault or UNDECIDED, 0
    return _TRIAL.fault or (None if _TRIAL.calls else BUILT_IN), watch.operations


def beyond(config: Any) -> int:
    """Return one more than the largest number in a config that may be a length: one that is less than the longest row,
    whatever it is. At least TOKENS."""
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or FARTHEST
    return max([TOKENS, *(number + 1 for number in _integers(text.to_dict()) if number < longest)])


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _integers(each)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


class _InStepsError(Exception):
    """Ends a pass of too many operations."""


class _Trial:
    """What a pass shows. The functions that transformers calls have no other way to tell."""

    def begin(self, masked: bool) -> None:
        """Begin a pass whose masks are tensors, if `masked`, or None."""
        self.masked = masked
        self.windows: dict[int, int | None] = {}
        """The window of each mask, by the tensor's id; None if it is not one of positions alone."""
        self.masks: list[torch.Tensor] = []
        self.calls = 0
        self.fault: str | None = None

    def mask(
        self, batch_size: int, q_length: int, kv_length: int, mask_function: Callable[..., Any], **_: Any
    ) -> torch.Tensor | None:
        """Return a mask that is known again."""
        with _disable_current_modes():
            window = _window(mask_function)
        if window is None:
            self._end("needs a mask for its attention")
        if not self.masked:
            return None
        mask = torch.zeros((batch_size, 1, q_length, kv_length), dtype=torch.bool)
        self.masks.append(mask)  # so that no other tensor gets its id
        self.windows[id(mask)] = window
        return mask

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return values of the attention's shape; this project's computes with all arguments that are named here."""
        self.calls += 1
        if name := unknown(module, others):
            self._end(f"gives its attention {name}")
        if attention_mask is None:
            causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
            if self.masked and not causal:
                self._end("attends ahead")
        elif id(attention_mask) not in self.windows:
            self._end("changes the mask of its attention")
        elif key.shape[2] != query.shape[2]:
            self._end("gives its attention other keys than its tokens'")
        else:
            told = sliding_window if sliding_window and sliding_window < FARTHEST else FULL
            if self.windows[id(attention_mask)] not in (None, told):
                self.fault = UNTOLD  # before all others, as no class's word stands against it
        return value.new_zeros((query.shape[0], query.shape[2], query.shape[1], value.shape[3])), None

    def used(self) -> None:
        """Note an operation on a mask."""
        self._end("computes with the mask of its attention")

    def _end(self, fault: str) -> None:
        self.fault = self.fault or fault


def unknown(module: Any, named: Mapping[str, Any]) -> str | None:
    """Return the name of an argument, for the attention of a module, that changes its scores in a way of its own; None
    without one: a tensor that is not KNOWN, or a number that the class's own attention has an argument for."""
    return next(
        (
            name
            for name, value in named.items()
            if name not in KNOWN
            and (
                isinstance(value, torch.Tensor)
                or (type(value) in (int, float) and _own(module.__class__).get(name, value) != value)
            )
        ),
        None,
    )


@functools.cache
def _own(kind: type) -> Mapping[str, Any]:
    """Return the arguments of the attention that a class of modules computes without another's, with the defaults under
    which they change nothing. It ignores all others."""
    places = [sys.modules[each.__module__] for each in kind.__mro__ if each.__module__ in sys.modules]
    functions = (getattr(place, "eager_attention_forward", None) for place in places)
    function = next((each for each in functions if each is not None), None)
    if function is None:
        return _Every()
    return {name: each.default for name, each in inspect.signature(function).parameters.items()}


class _Every(dict[str, Any]):
    """The arguments of an attention that cannot be read: any may change scores."""

    def get(self, key: str, default: Any = None) -> Any:
        return None


class _Watch(TorchDispatchMode):
    """Notes operations on masks, and counts all."""

    def __init__(self, most: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.most, self.operations = most, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in a trial

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if any(id(each) in _TRIAL.windows for each in tensors_in((arguments, named))):
            _TRIAL.used()
        self.operations += 1
        if self.most and self.operations > self.most:
            raise _InStepsError
        return function(*arguments, **(named or {}))


def _window(function: Callable[..., Any]) -> int | None:
    """Return the window of a mask: how many tokens each query sees, itself the last; FULL if all. None if it is not
    such a mask, or not one of positions alone."""
    queries = torch.tensor(sorted({round(FARTHEST ** (number / QUERIES)) - 1 for number in range(1, QUERIES + 1)}))
    keys = torch.arange(FARTHEST)
    try:
        seen = function(torch.tensor(0), torch.tensor(0), queries[:, None], keys[None])
    except Exception:  # it reads tensors of the pass, such as images' positions
        return None
    seen = torch.as_tensor(seen).expand(len(queries), FARTHEST)
    count, last = seen.sum(1), queries + 1
    window = int(count.max())
    near = (keys[None] <= queries[:, None]) & (keys[None] > (queries - window)[:, None])
    if not torch.equal(seen, near):
        return None
    return FULL if torch.equal(count, last) else window


_KNOWN: dict[str, str | None] = {}
_TRIAL = _Trial()
AttentionInterface.register(NAME, _TRIAL.attend)
AttentionMaskInterface.register(NAME, _TRIAL.mask)
