"""Draws of tokens that depend on the seed, the prompt, the answer's number and the position alone.

A token is drawn by a race: token i, of probability p, arrives after E / p, where E is an exponential number of token i
at this position, and the first one is the next token. It is token i with probability p, as in Gumbel's max trick. The
probabilities are those of the logits at the temperature, restricted to the fewest tokens with a sum of top_p (Holtzman
et al. 2019, arXiv 1904.09751).

A race is used, and not the inverse of a distribution function, since rounded logits then change a token only if two
arrive at nearly the same time. In a sum over a vocabulary, the edges of all later tokens move, and rare tokens have
edges as near to each other as rounding errors.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zerolora.errors import UserError

FIRST = 1024
"""Likeliest tokens among which the set of top_p is looked for, before all are sorted."""
GOLDEN = 0x9E3779B9
MIXERS = (16, 0x7FEB352D), (15, 0x846CA68B)
"""Shifts and factors of a hash of 32 bits (Wellons, hash-prospector, lowbias32)."""
LAST_SHIFT = 16
LARGEST = 1 - 2.0**-24
"""Of a uniform number: 1 would be an exponential number without end."""


class Drawn:
    """The draws of answers with the same seed and settings."""

    def __init__(self, seed: int, temperature: float, top_p: float) -> None:
        self.seed, self.temperature, self.top_p = seed, temperature, top_p

    def of(self, answers: Sequence[tuple[bytes, int]]) -> Callable[[list[int], int], Any]:
        """Return the `draw` of answer_batch for a batch of answers: the key of each one's prompt, and its number."""
        begun = [_begun(self.seed, prompt, sample) for prompt, sample in answers]

        def draw(rows: list[int], longest: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
            def process(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
                position = tokens.shape[1] - longest
                return self.raced(logits, [_key(begun[row], position) for row in rows])

            return process

        return draw

    def raced(self, logits: torch.Tensor, keys: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Return how fast each token is: [rows, vocabulary]; the fastest is drawn. `keys` has one for each row."""
        # Of one row at a time on a CPU, whose cache holds it.
        parts = logits.split(1 if logits.device.type == "cpu" else len(logits))
        numbers = torch.tensor(keys, dtype=torch.int64).to(logits.device).split([len(part) for part in parts])
        return torch.cat([self._raced(part, key) for part, key in zip(parts, numbers, strict=True)])

    def _raced(self, logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        logits = logits.float()
        logits = logits - logits.amax(-1, keepdim=True)  # before the division: a small temperature has no overflow
        if bool(logits.isnan().any()):
            raise UserError("the model's logits are not finite; check its weights, or use another precision")
        probabilities = torch.softmax(logits / self.temperature, -1)
        if self.top_p < 1:
            probabilities = _nucleus(probabilities, self.top_p)
        return probabilities.div_(exponential(keys, logits.shape[-1]))


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return probabilities with 0 for those outside the fewest tokens that have a sum of top_p; tokens as likely as the
    last of these are inside too."""
    size = probabilities.shape[-1]
    likeliest = probabilities.topk(min(FIRST, size)).values
    if likeliest.shape[-1] < size and float(likeliest.double().sum(-1).min()) < top_p:
        likeliest = probabilities.sort(descending=True).values
    sums = likeliest.cumsum(-1, dtype=torch.float64)
    count = (sums < top_p).sum(-1, keepdim=True).clamp_(max=likeliest.shape[-1] - 1)
    return probabilities.masked_fill(probabilities < likeliest.gather(-1, count), 0.0)


def exponential(keys: torch.Tensor, size: int) -> torch.Tensor:
    """Return exponential numbers of mean 1 that follow from the keys: [rows, size], of [rows, 2] numbers of 32 bits."""
    hashed: torch.Tensor = torch.arange(size, dtype=torch.int32, device=keys.device).mul_(_signed(GOLDEN))
    first, second = (part.to(torch.int32) for part in keys.split(1, -1))
    hashed = hashed ^ first
    for (shift, factor), key in zip(MIXERS, (second, None), strict=True):
        hashed ^= _shifted(hashed, shift)
        hashed *= _signed(factor)
        if key is not None:
            hashed ^= key
    hashed ^= _shifted(hashed, LAST_SHIFT)
    uniform: torch.Tensor = hashed.to(torch.int64).bitwise_and_(0xFFFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-32)
    return uniform.clamp_(max=LARGEST).neg_().log1p_().neg_()


def _shifted(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right as unsigned numbers."""
    return (numbers >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _begun(seed: int, prompt: bytes, sample: int) -> Any:
    return hashlib.sha256(struct.pack("<Q32sQ", seed, prompt, sample))


def _key(begun: Any, position: int) -> tuple[int, int]:
    """Return two numbers of 32 bits, signed: a hash of all that the draw depends on."""
    of_position = begun.copy()
    of_position.update(struct.pack("<Q", position))
    first, second = struct.unpack("<ii", of_position.digest()[:8])
    return first, second


def seed_of(seed: int, prompt: bytes, sample: int) -> int:
    """Return the seed of a request to another engine: 31 bits, which all of them take."""
    return int.from_bytes(_begun(seed, prompt, sample).digest()[:4], "little") >> 1


def _signed(number: int) -> int:
    return number - (1 << 32) if number >> 31 else number
