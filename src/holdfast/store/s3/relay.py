"""What a turn sends to other runs: relayed from the head that committed it, each item at most once by its id.

The turn's head holds the items until all are delivered. If the process is killed before that, another one relays them
again: created runs are recognised by the run that started them, signals by their ids, messages by how much the receiver
has got from the sender.
"""

from functools import partial

from holdfast.core.instants import Instant
from holdfast.core.messages import Message, SignalRequest
from holdfast.limits import Limits
from holdfast.store import decisions, outgoing, port, validation
from holdfast.store.s3.create import Creator, deliver_one
from holdfast.store.s3.head import Outgoing, StoredRun
from holdfast.store.s3.heads import Heads
from holdfast.store.s3.mirror import Mirror

ABANDONED = 15_000_000
"""How long a delivery may be in progress, in microseconds, before another process relays it."""

PLACES = 1 << 20
"""More than the number of items in one turn."""


class Relay:
    """Relays what runs send to other runs."""

    def __init__(self, mirror: Mirror, heads: Heads, creator: Creator, limits: Limits) -> None:
        self._mirror = mirror
        self._heads = heads
        self._creator = creator
        self._limits = decisions.without_rate(limits)

    async def relay(self, run_id: str, now: Instant) -> None:
        """Relay everything that a run has to send.

        Deliveries are announced before the sender drops what it has sent: otherwise, if the process is killed in
        between, only the next sweep would find the receivers.
        """
        held = self._mirror.held(run_id) or await self._mirror.fetch_readable(run_id)
        if held is None or not held.run.outgoing:
            return
        arrived = [(entry, await self._relay(held.run, entry, now)) for entry in held.run.outgoing]
        await self._heads.announce()
        for entry, left in arrived:
            await self._heads.change_readable(run_id, partial(_finish, entry=entry, left=left, now=now))

    async def relay_abandoned(self, now: Instant) -> None:
        """Relay what the processes that committed it have not relayed for a long time."""
        abandoned = [
            run_id
            for run_id in self._mirror.active
            if (since := self._mirror.summaries[run_id].sending_since) is not None and since <= now - ABANDONED
        ]
        for run_id in abandoned:
            await self.relay(run_id, now)

    async def _relay(self, run: StoredRun, entry: Outgoing, now: Instant) -> outgoing.Left:
        turn = run.turn_of(entry)
        started: list[port.Created | port.Existing | port.Refused] = [port.Created("")] * entry.started
        for place, new in entry.new_runs.items():
            [queued] = decisions.never_rejected([new])
            order = self._mirror.next_order(now)
            sender = (run.identity, entry.number * PLACES + place)
            started[place] = await self._creator.create(queued, None, now, order, sender)
        sent: list[port.Delivered] = [port.Accepted()] * entry.sent
        for place, item in entry.sends.items():
            sent[place] = await self._send(turn, run.identity, item, entry.number * PLACES + place, now)
        return outgoing.left_of(turn, started, sent, now)

    async def _send(
        self, turn: port.Turn, sender: str, item: Message | SignalRequest, place: int, now: Instant
    ) -> port.Delivered:
        runs = {}
        for run_id in outgoing.concerned(turn, item):
            held = self._mirror.held(run_id) or await self._mirror.fetch(run_id)
            if held is not None:
                runs[run_id] = outgoing.whose(held.run.head)
        refused = outgoing.unreachable(turn, item, runs)
        if refused is not None:
            return refused

        problem = validation.check_item(item, self._limits)
        if problem is not None:
            return port.Refused(problem)

        def decide(run: StoredRun) -> port.Delivered:
            if isinstance(item, Message):
                return run.take(sender, place, item, now)
            return deliver_one(run, item, self._limits, now)

        answer = await self._heads.change(item.run_id, decide)
        return port.Refused(decisions.no_such_run(item.run_id)) if answer is None else answer


def _finish(run: StoredRun, entry: Outgoing, left: outgoing.Left, now: Instant) -> None:
    """Note that everything is delivered, and store the results of refusals; only the first to note it does so."""
    if any(each.number == entry.number for each in run.outgoing):
        run.outgoing = tuple(each for each in run.outgoing if each.number != entry.number)
        run.take_back(left, now)
