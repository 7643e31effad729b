"""Detection of hanging ranks, and reports of slow ones.

Ranks wait for each other in collectives, so one that hangs stops all of them silently. Therefore threads of each rank
exchange statuses through the store of the rendezvous (rendezvous.py), over a separate connection: each rank writes its
status, rank 0 reads all of them, and the others read rank 0's. When a rank is silent (stopped, cut off, its node lost),
or all ranks respond but none makes progress, the ranks report their positions on stderr and exit, so that the job fails
and can be resumed elsewhere. The main thread only updates its status.

Statuses are signed (signed.py), and checked before they are believed. A process that writes other ones to the store can
hide whether a rank hangs, which is reported.
"""

import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, NoReturn, get_args

import torch
import torch.distributed

from zerolora.errors import UserError, printable
from zerolora.log import LOGGER
from zerolora.train.launch.rendezvous import TIMEOUT
from zerolora.train.launch.signed import SECRET, signed, verified
from zerolora.train.launch.topology import NODES
from zerolora.train.telemetry.stragglers import ForwardTimer, StragglerDetector

VARIABLE = "ZEROLORA_PATIENCE"
SILENCE_SECONDS = 180.0  # until a silent rank ends training; a file server's failover takes one or two minutes
WARNING = 1 / 3  # of the time limit, after which the fault is reported
START_UP = 3  # times the patience: ranks import Python modules from file servers at different speeds
LOADING_SECONDS = TIMEOUT.total_seconds()  # while a model of any size is read or written
STEPS = 10  # times as long as the longest part of a step so far
LONGEST_TEXT = 300  # characters of a status' texts
BEATS = 30  # statuses in the time that counts as silence
LONGEST_BEAT = 2.0  # seconds


Kind = Literal["start-up", "loading", "step"]


@dataclass
class Status:
    """The status of a rank: its position and progress."""

    rank: int
    host: str
    part: str
    """The current part of training, as in "step 3, backward"."""
    kind: Kind
    """Selects the time limit of that part."""
    sent: int = 0
    """Number of times that the rank has written its status: only a new number is a sign of life."""
    turns: int = 0
    """Number of changes of `part`."""
    longest: float = 0.0
    """Seconds of the longest part of a step."""
    steps: int = 0
    seconds: float = 0.0
    """Forward seconds of `steps` steps that the rank spent computing (stragglers.py)."""

    @classmethod
    def of(cls, value: Any, rank: int) -> "Status | None":
        """Return the status of a rank from its JSON value; None if it is not one."""
        if not isinstance(value, dict) or value.keys() != {field.name for field in fields(cls)}:
            return None
        counts, seconds = ("sent", "turns", "steps"), ("longest", "seconds")
        if value["rank"] != rank or not all(type(value[name]) is int and value[name] >= 0 for name in counts):
            return None
        if not all(type(value[name]) in (int, float) and 0 <= value[name] < math.inf for name in seconds):
            return None
        if not all(type(value[name]) is str and len(value[name]) <= LONGEST_TEXT for name in ("host", "part", "kind")):
            return None
        if value["kind"] not in get_args(Kind):
            return None
        return cls(**value | {name: printable(value[name]) for name in ("host", "part")})

    @property
    def name(self) -> str:
        """The rank and its host."""
        return f"rank {self.rank} on {self.host}"


@dataclass
class Peer:
    """The last status of another rank, when it arrived, and when its part last changed."""

    status: Status
    heard: float
    moved: float


