"""Detection of ranks that hang, and the channel that reports slow ranks.

Ranks wait for each other in collectives, so one that stands still stops all of them without a message. A thread of each
rank therefore sends its status to rank 0 by UDP, outside the collectives, and rank 0 answers with its own. When a rank
is silent (stopped, cut off, its node lost), or all ranks answer but none makes progress, the ranks report who is where
on stderr and then exit, so that the job fails and can be resumed elsewhere. The main thread only updates its status.

A datagram is an HMAC-SHA256 of its JSON under the launch's token (topology.py), and the JSON. Datagrams without the
token, of another form, from a rank that does not exist or is the receiver, or not newer than the last are ignored.
"""

import hashlib
import hmac
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zerolora.errors import UserError, printable
from zerolora.log import LOGGER
from zerolora.train.launch.topology import TOKEN
from zerolora.train.telemetry.stragglers import ForwardTimer, StragglerDetector

VARIABLE = "ZEROLORA_PATIENCE"
SILENCE_SECONDS = 180.0  # until a silent rank ends training; a file server's failover takes one or two minutes
WARNING = 1 / 3  # of the time limit, after which the fault is reported
START_UP = 3  # times the patience: ranks import Python modules from file servers at different speeds
LOADING_SECONDS = 1800.0  # while a model of any size is read or written; as TIMEOUT in rendezvous.py
STEPS = 10  # times as long as the longest part of a step so far
BEATS = 30  # datagrams in the time that counts as silence
LONGEST_BEAT = 2.0  # seconds
DATAGRAM = 4096  # bytes, more than any status takes
DIGEST = hashlib.sha256().digest_size
Address = Any  # as the socket module gives it, for IPv4 or IPv6
Count = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=256)]


class Status(BaseModel):
    """What a rank reports: where it is, and how far and how fast it came there."""

    model_config = ConfigDict(strict=True, extra="forbid")

    rank: Count
    host: Text
    part: Text
    """The part of training that the rank is in, as in "step 3, backward"."""
    kind: Literal["start-up", "loading", "step"]
    """What limits the time of that part."""
    sent: Count = 0
    """Datagrams sent before; it tells a new datagram from an old one that is sent again."""
    turns: Count = 0
    """How often the part has changed."""
    longest: Seconds = 0.0
    """Seconds of the longest part of a step."""
    steps: Count = 0
    seconds: Seconds = 0.0
    """Forward seconds of `steps` steps that the rank spent computing (stragglers.py)."""

    @property
    def name(self) -> str:
        """Return the rank and its host, printable."""
        return f"rank {self.rank} on {printable(self.host)}"

    @property
    def where(self) -> str:
        """Return the part, printable."""
        return printable(self.part)


@dataclass
class Peer:
    """What is known of another rank: its last status, when it came, and when its part last changed."""

    status: Status
    heard: float
    moved: float


class Heartbeat:
    """This rank's status, sent to rank 0, and what it hears of others. Training only calls `at` and `step`.

    Raises UserError if ZEROLORA_PATIENCE is not a number of seconds.
    """

    def __init__(self) -> None:
        self.patience = _patience()
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.own = Status(rank=self.rank, host=socket.gethostname(), part="start-up", kind="start-up")
        self._timer: ForwardTimer | None = None
        self._step = 0
        self._since = time.monotonic()
        self.closed = False
        """Whether the rank reports and checks nothing any more."""
        token = os.environ.get(TOKEN, "")
        if self.world > 1 and not token:
            if self.rank == 0:
                LOGGER.warning(
                    f"ranks that hang are not detected: {TOKEN} is not set; before srun or mpirun write "
                    f"export {TOKEN}=$(openssl rand -hex 16)"
                )
        elif self.world > 1:
            threading.Thread(target=_Thread(self, token).run, daemon=True).start()

    def follow(self, model: Any, device: torch.device) -> None:
        """Time this rank's forward passes, to compare ranks. `model` is as the engine left it."""
        if self.world > 1:
            self._timer = ForwardTimer(model, device)

    def step(self, number: int, part: str) -> None:
        """Note that this rank is in a part of a step."""
        if number != self._step:
            if self._step and self._timer:
                self.own.seconds += self._timer.taken()
                self.own.steps += 1
            self._step = number
        self.at(f"step {number}, {part}", "step")

    def at(self, part: str, kind: Literal["loading", "step"] = "loading") -> None:
        """Note what this rank does now: something as long as a step, or something that may take as long as loading."""
        now, own = time.monotonic(), self.own
        if own.kind == kind == "step":
            own.longest = max(own.longest, now - self._since)
        self._since = now
        own.part, own.kind = part, kind
        own.turns += 1

    def close(self) -> None:
        """Stop reporting and checking: from here on ranks end independently."""
        self.closed = True


