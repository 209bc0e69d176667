"""Which link is slow, by what the job's own messages take: each worker looks at its links, the members judge. Pure.

A link is slow where its bytes per second are far below, or its round trip far above, its own past, or where it carries
far less than like links do, while the workers at both ends are as fast as ever; confirmed as for workers.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from elaunch.policy.stragglers.track import LEARN, NOISE, PAST, Change, Look, SpeedState, Track, spread
from elaunch.rendezvous.membership import node_of, slot_of

LINK_OWN = math.log(2)
LINK_LIKE = math.log(4)
"""A link is slow where its rate is below its own past by the one, or below that of most like links by the other."""

LATENCY = math.log(3)
LATENCY_FLOOR_S = 1e-3
"""A latency is far off where it is so much longer than before, and longer by so much."""

LINK_BYTES = 256 << 10
"""What a link must carry from one look to the next for its rate to count."""

LIKE_LINKS = 4
"""Links by which one is measured."""

Link = tuple[str, str]
"""From a slot to a slot."""


class Slower(NamedTuple):
    """A link far off its own past: how many times as slow, bytes per second now, and bytes per second as a rule."""

    factor: float
    bytes_per_s: float
    usual_bytes_per_s: float


class LinkWatch:
    """One worker's own links: how fast each is compared with its past. A look takes O(links of this worker)."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[int, float]] = {}
        self._rates: dict[str, deque[float]] = {}
        self._latencies: dict[str, deque[float]] = {}
        self._carried: dict[str, int] = {}

    def forget(self) -> None:
        """Forgets the past of the links, since other messages go over them from now on."""
        self._rates.clear()
        self._latencies.clear()

    def look(self, carried: Mapping[str, tuple[int, float, float]]) -> dict[str, Slower]:
        """Takes in what the links have carried so far.

        Args:
            carried: by the peer's slot: bytes and the seconds in which they were on their way, since the link was
                made, and the seconds of a round trip now.

        Returns:
            The links that are far off their own past, LINK_OWN times as slow or more.
        """
        found = {}
        for slot, (sent_bytes, busy_s, latency_s) in carried.items():
            before_bytes, before_s = self._before.get(slot, (0, 0.0))
            self._before[slot] = sent_bytes, busy_s
            bytes_now, seconds = sent_bytes - before_bytes, busy_s - before_s
            if bytes_now < LINK_BYTES or seconds <= 0:
                continue
            self._carried[slot] = bytes_now
            rate = math.log(bytes_now / seconds)
            rates = self._rates.setdefault(slot, deque(maxlen=PAST))
            slower = self._off(rates, -rate, LINK_OWN)
            latency = math.log(max(latency_s, 1e-9))
            past = self._latencies.setdefault(slot, deque(maxlen=PAST))
            far = latency_s > LATENCY_FLOOR_S + math.exp(statistics.median(past)) if len(past) >= LEARN else True
            later = self._off(past, latency, LATENCY) if far else 0.0
            if max(slower, later) > 0:
                found[slot] = Slower(math.exp(max(slower, later)), bytes_now / seconds, _usual(rates))
        return found

    def usual(self) -> dict[str, tuple[float, int]]:
        """Returns, for links that were looked at often enough, bytes per second and bytes between two looks."""
        return {slot: (_usual(past), self._carried[slot]) for slot, past in self._rates.items() if len(past) >= LEARN}

    def _off(self, past: deque[float], value: float, limit: float) -> float:
        """Returns by how much a value exceeds its past, if by more than the limit and than NOISE deviations; else 0.

        Values that are far off do not become the past, so that a link that stays slow does not become usual.
        """
        if len(past) >= LEARN:
            above = value - statistics.median(past)
            if above > max(limit, NOISE * spread(past)):
                return above
        past.append(value)
        return 0.0


def _usual(past: Collection[float]) -> float:
    """Returns the usual bytes per second."""
    return math.exp(-statistics.median(past))