class Heartbeat:
    """This rank's status, and the threads that exchange and judge statuses. Training only calls `at` and `step`.

    Raises UserError if ZEROLORA_PATIENCE is not a number of seconds.
    """

    def __init__(self) -> None:
        self.patience = _patience()
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.own = Status(self.rank, printable(socket.gethostname()), "start-up", "start-up")
        self._timer: ForwardTimer | None = None
        self._step = 0
        self._since = time.monotonic()
        self.closed = False
        """Whether the rank has stopped reporting and checking."""
        if self.world > 1:
            monitor = _Monitor(self)
            for work in (monitor.exchange, monitor.run):
                threading.Thread(target=monitor.keep_up, args=[work], daemon=True).start()

    def follow(self, model: Any, device: torch.device) -> None:
        """Time this rank's forward passes, to compare ranks. `model` is the engine's."""
        if self.world > 1:
            self._timer = ForwardTimer(model, device)

    def step(self, number: int, part: str) -> None:
        """Report that this rank is in a part of a step."""
        if number != self._step:
            if self._step and self._timer:
                self.own.seconds += self._timer.taken()
                self.own.steps += 1
            self._step = number
        self.at(f"step {number}, {part}", "step")

    def at(self, part: str, kind: Literal["loading", "step"] = "loading") -> None:
        """Report the current part of training; `kind`: it takes as long as a step, or possibly as long as loading."""
        now, own = time.monotonic(), self.own
        if own.kind == kind == "step":
            own.longest = max(own.longest, now - self._since)
        self._since = now
        own.part, own.kind = part, kind
        own.turns += 1

    def close(self) -> None:
        """Stop reporting and checking: from now on ranks end independently."""
        self.closed = True


