"""Before the first step on packed rows: prove on the model itself that the rows of a packed row do not see each other.

Whether they do depends on the architecture and on the implementation of attention, and nothing fails if they do: the
loss is only a little wrong. So it is tried, not looked up.
"""

from typing import Any

import torch

from zerolora.errors import UserError

LENGTHS = (7, 9)
# Allowed difference of logits, as a share of the largest logit. Other tokens in a row that is not seen change nothing
# at all; a row alone is computed in other shapes, which rounds differently.
UNSEEN = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-3}
ALONE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def check_isolation(model: Any, config: Any, device: torch.device) -> None:
    """Raise UserError if a row of a packed row sees another one, or has not the logits that it has alone.

    `model` is called as training calls it (the engine, at any ZeRO stage); `config` is that of the base model.
    Collective: every rank makes the same four forward passes. Leaves training mode and random state as they were.
    """
    draw = torch.Generator().manual_seed(0)
    one, other, two = (
        torch.randint(config.get_text_config().vocab_size, (length,), generator=draw)
        for length in (LENGTHS[0], *LENGTHS)
    )
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            packed = _logits(model, config, [one, two], device)
            changed_first = _logits(model, config, [other, two], device)
            changed_second = _logits(model, config, [one, two.flip(0)], device)
            alone = _logits(model, config, [two], device)
    finally:
        model.train(training)
    first, second = packed.split(LENGTHS)
    largest = packed.abs().max()
    for seen, expected, allowed in (
        (changed_first[LENGTHS[0] :], second, UNSEEN),
        (changed_second[: LENGTHS[0]], first, UNSEEN),
        (alone, second, ALONE),
    ):
        difference = ((seen - expected).abs().max() / largest).item()
        if not difference <= allowed[packed.dtype]:
            raise UserError(
                f"pack.packing is on, but the rows of a packed row see each other in {_name(config)}: logits differ by "
                f"{difference:.1%} of the largest from what a row has by itself; write packing: off"
            )


def _logits(model: Any, config: Any, rows: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    try:
        output = model(
            input_ids=torch.cat(rows)[None].to(device),
            position_ids=torch.cat([torch.arange(len(row)) for row in rows])[None].to(device),
            use_cache=False,
        )
    except TypeError as error:
        if "position_ids" not in str(error):
            raise
        raise UserError(
            f"pack.packing is on, but {_name(config)} takes no positions, which keep packed rows apart; "
            "write packing: off"
        ) from None
    return output.logits[0]


def _name(config: Any) -> str:
    return f"the {config.model_type} model with {config._attn_implementation} attention"
