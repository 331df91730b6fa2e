"""`Rendezvous`: before each reading the ranks agree, without the device, on what they are about to measure.

A collective call without one of the ranks would end the run, so the ranks meet in the store of the process group, where
a wait has a timeout. Each describes itself in a plain text. As long as no text is new, a rendezvous is a counter: three
short calls of each rank. Otherwise all texts are read again.

A rank may fail between two collective calls of a reading, while the others are about to make the next one. So they meet
in the store before each of them, and a rank that has failed says so there: then every rank measures that reading alone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hdi_callback.monitoring.ranks.ranks import Ranks, check_process_group, number_of_processes
from hdi_callback.monitoring.ranks.roster import Roster, why_not_together

_FIRST_TIMEOUT = timedelta(seconds=120)
_MOST_FAILED = 2  # readings in a row
_TIMEOUT = timedelta(seconds=300)  # between two readings a rank may save a checkpoint or evaluate
_numbers = itertools.count()
_LEAVE, _SKIP = "!", "?"  # what a verdict begins with: no further reading together, or not this one
_GO = ">"
_NEVER = "#"  # what the verdict of a rank begins with that could not begin to watch


class OtherRankError(RuntimeError):
    """Another rank takes no part in a collective call."""


class FailedApartError(OtherRankError):
    """A rank has failed where others may have acted."""


class Rendezvous:
    """Find the ranks that measure together, and check at every reading that all of them take part.

    Args:
        group: ``"auto"`` for all ranks once `torch.distributed` is initialised, a process group, or `None` for this
            process alone.

    Raises:
        MisconfigurationError: if `group` is none of these.
    """

    def __init__(self, group: Any = "auto") -> None:
        self._choice = check_process_group(group)
        self._exchange: _Exchange | None = None
        self._roster: Roster | None = None
        self._is_over = False
        self._failed = 0  # readings in a row
        self._outside = Ranks()

    @property
    def asked(self) -> Ranks:
        """The ranks of `group` once they have met; this process alone if there are no others."""
        if self._choice is None or number_of_processes() == 1:
            return Ranks()
        if self._outside.group is not None:
            return self._outside
        return Ranks(dist.group.WORLD if self._choice == "auto" else self._choice)

    @property
    def acquainted(self) -> Ranks:
        """The ranks of `group`, each of which knows who holds the same layers; this process alone without others.

        Raises:
            OtherRankError: if the ranks have not met, or do not hold the layers that ranks of one model do.
        """
        asked = self.asked
        if asked.size > 1 and self._outside.group is None:  # the same on every rank
            raise OtherRankError("it is not known which ranks hold the same layers")
        return asked

    def join(
        self, describe: Callable[[], Mapping[str, Any]], *, is_armed: bool, say: Callable[[str, str], None]
    ) -> tuple[Roster, bool] | None:
        """Meet the other ranks before a reading.

        Args:
            describe: returns the layers of this rank and its findings about them, see `Roster`.
            is_armed: whether a forward was armed on this rank.
            say: warns; takes a kind of warning and its message.

        Returns:
            All layers, and whether a forward was armed on any rank; `None` if this process measures alone.
        """
        exchange = self._meeting()
        if exchange is None:
            return None
        mine = json.dumps(describe(), sort_keys=False)
        answer = exchange.exchange(mine, is_armed)
        reason = answer[1:] if isinstance(answer, str) else None
        if isinstance(answer, str) and answer.startswith(_SKIP):
            say("measuring together", f"This rank measures a reading alone: {reason}.")
            return None
        if not isinstance(answer, str):
            texts, is_any_armed = answer
            if self._roster is not None and texts is None:
                return self._roster, is_any_armed
            every = {rank: json.loads(text) for rank, text in (texts or {}).items()}
            reason = why_not_together(every)
            if reason is None:
                ranks = exchange.ranks
                self._roster = Roster(Ranks(ranks.group, agree=exchange.agree, give_up=exchange.give_up), every)
                self._outside = Ranks(ranks.group, self._roster.ranks.peers)  # for calls between readings
                return self._roster, is_any_armed
            self._outside = Ranks()
        self.leave()
        say(
            "measuring together",
            f"This rank measures head diversity alone: {reason}. Its readings are of its own layers and tokens. Give "
            "every rank the same monitor, or write process_group=None.",
        )
        return None

    def _meeting(self) -> _Exchange | None:
        """Where the ranks meet; `None` if this process measures alone."""
        if self._is_over or self._choice is None or number_of_processes() == 1:
            return None
        if self._exchange is None:
            ranks = Ranks(dist.group.WORLD if self._choice == "auto" else self._choice)
            if ranks.size == 1:
                self.leave()
                return None
            self._exchange = _Exchange(ranks)
        return self._exchange

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Let the block call `share` once, and then `failed_apart` once, as all ranks do, or let none wait for it.

        Yields:
            Nothing.

        Raises:
            FailedApartError: if the block fails after all ranks have come to `share`.
        """
        exchange = self._last_meeting()
        if exchange is None:
            yield
            return
        exchange.begin_act()
        try:
            yield
        except Exception as error:
            if exchange.give_up_act():
                raise FailedApartError(str(error)) from error
            raise

    def share(self, value: Any) -> Any:
        """Return the value of the first rank on every rank, through the store; all of them call this.

        Args:
            value: plain data, as JSON.

        Returns:
            That of the first rank, read from JSON; this rank's own if it measures alone.

        Raises:
            OtherRankError: if another rank does not come, or fails before.
        """
        exchange = self._last_meeting()
        return value if exchange is None else exchange.share(value)

    def failed_apart(self, failed: Collection[int], count: int) -> list[int]:
        """Tell what has failed on some of the ranks and not on all; all of them call this.

        Args:
            failed: numbers of what has failed on this rank.
            count: of what could fail, the same on every rank.

        Returns:
            Numbers of what failed on some ranks alone, the same on every rank.

        Raises:
            OtherRankError: if another rank does not come, or fails before.
        """
        exchange = self._last_meeting()
        return [] if exchange is None else exchange.failed_apart(failed, count)

    def decline(self) -> None:
        """Tell the others that this rank, which could not begin to watch, comes to no reading and to no decision."""
        exchange = self._meeting()
        if exchange is not None:
            exchange.decline()
        self._is_over = True

    def _last_meeting(self) -> _Exchange | None:
        """Where the ranks meet beside readings, also after they have begun to measure alone."""
        return self._exchange if self._is_over else self._meeting()

    def give_up(self) -> None:
        """Tell the others that this rank takes no part in what is left of this reading."""
        exchange = self._meeting()
        if exchange is not None:
            exchange.give_up()

    def end_reading(self, *, has_failed: bool) -> None:
        """Note that a reading is over; after two in a row that failed this rank measures alone.

        Args:
            has_failed: whether it was given up.
        """
        self._failed = self._failed + 1 if has_failed else 0
        if self._exchange is not None:
            self._exchange.end_reading()
        if self._failed >= _MOST_FAILED:
            self.leave()

    def leave(self) -> None:
        """Measure alone from now on."""
        self.close()
        self._is_over, self._roster = True, None  # whether to act is still agreed on

    def close(self) -> None:
        """Announce that this rank takes no further readings, so that others need not wait for it."""
        if self._exchange is not None:
            self._exchange.leave()