class LinkDetector:
    """Finds the slow links of a job from what their senders say. A look takes O(links that are odd)."""

    def __init__(self) -> None:
        self._rates: dict[Link, tuple[float, int]] = {}
        self._tracks: dict[Link, Track] = {}
        self._odd: dict[Link, float] = {}
        self._workers: dict[str, str] = {}

    def entered(self, workers: Collection[str]) -> None:
        """Sets the members."""
        self._workers = {slot_of(worker): worker for worker in workers}
        here = self._workers.keys()
        self._rates = {link: rate for link, rate in self._rates.items() if here >= set(link)}
        self._tracks = {link: track for link, track in self._tracks.items() if here >= set(link)}
        self._compare()

    def usual(self) -> dict[Link, float]:
        """Returns the bytes per second that links usually have, of those that are known."""
        return {link: rate for link, (rate, _) in self._rates.items()}

    def told(self, slot: str, rates: Mapping[str, tuple[float, int]]) -> None:
        """Takes in a slot's usual bytes per second, and bytes between two looks, by the other end."""
        if rates:
            self._rates |= {(slot, other): rate for other, rate in rates.items()}
            self._compare()

    def look(
        self,
        step: int,
        time_s: float,
        lookers: Collection[str],
        slower: Mapping[Link, Slower],
        slow: Callable[[str], bool],
    ) -> list[Change]:
        """Looks at all links and returns what has changed.

        Args:
            step, time_s: as for `Detector.look`.
            lookers: the slots whose workers have looked at their links.
            slower: links that are far off their own past.
            slow: whether a slot is slow, or may be: then nothing is said of its links.

        Returns:
            What has changed.
        """
        changes = []
        for link in {*slower, *self._odd, *(link for link, track in self._tracks.items() if track.looks)}:
            if link[0] not in lookers or any(map(slow, link)):
                continue
            factor = slower[link].factor if link in slower else 1.0
            # In the units of the limits, so that either makes a vote.
            score = max(math.log(factor) / LINK_OWN, self._odd.get(link, 0.0) / LINK_LIKE)
            track = self._tracks.setdefault(link, Track(threshold=0.99))
            if track.add(Look(step, time_s, score)):
                changes.append(self._change(link, track, step, slower.get(link)))
            if not track.side and not any(look.score > 0 for look in track.looks):
                del self._tracks[link]
        return changes

    @property
    def doubts(self) -> bool:
        """Returns whether a link may be about to become slow or to recover."""
        return any(track.doubtful for track in self._tracks.values())

    def factors(self) -> dict[Link, float]:
        """Returns how many times as slow as usual the slow links are."""
        return {link: self._factor(link, track) for link, track in self._tracks.items() if track.side == 1}

    def _factor(self, link: Link, track: Track) -> float:
        level = statistics.median(look.score for look in track.looks)
        like = self._odd.get(link, 0.0) / LINK_LIKE
        return math.exp(level * (LINK_LIKE if like >= level else LINK_OWN))

    def _change(self, link: Link, track: Track, step: int, now: Slower | None) -> Change:
        agreeing, since_step = track.agreeing
        ends = tuple(self._workers[slot] for slot in link)
        # Who says that a link is slow knows what is usual; that may not have been told before.
        usual = now.usual_bytes_per_s if now is not None else self._rates[link][0] if link in self._rates else None
        evidence = {
            "basis": "past" if now is not None or link not in self._odd else "peers",
            "bytes_per_s": None if now is None else round(now.bytes_per_s),
            "usual_bytes_per_s": None if usual is None else round(usual),
            "looks": len(track.looks),
            "agreeing": agreeing,
        }
        state: SpeedState = "slow" if track.side == 1 else "recovered"
        return Change(state, "link", ends, ends, self._factor(link, track), step, since_step, evidence)

    def _compare(self) -> None:
        """Finds the links that were slower than comparable ones all the time.

        Alike are links within a node, or between nodes, that carry about as much: a link with small messages is slower.
        """
        kinds: dict[tuple[bool, int], list[Link]] = defaultdict(list)
        for link, (_, carried) in self._rates.items():
            kinds[node_of(link[0]) == node_of(link[1]), round(math.log2(max(1, carried)))].append(link)
        self._odd = {}
        for links in kinds.values():
            if len(links) >= LIKE_LINKS:
                rates = [math.log(self._rates[link][0]) for link in links]
                most, limit = statistics.median(rates), max(LINK_LIKE, NOISE * spread(rates))
                self._odd |= {link: most - rate for link, rate in zip(links, rates) if most - rate > limit}