class _Monitor:
    """The threads beside training. Time counts only while this rank runs: a suspended job or laptop does not hang."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.heartbeat, self.own, self.patience = heartbeat, heartbeat.own, heartbeat.patience
        self.beat = min(LONGEST_BEAT, self.patience / BEATS)
        self.expected = list(range(1, heartbeat.world)) if not self.own.rank else [0]
        self.others: dict[int, Peer] = {}
        self.doubted: set[int] = set()
        """Ranks whose last status was not theirs, of which nothing is known since."""
        self._named: set[int] = set()
        self.stragglers = StragglerDetector()
        self.reported: str | None = None
        self.now = self._moved = 0.0
        self._turns = 0

    def keep_up(self, work: Callable[[], None]) -> None:
        """Do a thread's work, and begin it again after an error, which is reported once."""
        reported = ""
        while not self.heartbeat.closed:
            try:
                work()
                return
            except Exception as error:
                if (text := f"{type(error).__name__}: {error}") != reported:
                    LOGGER.error(
                        f"the detection of hanging ranks fails on {self.own.name} ({text}) and is tried again; "
                        "training goes on"
                    )
                    reported = text
                time.sleep(LONGEST_BEAT)

    def exchange(self) -> None:
        """Write and read statuses until training ends, or the store does not answer within its timeout."""
        where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives failed ranks

        def key(rank: int) -> str:
            return f"zerolora/heartbeat/{attempt}/{rank}"

        try:
            store = torch.distributed.TCPStore(*where, is_master=False, timeout=TIMEOUT, wait_for_workers=False)
            while not self.heartbeat.closed:
                self.own.sent += 1
                store.set(key(self.own.rank), signed(key(self.own.rank), asdict(self.own)))
                present = [rank for rank in self.expected if rank in self.others or store.check([key(rank)])]
                found = store.multi_get([key(rank) for rank in present]) if present else []
                for rank, data in zip(present, found, strict=True):
                    self._take(rank, Status.of(verified(key(rank), data), rank))
                time.sleep(self.beat)
        except torch.distributed.DistError:
            # Rank 0 has ended, or is unreachable: silence. Another store at its address would be another job's.
            return

    def run(self) -> None:
        """Judge the statuses, until training ends."""
        last = time.monotonic()
        while not self.heartbeat.closed:
            time.sleep(self.beat)
            now = time.monotonic()
            self.now, last = self.now + min(now - last, 3 * self.beat), now
            if self.own.turns != self._turns:
                self._turns, self._moved = self.own.turns, self.now
            self._judge()
            if not self.own.rank and len(self.others) == len(self.expected):
                for line in self.stragglers.judge(self.now, self._statuses()):
                    LOGGER.warning(line)

    def _take(self, rank: int, status: Status | None) -> None:
        known = self.others.get(rank)
        if status is None or (known and status.sent < known.status.sent):  # an older one, written again
            self.doubted.add(rank)
            if rank not in self._named:
                self._named.add(rank)
                LOGGER.warning(
                    f"what the store at {os.environ['MASTER_ADDR']} has as the status of rank {rank} is not its own, "
                    "so whether that rank hangs is not known: another process writes there, or the ranks have no "
                    f"common secret (docs/checkpoints.md); export {SECRET} to all of them"
                )
            return
        if known and status.sent == known.status.sent:
            return
        self.doubted.discard(rank)
        moved = known.moved if known and known.status.turns == status.turns else self.now
        self.others[status.rank] = Peer(status, self.now, moved)

    def _statuses(self) -> list[Status]:
        """Return the last status of each rank that has reported, this rank's first."""
        return [self.own, *(peer.status for peer in list(self.others.values()))]

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
        """Return the silent rank, its seconds of silence and their limit, if it is longer than usual."""
        known = [peer for rank, peer in list(self.others.items()) if rank not in self.doubted]
        longest = min(known, key=lambda peer: peer.heard, default=None)
        if longest is None or self.now - longest.heard <= self.patience * WARNING:
            return None
        text = f"{longest.status.name}, last in {longest.status.part}, has not responded"
        return text, self.now - longest.heard, self.patience

    def _standstill(self) -> tuple[str, float, float] | None:
        """Return a message, the seconds without progress, and their limit; after start-up, on rank 0 only."""
        if self.own.rank and self.own.kind != "start-up":
            return None
        statuses = self._statuses()
        seconds = self.now - max([self._moved, *(peer.moved for peer in list(self.others.values()))])
        if self.own.kind == "start-up":
            return f"{self.own.name} waits for {self._missing()}", seconds, START_UP * self.patience
        longest = max(status.longest for status in statuses)
        in_steps = longest and all(status.kind == "step" for status in statuses)
        usual = max(self.patience, STEPS * longest) if in_steps else LOADING_SECONDS
        hangs = min(statuses, key=lambda status: status.turns).part
        # Collectives themselves wait no longer than for loading.
        return f"{hangs} hangs: no rank has made progress", seconds, min(usual, LOADING_SECONDS)

    def _missing(self) -> str:
        """Return the ranks that have not reported yet."""
        missing = [rank for rank in self.expected if rank not in self.others and rank not in self.doubted]
        if not missing:
            return "the others"
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", self.heartbeat.world))
        names = [name for name in os.environ.get(NODES, "").split(",") if name]
        return f"{absent(missing, ranks_per_node, names)} to come to {os.environ['MASTER_ADDR']}"

    def _rest(self) -> str:
        """Return the responding ranks by part."""
        silent = self.patience * WARNING
        heard = [peer.status for peer in list(self.others.values()) if self.now - peer.heard <= silent]
        parts: dict[str, list[Status]] = {}
        for status in sorted([self.own, *heard], key=lambda status: status.rank):
            parts.setdefault(status.part, []).append(status)
        return "".join(
            f"; {ranks[0].name} is in {part}"
            if len(ranks) == 1
            else f"; ranks {', '.join(str(status.rank) for status in ranks)} are in {part}"
            for part, ranks in parts.items()
        )

    def _end(self, message: str) -> NoReturn:
        # The main thread is in a collective that does not return; the launcher ends the other ranks.
        LOGGER.error(f"{message}; run the same command to resume from its checkpoint")
        sys.stderr.flush()
        os._exit(2)


def absent(ranks: list[int], ranks_per_node: int, names: list[str]) -> str:
    """Return a text that names the missing ranks, and their nodes if names are known: "rank 1 of node2"."""
    of_node: dict[int, list[int]] = {}
    for rank in ranks:
        of_node.setdefault(rank // ranks_per_node, []).append(rank)
    texts = []
    for node, missing in of_node.items():
        text = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
        if len(missing) == ranks_per_node > 1:
            text = f"all ranks ({missing[0]} to {missing[-1]})"
        texts.append(f"{text} of {names[node]}" if node < len(names) else text)
    return "; ".join(texts)


def _patience() -> float:
    text = os.environ.get(VARIABLE, str(SILENCE_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise UserError(f"{VARIABLE} is {text!r}; give seconds, as in {SILENCE_SECONDS:.0f}")
    return seconds