class _Exchange:
    """Exchange of one text of each rank through the store of the process group."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._store: Any = dist.distributed_c10d._get_default_store()
        members = hashlib.sha256(repr(dist.get_process_group_ranks(ranks.group)).encode()).hexdigest()[:16]
        self._place = f"hdi_callback/{members}/{next(_numbers)}"
        self._count = self._calls = self._acts = 0
        self._is_joined = False
        self._mine = self._act = self._never = ""
        self._alike: dict[str, int] = {}  # digest of a text -> how many ranks sent it last time
        self._written: list[str] = []
        self._used: list[str] = []  # keys of calls since the last reading began
        self._texts: dict[str, str] = {}

    def exchange(self, text: str, is_armed: bool) -> tuple[dict[int, str] | None, bool] | str:
        """Send a text to the other ranks, and receive theirs.

        Args:
            text: of this rank.
            is_armed: counted over the ranks.

        Returns:
            Rank -> its text, `None` if no text is new; and whether any rank is armed. If some did not take part, a
            mark and the reason.
        """
        place, store = f"{self._place}/{self._count}", self._store
        timeout = _TIMEOUT if self._count else _FIRST_TIMEOUT
        digest = hashlib.sha256(text.encode()).hexdigest()
        if is_armed:
            store.add(f"{place}/armed", 1)
        if digest == self._mine:
            # The last rank with this text, if its group is the last to be complete, decides for all.
            is_last = store.add(f"{place}/{digest}", 1) == self._alike[digest]
            if is_last and store.add(f"{place}/groups", 1) == len(self._alike):
                self._decide(f"{place}/first", f"same {store.add(f'{place}/armed', 0)}")
        else:
            self._decide(f"{place}/first", "news")
        verdict = self._wait(f"{place}/first", timeout)
        texts = None
        if verdict == "news":
            verdict = self._read_all(place, text, digest, timeout)
            texts = None if verdict[0] in (_LEAVE, _SKIP) else self._texts_of(place, verdict)
        if verdict.startswith(_LEAVE):
            return verdict
        self._count, self._acts = self._count + 1, 0
        if verdict.startswith(_SKIP):
            return verdict
        self._calls, self._is_joined = 0, True
        self._delete_previous(place, had_texts=texts is not None)
        return texts, int(verdict.split()[1]) > 0

    def agree(self) -> None:
        """Wait until every rank is about to make the same collective call.

        Raises:
            OtherRankError: if a rank has given up.
        """
        place = self._next_call()
        self._calls += 1
        self._note(place)
        self._agree_on(place)

    def begin_act(self) -> None:
        """Begin to act together, see `Rendezvous.acting`."""
        if self._never:
            raise OtherRankError(self._never)
        self._act = f"{self._place}/{self._count - 1}/act {self._acts}"
        self._acts += 1
        for place in self._of_act():
            self._note(place, "said")

    def decline(self) -> None:
        """See `Rendezvous.decline`; the others are at the next act or the next reading at most."""
        self._never = f"rank {self.ranks.rank} could not begin to watch"
        place = f"{self._place}/{self._count - 1}/act {self._acts}"
        for end in ("share", "end"):
            self._decide(f"{place}/{end}", _NEVER + self._never)
        self.leave(self._never)

    def give_up_act(self) -> bool:
        """Let no rank wait for this one; return whether the others may have acted."""
        why = f"{_SKIP}rank {self.ranks.rank} could not go on"
        shared, ended = self._of_act()
        self._decide(shared, why)
        self._decide(ended, why)
        return bool(self._store.get(shared).decode().startswith(_GO))

    def share(self, value: Any) -> Any:
        """Return the value of the first rank, see `Rendezvous.share`."""
        place, _ = self._of_act()
        if self.ranks.rank == 0:
            self._store.set(f"{place}/said", json.dumps(value))
        self._agree_on(place)
        return json.loads(self._store.get(f"{place}/said").decode())

    def failed_apart(self, failed: Collection[int], count: int) -> list[int]:
        """Tell what has failed on some of the ranks alone, see `Rendezvous.failed_apart`."""
        _, place = self._of_act()
        keys = [f"{place}/failed {one}" for one in range(count)]
        self._used += keys
        for one in set(failed):
            self._store.add(keys[one], 1)

        def judge() -> str:
            numbers = [self._store.add(key, 0) for key in keys]
            return " ".join(str(one) for one, number in enumerate(numbers) if 0 < number < self.ranks.size)

        return [int(number) for number in self._agree_on(place, judge).split()]

    def _of_act(self) -> tuple[str, str]:
        """Where the ranks share what to do, and where they tell what has failed."""
        return f"{self._act}/share", f"{self._act}/end"

    def _note(self, place: str, *more: str) -> None:
        """Note the keys of a place at which the ranks agree, which are deleted after the next reading."""
        self._used += [place, *(f"{place}/{end}" for end in ("came", "decided", *more))]

    def _agree_on(self, place: str, judge: Callable[[], str] = lambda: "") -> str:
        """Wait for all ranks; return what the last one judged."""
        if self._store.add(f"{place}/came", 1) == self.ranks.size:
            self._decide(place, f"{_GO}{judge()}")
        verdict = self._wait(place, _TIMEOUT if self._count else _FIRST_TIMEOUT)
        if verdict.startswith(_NEVER):
            self._never = verdict[1:]
        if not verdict.startswith(_GO):
            raise OtherRankError(verdict[1:])
        return verdict[1:]

    def give_up(self) -> None:
        """Let no rank wait for this one, before the next collective call or before the reading."""
        why = f"rank {self.ranks.rank} could not take part in it"
        if self._is_joined:
            place = self._next_call()
            self._note(place)
            self._decide(place, _SKIP + why)
            return
        for end in ("first", "second"):
            self._decide(f"{self._place}/{self._count}/{end}", _SKIP + why)
        self._count, self._acts = self._count + 1, 0

    def end_reading(self) -> None:
        """Note that no further call of this reading follows."""
        self._is_joined = False

    def _next_call(self) -> str:
        return f"{self._place}/{self._count - 1}/call {self._calls}"

    def leave(self, why: str | None = None) -> None:
        """Announce to ranks that come to the next reading that this one does not."""
        why = f"rank {self.ranks.rank} takes no further reading" if why is None else why
        try:
            self._decide(f"{self._place}/{self._count}/first", _LEAVE + why)
        except RuntimeError:  # the process with the store has ended: nobody waits
            return

    def _read_all(self, place: str, text: str, digest: str, timeout: timedelta) -> str:
        store = self._store
        store.set(f"{self._place}/text/{digest}", text)
        store.set(f"{place}/rank/{self.ranks.rank}", digest)
        if store.add(f"{place}/came", 1) == self.ranks.size:
            digests = [store.get(f"{place}/rank/{rank}").decode() for rank in range(self.ranks.size)]
            known = list(dict.fromkeys(digests))
            listed = ",".join(known) + " " + ",".join(str(known.index(one)) for one in digests)
            self._decide(f"{place}/second", f"all {store.add(f'{place}/armed', 0)} {listed}")
        return self._wait(f"{place}/second", timeout)

    def _texts_of(self, place: str, verdict: str) -> dict[int, str]:
        _, _, listed, places = verdict.split()
        known, of_ranks = listed.split(","), [int(place_of_text) for place_of_text in places.split(",")]
        for digest in known:
            if digest not in self._texts:
                self._texts[digest] = self._store.get(f"{self._place}/text/{digest}").decode()
        self._texts = {digest: self._texts[digest] for digest in known}
        self._alike = {digest: of_ranks.count(place) for place, digest in enumerate(known)}
        self._mine = known[of_ranks[self.ranks.rank]]
        return {rank: self._texts[known[one]] for rank, one in enumerate(of_ranks)}

    def _wait(self, key: str, timeout: timedelta) -> str:
        try:
            self._store.wait([key], timeout)
        except RuntimeError:
            late = f"some of the {self.ranks.size} ranks have taken no reading within {timeout.seconds} seconds"
            self._decide(key, f"{_LEAVE}{late}")
        return str(self._store.get(key).decode())

    def _decide(self, key: str, verdict: str) -> None:
        """Write a verdict for all ranks, unless there is one already; return the valid one."""
        if self._store.add(f"{key}/decided", 1) == 1:
            self._store.set(key, verdict)

    def _delete_previous(self, place: str, *, had_texts: bool) -> None:
        """Delete the entries from before this reading, to which all ranks have come by now."""
        used, self._used = self._used, []
        if self.ranks.rank == 0:
            for key in (*self._written, *used):
                self._store.delete_key(key)
            ends = ["armed", "groups", "first", "first/decided", *self._alike]
            if had_texts:
                ends += ["came", "second", "second/decided", *(f"rank/{rank}" for rank in range(self.ranks.size))]
            self._written = [f"{place}/{end}" for end in ends]