class _Thread:
    """The thread beside training. Time counts only while this rank itself runs: a job that is suspended as a whole, or
    a laptop that sleeps, does not hang."""

    def __init__(self, heartbeat: Heartbeat, token: str) -> None:
        self.heartbeat, self.own, self.patience = heartbeat, heartbeat.own, heartbeat.patience
        self.key = token.encode()
        self.beat = min(LONGEST_BEAT, self.patience / BEATS)
        self.others: dict[int, Peer] = {}
        self.stragglers = StragglerDetector()
        self.reported: str | None = None
        self.now = self._moved = 0.0
        self._turns = 0

    def run(self) -> None:
        """Send, receive and judge, until training ends."""
        try:
            self._connect()
        except OSError as error:
            LOGGER.warning(f"{self.own.name} sends no heartbeat: no UDP to rank 0 ({error})")
            return
        last = time.monotonic()
        while not self.heartbeat.closed:
            if self.own.rank:
                self._send(self.first)
            self._receive(time.monotonic() + self.beat)
            now = time.monotonic()
            self.now, last = self.now + min(now - last, 3 * self.beat), now
            if self.own.turns != self._turns:
                self._turns, self._moved = self.own.turns, self.now
            self._judge()
            if not self.own.rank and len(self.others) == self.heartbeat.world - 1:
                for line in self.stragglers.judge(
                    self.now, [self.own, *(peer.status for peer in self.others.values())]
                ):
                    LOGGER.warning(line)

    def _connect(self) -> None:
        # torch's store has the TCP port of this number; the UDP port is free.
        where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        family, kind, _, _, address = socket.getaddrinfo(*where, type=socket.SOCK_DGRAM)[0]
        self.first: Address = address
        self.socket = socket.socket(family, kind)
        local = where[0].startswith("127.") or where[0] in ("localhost", "::1")
        if not self.own.rank:
            # Other nodes may know this one by another of its addresses than the one that its name has here.
            self.socket.bind(address if local else ("", where[1]))
        elif local:
            self.socket.connect(address)
        else:
            # Not connected: rank 0 may answer from another of its addresses.
            with socket.socket(family, kind) as route:
                route.connect(address)
                self.socket.bind((route.getsockname()[0], 0))

    def _send(self, address: Address) -> None:
        self.own.sent += 1
        text = self.own.model_dump_json().encode()
        try:
            self.socket.sendto(_digest(self.key, text) + text, address)
        except OSError:  # no route at the moment: the receiver counts it as silence
            return

    def _receive(self, until: float) -> None:
        while (left := until - time.monotonic()) > 0:
            self.socket.settimeout(left)
            try:
                datagram, sender = self.socket.recvfrom(DATAGRAM)
            except TimeoutError:
                return
            except OSError:  # refused, as rank 0 does not listen yet
                time.sleep(min(left, self.beat / 10))
                continue
            if self._take(datagram) and not self.own.rank:
                self._send(sender)

    def _take(self, datagram: bytes) -> bool:
        """Note a datagram's status. Return False if it is not of this launch, or is old."""
        digest, text = datagram[:DIGEST], datagram[DIGEST:]
        if not hmac.compare_digest(digest, _digest(self.key, text)):
            return False
        try:
            status = Status.model_validate_json(text)
        except ValidationError:
            return False
        known = self.others.get(status.rank)
        expected = range(1, self.heartbeat.world) if not self.own.rank else (0,)
        if status.rank not in expected or (known and status.sent <= known.status.sent):
            return False
        moved = known.moved if known and known.status.turns == status.turns else self.now
        self.others[status.rank] = Peer(status, self.now, moved)
        return True

    def _judge(self) -> None:
        """Report a hang once, and end this rank if it lasts."""
        fault = self._silence() or self._standstill()
        if not fault:
            self.reported = None
            return
        text, seconds, limit = fault
        if seconds > limit:
            self._end(f"{text} for {seconds:.0f} s{self._rest()}")
        if seconds > limit * WARNING and self.reported != text:
            self.reported = text
            LOGGER.warning(
                f"{text} for {seconds:.0f} s{self._rest()}; training ends in {limit - seconds:.0f} s unless it recovers"
            )

    def _silence(self) -> tuple[str, float, float] | None:
        """Return which rank has been silent for how long and the limit, if it is longer than usual."""
        silent = [peer for peer in self.others.values() if self.now - peer.heard > self.patience * WARNING]
        if not silent:
            return None
        longest = min(silent, key=lambda peer: peer.heard)
        text = f"{longest.status.name}, last in {longest.status.where}, has not responded"
        return text, self.now - longest.heard, self.patience

    def _standstill(self) -> tuple[str, float, float] | None:
        """Return for how long no rank has made progress, and the limit. Rank 0 judges that; during start-up each rank
        does."""
        if self.own.rank and self.own.kind != "start-up":
            return None
        statuses = [self.own, *(peer.status for peer in self.others.values())]
        moved = max([self._moved, *(peer.moved for peer in self.others.values())])
        kinds = {status.kind for status in statuses}
        if self.own.kind == "start-up":
            return f"{self.own.name} waits for {self._missing()}", self.now - moved, START_UP * self.patience
        longest = max(status.longest for status in statuses)
        usual = max(self.patience, STEPS * longest) if kinds == {"step"} and longest else LOADING_SECONDS
        limit = min(usual, LOADING_SECONDS)  # collectives themselves wait no longer
        return f"{self._furthest_back()} hangs: no rank has gone on", self.now - moved, limit

    def _missing(self) -> str:
        """Return which ranks this one should have heard of by now."""
        expected = set(range(1, self.heartbeat.world)) if not self.own.rank else {0}
        missing = sorted(expected - self.others.keys())
        ranks = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
        return f"{ranks} to come to {os.environ['MASTER_ADDR']}" if missing else "the others"

    def _furthest_back(self) -> str:
        """Return the part that the rank with the least progress is in."""
        statuses = [self.own, *(peer.status for peer in self.others.values())]
        return min(statuses, key=lambda status: status.turns).where

    def _rest(self) -> str:
        """Return where the ranks are that still answer."""
        heard = [peer.status for peer in self.others.values() if self.now - peer.heard <= self.patience * WARNING]
        return "".join(f"; {text}" for text in _by_part(sorted([self.own, *heard], key=lambda status: status.rank)))

    def _end(self, message: str) -> NoReturn:
        # The main thread is in a collective that does not return; the launcher ends the other ranks.
        LOGGER.error(f"{message}; run the same command to go on from its checkpoint")
        sys.stderr.flush()
        os._exit(2)


def _by_part(statuses: Iterable[Status]) -> list[str]:
    """Return a text for each part that ranks are in, naming them."""
    there: dict[str, list[Status]] = {}
    for status in statuses:
        there.setdefault(status.where, []).append(status)
    return [
        f"{found[0].name} is in {part}"
        if len(found) == 1
        else f"ranks {', '.join(str(status.rank) for status in found)} are in {part}"
        for part, found in there.items()
    ]


def _digest(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, text, "sha256")


def _patience() -> float:
    text = os.environ.get(VARIABLE, str(SILENCE_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise UserError(f"{VARIABLE} is {text!r}; write seconds, as in {SILENCE_SECONDS:.0f}")
    return seconds
