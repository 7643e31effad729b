"""Watching over ranks while they train: a hang ends the job soon, with who is where; a slow rank is named.

Ranks wait for each other in collectives, so one that stands still stops all in silence. Each therefore has a thread
that tells rank 0 by UDP, beside the collectives, where it is; rank 0 answers with where it is itself. A rank that is
not heard of any more (stopped, cut off, its node gone), and ranks that are heard of and do not go on, are told on
stderr and then end, so that the job fails and can go on elsewhere. What the main thread pays is a note at each turn.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from zerolora.errors import UserError
from zerolora.train.telemetry.stragglers import Pace, StragglerDetector

VARIABLE = "ZEROLORA_PATIENCE"
PATIENCE = 180.0  # seconds without a sign of life; file servers that change over take one or two minutes
SAID = 1 / 3  # of the time until the end, after which it is said what is wrong
MEETING = 3  # times the patience: Python and its modules come from file servers at unlike speed
LOADING = 1800.0  # seconds, while a model of any size is read or written; as PATIENCE in meeting.py
STEPS = 10  # times as long as the longest turn of a step so far
BEATS = 30  # signs of life in the time that counts as silence
LONGEST_BEAT = 2.0  # seconds
DATAGRAM = 4096  # bytes, more than a sign of life has
Address = Any  # as the socket module gives it, for IPv4 or IPv6


@dataclass
class Sign:
    """What a rank tells: where it is, and how often and how fast it came there."""

    rank: int
    host: str
    place: str
    kind: str
    """meeting, loading or step: how long it may take."""
    turns: int
    """How often the place has changed."""
    longest: float
    """Seconds of the longest turn of a step."""
    steps: int
    seconds: float
    """Seconds of `steps` steps that the rank spent by itself (pace.py)."""

    @property
    def name(self) -> str:
        """Return the rank and its host."""
        return f"rank {self.rank} on {self.host}"


@dataclass
class Known:
    """What is known of a rank: its last sign, when it came, and when its place last changed."""

    sign: Sign
    heard: float
    moved: float


class Heartbeat:
    """This rank's place, told to rank 0, and what it hears of others. `at` is all that training calls on its way.

    Raises UserError if ZEROLORA_PATIENCE is no number of seconds.
    """

    def __init__(self) -> None:
        self.patience = _patience()
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.own = Sign(self.rank, socket.gethostname(), "start-up", "meeting", 0, 0.0, 0, 0.0)
        self._pace: Pace | None = None
        self._step = 0
        self._since = time.monotonic()
        self.closed = False
        """Whether nothing is watched any more."""
        if self.world > 1:
            threading.Thread(target=_Thread(self).run, daemon=True).start()

    def follow(self, model: Any, device: torch.device) -> None:
        """Compare how fast the ranks compute. `model` is as the engine left it."""
        if self.world > 1:
            self._pace = Pace(model, device)

    def step(self, number: int, part: str) -> None:
        """Note that this rank is in a part of a step."""
        if number != self._step:
            if self._step and self._pace:
                self.own.seconds += self._pace.taken()
                self.own.steps += 1
            self._step = number
        self.at(f"step {number}, {part}", "step")

    def at(self, place: str, kind: str = "loading") -> None:
        """Note where this rank is: in something that takes about as long as a step, or may take as long as loading."""
        now, own = time.monotonic(), self.own
        if own.kind == kind == "step":
            own.longest = max(own.longest, now - self._since)
        self._since = now
        own.place, own.kind = place, kind
        own.turns += 1

    def close(self) -> None:
        """Watch no more: ranks go their own ways."""
        self.closed = True


class _Thread:
    """What runs beside training. Time is counted only while this rank itself is awake: a job that is suspended as a
    whole, or a laptop that sleeps, is no hang."""

    def __init__(self, watch: Heartbeat) -> None:
        self.watch, self.own, self.patience = watch, watch.own, watch.patience
        self.beat = min(LONGEST_BEAT, self.patience / BEATS)
        self.others: dict[int, Known] = {}
        self.paces = StragglerDetector()
        self.said: str | None = None
        self.now = self._moved = 0.0
        self._turns = 0

    def run(self) -> None:
        """Tell and hear, and judge what was heard, until training ends."""
        try:
            self._connect()
        except OSError as error:
            print(f"{self.own.name} is not watched: no UDP to its first rank ({error})", file=sys.stderr)
            return
        last = time.monotonic()
        while not self.watch.closed:
            if self.own.rank:
                self._send(self.first)
            self._hear(time.monotonic() + self.beat)
            now = time.monotonic()
            self.now, last = self.now + min(now - last, 3 * self.beat), now
            if self.own.turns != self._turns:
                self._turns, self._moved = self.own.turns, self.now
            self._judge()
            if not self.own.rank and len(self.others) == self.watch.world - 1:
                for line in self.paces.judge(self.now, [self.own, *(known.sign for known in self.others.values())]):
                    print(line, file=sys.stderr, flush=True)

    def _connect(self) -> None:
        # The port's number of TCP is taken by torch's store; that of UDP is free.
        where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        family, kind, _, _, address = socket.getaddrinfo(*where, type=socket.SOCK_DGRAM)[0]
        self.first: Address = address
        self.socket = socket.socket(family, kind)
        if not self.own.rank:
            # Of several addresses of a node others may know another one; but one machine's ranks are its own affair.
            self.socket.bind((where[0] if where[0].startswith("127.") else "", where[1]))

    def _send(self, address: Address) -> None:
        try:
            self.socket.sendto(json.dumps(vars(self.own)).encode(), address)
        except OSError:  # no route, for now: it counts as silence on the other side
            return

    def _hear(self, until: float) -> None:
        while (left := until - time.monotonic()) > 0:
            self.socket.settimeout(left)
            try:
                text, sender = self.socket.recvfrom(DATAGRAM)
                sign = Sign(**json.loads(text))
            except TimeoutError:
                return
            except (OSError, ValueError, TypeError):  # refused while rank 0 does not listen yet; or not ours
                time.sleep(min(left, self.beat / 10))
                continue
            if sign.rank not in range(self.watch.world):
                continue
            if not self.own.rank:
                self._send(sender)
            known = self.others.get(sign.rank)
            moved = known.moved if known and known.sign.turns == sign.turns else self.now
            self.others[sign.rank] = Known(sign, self.now, moved)

    def _judge(self) -> None:
        """Say what hangs once, and end this rank if it goes on hanging."""
        fault = self._silence() or self._standstill()
        if not fault:
            self.said = None
            return
        text, seconds, limit = fault
        if seconds > limit:
            self._end(f"{text} for {seconds:.0f} s{self._rest()}")
        if seconds > limit * SAID and self.said != text:
            self.said = text
            print(
                f"{text} for {seconds:.0f} s{self._rest()}; training ends in {limit - seconds:.0f} s if that goes on",
                file=sys.stderr,
                flush=True,
            )

    def _silence(self) -> tuple[str, float, float] | None:
        """Return who has not been heard of for how long, if that is remarkable."""
        silent = [known for known in self.others.values() if self.now - known.heard > self.patience * SAID]
        if not silent:
            return None
        longest = min(silent, key=lambda known: known.heard)
        text = f"{longest.sign.name}, last in {longest.sign.place}, has not been heard of"
        return text, self.now - longest.heard, self.patience

    def _standstill(self) -> tuple[str, float, float] | None:
        """Return for how long no rank has gone on. Rank 0 knows; until they have met each rank looks to itself."""
        if self.own.rank and self.own.kind != "meeting":
            return None
        signs = [self.own, *(known.sign for known in self.others.values())]
        moved = max([self._moved, *(known.moved for known in self.others.values())])
        kinds = {sign.kind for sign in signs}
        if self.own.kind == "meeting":
            return f"{self.own.name} waits for {self._missing()}", self.now - moved, MEETING * self.patience
        longest = max(sign.longest for sign in signs)
        usual = max(self.patience, STEPS * longest) if kinds == {"step"} and longest else LOADING
        limit = min(usual, LOADING)  # collectives themselves wait no longer
        return f"{self._first_place()} hangs: no rank has gone on", self.now - moved, limit

    def _missing(self) -> str:
        """Return whom this rank should have heard of by now."""
        expected = set(range(1, self.watch.world)) if not self.own.rank else {0}
        missing = sorted(expected - self.others.keys())
        ranks = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
        return f"{ranks} to come to {os.environ['MASTER_ADDR']}" if missing else "the others"

    def _first_place(self) -> str:
        """Return the place of the rank that is the furthest back."""
        signs = [self.own, *(known.sign for known in self.others.values())]
        return min(signs, key=lambda sign: sign.turns).place

    def _rest(self) -> str:
        """Return where the ranks are that are heard of."""
        heard = [known.sign for known in self.others.values() if self.now - known.heard <= self.patience * SAID]
        return "".join(f"; {text}" for text in _by_place(sorted([self.own, *heard], key=lambda sign: sign.rank)))

    def _end(self, message: str) -> NoReturn:
        # The main thread is in a collective that does not end; the launcher ends the other ranks.
        print(f"zerolora train: {message}; run the same command to go on from its checkpoint", file=sys.stderr)
        sys.stderr.flush()
        os._exit(2)


def _by_place(signs: Iterable[Sign]) -> list[str]:
    """Return the places that ranks are in, each with who is there."""
    there: dict[str, list[Sign]] = {}
    for sign in signs:
        there.setdefault(sign.place, []).append(sign)
    return [
        f"{found[0].name} is in {place}"
        if len(found) == 1
        else f"ranks {', '.join(str(sign.rank) for sign in found)} are in {place}"
        for place, found in there.items()
    ]


def _patience() -> float:
    text = os.environ.get(VARIABLE, str(PATIENCE))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise UserError(f"{VARIABLE} is {text!r}; write seconds, as in {PATIENCE:.0f}")
    return seconds
