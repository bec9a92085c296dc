"""Random sequences of operations through several stores at once: same answers, same contents, after every step.

The first store is the reference. What it answers decides what is asked next, so all of them are asked the same; the
moment that another one answers differently, or shows different contents, the sequence ends with `Difference`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Raw
from msgspec.structs import replace

from holdfast.core.admission import RunLimit
from holdfast.core.bus import OutboxReplay, Sink, alert_of
from holdfast.core.index_rows import runtime_snapshot
from holdfast.core.schedules import Schedule, ScheduleSpec
from holdfast.core.state import PENDING, TERMINAL, state_of
from holdfast.core.streams import Appended, StreamRead
from holdfast.errors import HoldfastError
from holdfast.limits import LEASE_MS, Limits
from holdfast.store.port import (
    Accepted,
    CommitConflict,
    Committed,
    Created,
    Duplicate,
    EventQuery,
    Job,
    LoadedRun,
    MailboxQuery,
    PlaceQuery,
    PurgeReport,
    Refused,
    RunCountQuery,
    RunHead,
    RunQuery,
    ScheduleQuery,
    Store,
    TaskQuery,
    Turn,
    WaitQuery,
)
from holdfast.store.queries import BulletinQuery, DeadLetterQuery, StreamQuery
from holdfast.store.types import CALL_LIMITS
from holdfast.testing import VirtualClock
from holdfast.testing.samples import read_history, read_picture
from holdfast.testing.store_suite.admission import releasing_turn
from holdfast.testing.store_suite.base import BAD_NAMES
from tests.store.answer_diff import answer_of, narrowed, plain, show
from tests.store.random_turns import Held, open_task_answers, random_turn, spoiled
from tests.store.random_values import (
    ACTIVITIES,
    LIMITED_QUEUES,
    MISSING,
    NODES,
    PLANS,
    QUEUES,
    STEPS,
    STREAM_NAMES,
    VISIBLE_MS,
    Values,
)

LIMITS = Limits(
    signal_payload_bytes=100,
    signals_per_run_per_minute=4,
    acceptance_retention_ms=90_000,
    batch_items=8,
    page_items=6,
    stream_bytes=100,
)
MINUTE = 60_000_000
MOST_RUNS = 8
SINKS = ("hook", "audit", "acme:hook")
STEPS_BACK = 12
"""How many operations are shown when a sequence fails."""

LoseRecord = Callable[[str, str, str], Awaitable[None] | None]


class Difference(AssertionError):
    """Two stores do not agree, or one breaks an invariant."""


@dataclass
class Subject:
    """A store under test, and how to lose a record of it."""

    name: str
    store: Store
    lose_record: LoseRecord


class World:
    """Some stores, a clock, a few nodes, and one source of chance."""

    def __init__(self, seed: int, clock: VirtualClock, subjects: Sequence[Subject]) -> None:
        self.values = Values(seed)
        self.clock = clock
        self.subjects = subjects
        self.reached: Counter[str] = Counter()
        self.held: list[Held] = []
        self.tried: list[tuple[Turn, Held]] = []
        self.won: list[Turn] = []
        self.taken: list[tuple[str, Job]] = []
        self.trace: list[tuple[str, Any]] = []
        self.picture: dict[str, Any] = {"runs": [], "waits": [], "tasks": [], "events": {}}
        self.folded: dict[str, int] = {}
        self.set_back_from = 0
        """The latest instant from which the clock was set back."""

    # --- asking all of them

    async def run(self, steps: int) -> None:
        """Do this many operations, and compare everything after each."""
        for node in NODES:
            await self.ask("next_due", node)
            await self.ask("renew", node, 60_000, [])
        for _ in range(steps):
            await self.values.weighted(OPERATIONS)(self)
            await self.compare_pictures()
        for subject in self.subjects:
            await subject.store.close()
        await self.ask("now")
        await self.ask("stats")

    async def ask(self, verb: str, *arguments: Any) -> Any:
        """Ask every store the same, and return the answer; None if it was an error."""
        self.trace.append((verb, arguments))
        outcome = f"find {type(arguments[0]).__name__}" if verb == "find" else verb
        answers = [await answer_of(getattr(subject.store, verb), arguments) for subject in self.subjects]
        if verb == "migrate":  # every store counts the versions of its own schema
            answers = [answer >= 1 for answer in answers]
        for subject, answer in zip(self.subjects, answers, strict=True):
            if plain(answer) != plain(answers[0]):
                self.fail(
                    f"{verb} is answered differently", (self.subjects[0].name, answers[0]), (subject.name, answer)
                )
        if isinstance(answers[0], HoldfastError):
            self.reached[f"{outcome}: raised {answers[0].code}"] += 1
            return None
        self._count(outcome, arguments, answers[0])
        return answers[0]

    async def compare_pictures(self) -> None:
        """Compare everything that can be read, and check what must hold in any store at any time."""
        pictures = [await read_picture(subject.store, NODES, (*QUEUES, *LIMITED_QUEUES)) for subject in self.subjects]
        for subject, picture in zip(self.subjects, pictures, strict=True):
            if picture != pictures[0]:
                self.differ("the contents are different", pictures[0], subject, picture)
        self.picture = pictures[0]
        self._check_invariants()

    def _check_invariants(self) -> None:
        for head in self.heads:
            history = self.picture["events"][head.run_id]
            if [event.run_seq for event in history] != list(range(1, head.version + 1)):
                self.fail(f"the history of {head.run_id} has a gap", ("history", history))
            if head.status in TERMINAL and (head.ready_at, head.lease_owner) != (None, None):
                self.fail("a finished run is ready or leased", ("head", head))
            if head.snapshot is not None and self.folded.get(head.run_id) != head.version:
                folded = runtime_snapshot(state_of(head.run_id, history))
                if folded != head.snapshot:
                    self.fail("a snapshot is not the fold", ("snapshot", head.snapshot), ("fold", folded))
                self.folded[head.run_id] = head.version

    def differ(self, problem: str, expected: Any, subject: Subject, found: Any) -> None:
        """End the sequence with the place where two stores begin to differ."""
        where, expected, found = narrowed(plain(expected), plain(found))
        self.fail(f"{problem} {where}".rstrip(), (self.subjects[0].name, expected), (subject.name, found))

    def fail(self, problem: str, *shown: tuple[str, Any]) -> None:
        """End the sequence with what is needed to understand it."""
        lines = [f"operation {len(self.trace)}: {problem}"]
        lines += [f"  {name}: {show(value)}" for name, value in shown]
        lines += ["the last operations:"]
        lines += [f"  {verb} {show(arguments)}" for verb, arguments in self.trace[-STEPS_BACK:]]
        raise Difference("\n".join(lines))

    # --- what is there, as the reference says

    @property
    def has_bucket(self) -> bool:
        """Whether one of the stores is a bucket."""
        return any("outbox" in subject.store.capabilities.lacking for subject in self.subjects)

    @property
    def reference(self) -> Store:
        """The store that decides what is asked next."""
        return self.subjects[0].store

    @property
    def heads(self) -> list[RunHead]:
        """All runs, as they were after the last step."""
        heads: list[RunHead] = self.picture["runs"]
        return heads

    @property
    def run_ids(self) -> list[str]:
        """The ids of all runs."""
        return [head.run_id for head in self.heads]

    def turning_points(self) -> list[int]:
        """Instants at which a lease, a timer, a record of acceptance or a crowded minute ends."""
        mailboxes = self.picture.get("mailboxes", {}).values()
        accepted = [kept.accepted_at for mailbox in mailboxes for kept in mailbox]
        ends = [at + length for at in accepted for length in (LIMITS.acceptance_retention_ms * 1_000, MINUTE)]
        dues = [*self.picture.get("next_due", {}).values(), *self.picture.get("next_visible", {}).values()]
        return [*ends, *(due for due in dues if due is not None)]

    async def hold(self, node: str, run: LoadedRun) -> Held:
        """Put a run into the hands of a node."""
        held = Held(node, run, tuple(await read_history(self.reference, run.head.run_id)))
        self.held = [*self.held[-11:], held]
        return held

    async def look_again(self, node: str, run_id: str) -> None:
        """Let a node load a run, as after a commit."""
        [run] = await self.reference.load([run_id])
        if run is not None and run.head.status not in TERMINAL:
            await self.hold(node, run)

    def is_current(self, held: Held) -> bool:
        """Return whether nothing has happened to a run since it was loaded."""
        there = {(head.run_id, head.version, head.lease_epoch) for head in self.heads}
        return (held.run.head.run_id, held.run.head.version, held.run.head.lease_epoch) in there

    def too_late(self) -> list[tuple[Turn, Held]]:
        """Return turns of runs that have finished since, as if they were computed after the end."""
        ends = {head.run_id: head for head in self.heads if head.status in TERMINAL}
        late = [
            (replace(turn, expected_version=end.version, epoch=end.lease_epoch), held)
            for turn, held in self.tried
            if (end := ends.get(turn.run_id)) is not None
        ]
        revived = [(replace(turn, events=()), held) for turn, held in late if turn.snapshot.status not in TERMINAL]
        return [(turn, held) for turn, held in late if turn.events] + self.values.some(revived, 2)

    def forget_purged(self) -> None:
        """Forget what was in hand of runs that are gone: an id that is used again is another run."""
        self.held = [held for held in self.held if held.run.head.run_id in self.run_ids]
        self.tried = [(turn, held) for turn, held in self.tried if held.run.head.run_id in self.run_ids]
        self.folded = {}

    # --- counting what was reached

    def _count(self, verb: str, arguments: tuple[Any, ...], answer: Any) -> None:
        if verb == "claim":
            for run in answer:
                self.reached[f"claim: {self._eligibility(arguments[0], run.head.run_id)}"] += 1
        elif isinstance(answer, PurgeReport):
            for field in answer.__struct_fields__:
                self.reached[f"purge: {field}"] += bool(getattr(answer, field))
            self.reached["purge: dry run"] += arguments[0].dry_run and answer != PurgeReport()
        elif verb == "acquire_limited_jobs":
            self.reached["acquire_limited_jobs: later"] += not answer[0] and answer[1] is not None
            for job in answer[0]:
                is_again = job.engine_attempt_id > job.first_engine_attempt_id
                self.reached[f"acquire_limited_jobs: {'again' if is_again else 'first'}"] += 1
        elif verb == "append_streams":
            for outcome in answer:
                end = outcome.error.code if isinstance(outcome, Refused) else _appended(outcome)
                self.reached[f"append_streams: {end}"] += 1
        elif verb == "read_streams":
            for page in answer:
                self.reached[f"read_streams: {'something' if page is not None and page.segments else 'nothing'}"] += 1
                self.reached["read_streams: begun anew"] += page is not None and any(
                    segment.restarted_from is not None for segment in page.segments
                )
        elif verb == "acquire_jobs":
            for job in answer:
                kinds = ("first", "again") if job.due_at is None else ("due", "again")
                self.reached[f"acquire_jobs: {kinds[job.engine_attempt_id > job.first_engine_attempt_id]}"] += 1
        elif verb == "heartbeat":
            for beat, is_kept in zip(arguments[1], answer, strict=True):
                self.reached[f"heartbeat: {'job' if beat.queue else 'own'} {'kept' if is_kept else 'lost'}"] += 1
        elif verb == "admit":
            for each in answer[0]:
                self.reached[f"admit: {each.status}{' and claimed' * (each.run is not None)}"] += 1
            self.reached["admit: none yet"] += answer[1] is not None and not answer[0]
        elif verb == "settle_dead_letters":
            for outcome in answer:
                end = outcome.error.code if isinstance(outcome, Refused) else outcome.action
                self.reached[f"settle_dead_letters: {end}"] += 1
        elif verb in ("create", "deliver", "commit"):
            for item, outcome in zip(arguments[0], answer, strict=True):
                self.reached[f"{verb}: {self._item_outcome(item, outcome)}"] += 1
        else:
            self.reached[f"{verb}: {'something' if answer else 'nothing'}"] += 1

    def _eligibility(self, node: str, run_id: str) -> str:
        owners = {head.run_id: head.lease_owner for head in self.heads}
        return "free" if owners[run_id] is None else "own" if owners[run_id] == node else "orphan"

    def _item_outcome(self, item: Any, outcome: Any) -> str:
        kind = type(item).__name__
        if kind == "NewRun" and item.reuse is not None:
            return f"id {_verdict_of(outcome)}"
        if isinstance(outcome, Refused):
            is_taken = kind == "NewRun" and "another run" in outcome.error.message
            return f"{kind} {outcome.error.code}{' of run ids' * is_taken}"
        if isinstance(outcome, CommitConflict):
            return f"conflict {outcome.reason}"
        if isinstance(outcome, Committed):
            if item.admission is not None:
                return "queued for admission"
            return "committed again" if any(item is turn for turn in self.won) else "committed"
        if isinstance(outcome, Created):
            if item.admission is not None:
                return f"created with admission{' and claimed' * outcome.epoch}"
            return "created and claimed" if outcome.epoch else "created"
        finished = {head.run_id for head in self.heads if head.status in TERMINAL}
        is_late = isinstance(outcome, Duplicate) and item.run_id in finished
        is_again = isinstance(outcome, Accepted) and kind == "SignalRequest" and self._was_accepted(item)
        return f"{kind} {type(outcome).__name__}{' after the end' * is_late}{' again' * is_again}"

    def _was_accepted(self, item: Any) -> bool:
        mailbox = self.picture.get("mailboxes", {}).get(item.run_id, ())
        return any((kept.name, kept.signal_id) == (item.name, item.signal_id) for kept in mailbox)


def _appended(outcome: Appended) -> str:
    return "appended" if outcome.head.dropped == 0 else "appended to a full stream"


def _verdict_of(outcome: Any) -> str:
    """Return what became of an id that may be taken."""
    if isinstance(outcome, Refused):
        is_proposal = outcome.error.details.get("restart_as") is not None
        return "is another by now" if is_proposal else f"refused: {outcome.error.code}"
    return type(outcome).__name__ + " reused" * getattr(outcome, "is_reused", False)


# --- the operations ---------------------------------------------------------------------------------------------------


async def create(world: World) -> None:
    """Create a few runs, for a node or for nobody."""
    values, now = world.values, world.clock.now()
    count = LIMITS.batch_items + 1 if values.happens(0.04) else values.number(1, 3)
    runs = [values.new_run(now, len(world.heads) >= MOST_RUNS) for _ in range(count)]
    if world.heads and values.happens(0.3):
        runs.append(values.reusing(world.heads, now, may_restart=len(world.heads) < MOST_RUNS + 3))
    await world.ask("create", runs, values.pick((None, *NODES)))


async def deliver(world: World) -> None:
    """Deliver signals, messages, and answers to tasks."""
    values, now = world.values, world.clock.now()
    answers = [message for held in world.held[-2:] for message in open_task_answers(values, held)]
    items: list[Any] = []
    for _ in range(LIMITS.batch_items + 1 if values.happens(0.03) else values.number(1, 4)):
        if answers and values.happens(0.2):
            items.append(values.pick(answers))
        elif world.heads and values.happens(0.1):
            items.append(values.outcome(world.heads, now))
        elif world.taken and values.happens(0.25):
            items.append(values.end_of(values.pick(world.taken)[1], now))
        elif values.happens(0.7):
            items.append(values.signal(world.run_ids, world.picture["waits"]))
        else:
            items.append(values.message(world.run_ids, now))
    await world.ask("deliver", items)


async def admit(world: World) -> None:
    """Admit queued runs, for a node or for none, by limits that are not always the same."""
    values = world.values
    limits = {plan: values.run_limit() for plan in values.some((*PLANS, MISSING), 3)}
    if values.happens(0.03):
        limits["order"] = RunLimit(at_once=0)
    node = values.pick((None, *NODES))
    admitted, _ = await world.ask("admit", limits, values.limit(), node) or ((), None)
    for each in admitted:
        if each.run is not None and node is not None:
            await world.hold(node, each.run)


async def claim(world: World) -> None:
    """Let a node claim, with or without a lease."""
    node = world.values.pick(NODES)
    plans = world.values.plans() if world.values.happens(0.3) else None
    for run in await world.ask("claim", node, world.values.limit(), plans) or ():
        await world.hold(node, run)


async def look_again(world: World) -> None:
    """Let a node load a run that it owns."""
    owned = [head for head in world.heads if head.lease_owner is not None]
    if owned:
        head = world.values.pick(owned)
        await world.look_again(head.lease_owner or "", head.run_id)


async def commit(world: World) -> None:
    """Commit turns: current ones, stale ones, wrong ones, old ones again, several of one run."""
    values, now = world.values, world.clock.now()
    batch: list[tuple[Turn, Held]] = []
    unlikely: list[tuple[Turn, Held]] = []
    latest = list({held.run.head.run_id: held for held in world.held}.values())
    in_hand = world.held if values.happens(0.2) else latest
    for held in values.some(in_hand, 3) or in_hand[-1:]:
        is_first = all(held.run.head.run_id != turn.run_id for turn, _ in batch)
        turn = random_turn(values, held, now)
        batch.append((turn, held))
        if is_first and values.happens(0.3) and world.is_current(held) and not held.after(turn).state.is_finished:
            # Right only if the turn before it wins, so it is not tried again.
            unlikely.append((random_turn(values, held.after(turn), now), held))
            batch.append(unlikely[-1])
        if values.happens(0.2):
            batch.append((spoiled(values, random_turn(values, held, now), held, now), held))
    if world.tried and values.happens(0.3):
        batch.append(values.pick(world.tried))
    if values.happens(0.3):
        unlikely += world.too_late()
        batch += unlikely[-1:]
    if batch and values.happens(0.02):
        batch = batch[:1] * (LIMITS.batch_items + 1)
    world.tried = [*world.tried[-30:], *(entry for entry in batch if entry not in unlikely)]
    turns = [turn for turn, _ in batch]
    for (turn, held), answer in zip(batch, await world.ask("commit", turns) or (), strict=False):
        if isinstance(answer, Committed):
            world.won.append(turn)
            if values.happens(0.7):  # the node goes on with the run; otherwise it believes that it was not told
                await world.look_again(held.node, turn.run_id)


async def release_held(world: World) -> None:
    """Queue a run that has not started for admission, rarely once more."""
    values = world.values
    in_hand = [held for held in world.held if held.run.head.status is PENDING and world.is_current(held)]
    if in_hand:
        world.clock.advance(us=1)
        turn = releasing_turn(values.pick(in_hand).run, values.admission_request())
        for _ in range(values.pick((1, 1, 2))):
            await world.ask("commit", [turn])


async def renew(world: World) -> None:
    """Renew the lease of a node, rarely in a way that is refused."""
    values = world.values
    node = values.pick(("", "a\nb")) if values.happens(0.03) else values.pick(NODES)
    lease_ms = values.pick((1, 1_000, 20_000, 60_000, 60_000, 120_000)) if values.happens(0.97) else 0
    await world.ask("renew", node, lease_ms, values.plans() if values.happens(0.3) else None, values.happens(0.2))


async def release(world: World) -> None:
    """Let a node let go of some runs, of runs that it does not own, or of everything."""
    values = world.values
    named = None if values.happens(0.3) else [*values.some(world.run_ids, 3), *values.some([MISSING], 1)]
    await world.ask("release", values.pick(NODES), named)


async def hand_over(world: World) -> None:
    """Let a node hand runs, its own and others, over to another one, which may be gone."""
    values = world.values
    run_ids = [*values.some(world.run_ids, 4), *values.some([MISSING], 1)]
    await world.ask("hand_over", values.pick(NODES), run_ids, values.pick((*NODES, MISSING)))


async def lock(world: World) -> None:
    """Let a node acquire, renew or release a host lock, which another one may have."""
    values = world.values
    name, node = values.pick(("relay", "retention")), values.pick(NODES)
    if values.happens(0.7):
        name = values.pick(BAD_NAMES) if values.happens(0.1) else name  # type: ignore[assignment]
        await world.ask("acquire_lock", name, node, values.pick((1_000, 20_000, 60_000)))
    else:
        await world.ask("release_lock", name, node, values.pick((1, 1, 2, 3)) if values.happens(0.9) else 2**70)
    await world.ask("find_locks")


async def bulletins(world: World) -> None:
    """Put bulletins, some under ids that are taken, and find those that have not expired."""
    values = world.values
    if world.has_bucket and world.clock.now() < world.set_back_from:
        return  # it keeps them by the hour of a clock that goes on: what had expired may be there again
    kind, names = values.pick(("sample", "answer")), values.some(["a", "b", "c", "d"], 3)
    name = values.pick(BAD_NAMES) if values.happens(0.1) else kind
    await world.ask("put_bulletins", name, {each: Raw(b"%d" % values.number(0, 9)) for each in names}, 20_000)
    await world.ask("find_bulletins", BulletinQuery(kind=kind, limit=values.pick((1, 100))))


async def change_schedule(world: World) -> None:
    """Commit a schedule from some revision, with runs or without, or delete it."""
    values = world.values
    schedule_id, revision = values.pick(("hourly", "nightly")), values.number(0, 3)
    if values.happens(0.1):
        await world.ask("delete_schedule", ("default", "default", "default", schedule_id), revision)
    else:
        due = values.pick((None, world.clock.now(), world.clock.now() + 5))
        queued = values.pick(((), (1, 2)))
        spec = ScheduleSpec(every_ms=values.pick((1_000, 1_000, 60_000, 1)))
        given = Schedule(
            schedule_id=schedule_id, app="a", workflow="order", spec=spec, next_due=due, queued=queued, input=Raw(b"1")
        )
        await world.ask("commit_schedule", given, revision)
    await world.ask("find", ScheduleQuery(by_due=values.happens(0.5), waiting=values.happens(0.3)))


async def acquire_jobs(world: World) -> None:
    """Let a node take jobs."""
    values = world.values
    queues, activities = values.some(QUEUES, 3), values.some(ACTIVITIES, 3)
    if values.happens(0.05):
        queues = [*queues, values.pick(BAD_NAMES)]  # type: ignore[list-item]
    node = values.pick(NODES)
    taken = await world.ask("acquire_jobs", node, queues, activities, values.limit(), values.pick(VISIBLE_MS))
    world.taken = [*world.taken[-20:], *((node, job) for job in taken or ())]


async def acquire_limited_jobs(world: World) -> None:
    """Let a node take calls that have room under limits, by numbers that are not always the same."""
    values = world.values
    if any(CALL_LIMITS in subject.store.capabilities.lacking for subject in world.subjects):
        return
    queues, activities = list(LIMITED_QUEUES), list(ACTIVITIES)
    if values.happens(0.2):
        queues, activities = values.some(queues, 2), values.some(activities, 3)
    if values.happens(0.03):
        queues = [*queues, "mail"]
    node, most, visible_ms = values.pick(NODES), values.limit(), values.pick(VISIBLE_MS)
    asked = node, queues, activities, values.call_limits(), most, visible_ms
    taken, _ = await world.ask("acquire_limited_jobs", *asked) or ((), None)
    world.taken = [*world.taken[-20:], *((node, job) for job in taken)]
    await world.ask("find", PlaceQuery(run_ids=tuple(world.run_ids)))


async def write_streams(world: World) -> None:
    """Let attempts append to streams, in the hands of a node or from a queue, and read what is there then."""
    values = world.values
    appends = []
    for _ in range(values.number(1, 3)):
        if world.taken and values.happens(0.4):
            node, job = values.pick(world.taken)
            appends.append(values.append(job.run_id, node, job.step_id, job.engine_attempt_id, None))
        elif world.held:
            held = values.pick(world.held)
            step_id, epoch = values.pick(STEPS[:2]), held.run.head.lease_epoch
            appends.append(values.append(held.run.head.run_id, held.node, step_id, values.number(1, 2), epoch))
    if values.happens(0.05):
        appends.append(values.append(MISSING, values.pick(NODES), "first", 1, 1))
    await world.ask("append_streams", appends)
    for run_id in {given.run_id for given in appends}:
        whole = [StreamRead(run_id=run_id, name=name) for name in STREAM_NAMES]
        await world.ask("read_streams", [*whole, values.stream_read(run_id)])
        await world.ask("find", StreamQuery(run_id=run_id, limit=values.limit()))


async def heartbeat(world: World) -> None:
    """Let a node beat for what it, or somebody else, has taken, and for runs that it may own."""
    values = world.values
    node = values.pick(NODES)
    mine = [job for taker, job in world.taken if taker == node or values.happens(0.1)]
    beats = [values.beat(world.run_ids, mine) for _ in range(values.number(0, 4))]
    await world.ask("heartbeat", node, beats, values.pick(VISIBLE_MS))


async def settle(world: World) -> None:
    """Settle dead letters: open ones, settled ones, and some that do not exist."""
    values = world.values
    known = [letter.letter_id for letter in world.picture.get("letters", ())]
    ids = [*values.some(known, 3), *values.some([MISSING], 1)]
    action = values.pick(("requeue", "requeue", "drop")) if values.happens(0.95) else "burn"
    await world.ask("settle_dead_letters", ids, action, values.pick(("", "ann")))


async def change_bus(world: World) -> None:
    """Store sinks and remove them, raise alerts, and let a sink get events again. Commits write the outbox."""
    values = world.values
    if world.has_bucket:
        return
    name = values.pick(SINKS)
    sink = Sink(
        name=name if values.happens(0.9) else "",
        kind="projection",
        tenant=values.pick((None, None, "acme")),
        workflows=tuple(values.some(("order", "refund %"), 2)),
        alerts=values.happens(0.5) and name != SINKS[0],
    )
    if values.happens(0.5):
        await world.ask("put_sink", sink)
    elif values.happens(0.4):
        since, run_id = values.pick((0, world.clock.now())), values.pick((None, None, MISSING, *world.run_ids))
        await world.ask("replay_outbox", OutboxReplay(name, since, run_id, values.number(1, 4)))
    elif values.happens(0.4):
        alerts = [alert_of("LATE", 2, "late", of=values.number(1, 5)) for _ in range(values.number(0, 3))]
        await world.ask("raise_alerts", alerts)
    else:
        await world.ask("remove_sink", values.pick((name, MISSING, "\ud800")))


async def pass_time(world: World) -> None:
    """Let time pass: a moment, longer than leases and records last, or exactly until something happens."""
    values, now = world.values, world.clock.now()
    us = values.pick((1, 999, 1_000, 1_000, 1_000_000, 1_000_000, 5_000_000, 15_000_000, 61_000_000, 95_000_000))
    turning_points = [instant for instant in world.turning_points() if instant > now + 1]
    if turning_points and values.happens(0.5):
        us = values.pick(turning_points) - now - values.pick((0, 0, 1))
    world.trace.append(("time passes", us))
    world.clock.advance(us=us)


async def set_clock_back(world: World) -> None:
    """Set the clock back."""
    ms = world.values.pick((1, 1_000, 61_000, 2 * LEASE_MS))
    world.trace.append(("the clock is set back", ms))
    world.set_back_from = max(world.set_back_from, world.clock.now())
    world.clock.set_back(ms=ms)


async def lose_record(world: World) -> None:
    """Lose the acceptance record of a signal behind every store's back."""
    values = world.values
    sent = [request for request in world.values.sent if request.signal_id is not None and request.run_id != MISSING]
    for request in values.some(sent, 3):
        scope = (request.run_id, request.name, request.signal_id or "")
        world.trace.append(("lose record", scope))
        for subject in world.subjects:
            losing = subject.lose_record(*scope)
            if losing is not None:
                await losing
        if values.happens(0.5):
            await world.ask("deliver", [request])


async def purge(world: World) -> None:
    """Purge, often after asking what a purge would do."""
    policy = world.values.purge_policy(world.run_ids)
    promised = await world.ask("purge", replace(policy, dry_run=True)) if world.values.happens(0.5) else None
    report = await world.ask("purge", policy)
    if promised not in (None, report):
        world.fail("a purge does not do what its dry run says", ("dry run", promised), ("purge", report))
    await world.compare_pictures()
    world.forget_purged()


async def read(world: World) -> None:
    """Ask one of the questions that change nothing."""
    values, run_ids, now = world.values, world.run_ids, world.clock.now()
    questions: list[tuple[str, tuple[Any, ...]]] = [
        ("find", (values.run_query(run_ids, now),)),
        ("find", (RunCountQuery(runs=values.run_query(run_ids, now)),)),
        ("find", (values.wait_query(run_ids),)),
        ("find", (values.mailbox_query(run_ids),)),
        ("find", (values.event_query(run_ids),)),
        ("find", (values.letter_query(run_ids),)),
        ("find", (values.finished_query(now),)),
        ("find", (values.task_query(run_ids, world.picture["tasks"]),)),
        ("read_events", (values.pick((*run_ids, MISSING)), values.number(-1, 5), values.pick((None, values.limit())))),
        ("load", ([*values.some(run_ids, 5), MISSING] * values.pick((1, 1, 1, 9)),)),
        ("next_due", (values.pick((*NODES, MISSING)), values.plans(), values.some((*QUEUES, *LIMITED_QUEUES), 3))),
        ("find", (PlaceQuery(run_ids=(*values.some(run_ids, 6), MISSING), limit=values.limit()),)),
        ("read_streams", ([values.stream_read(run_id) for run_id in (*values.some(run_ids, 4), MISSING)],)),
        ("find_orphaned", (values.pick((0, 0, 1_000, 60_000)),)),
        ("find_nodes", ()),
        values.pick(NONSENSE),
        ("now", ()),
        ("stats", ()),
        ("migrate", ()),
    ]
    for verb, arguments in values.some(questions, 4):
        await world.ask(verb, *arguments)


NONSENSE: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("load", (["\ud800"],)),
    ("read_events", ("\ud800",)),
    ("read_events", (MISSING, 2**70)),
    ("find", (RunQuery(tenant="\ud800"),)),
    ("find", (WaitQuery(after=("", "\ud800")),)),
    ("find", (MailboxQuery(run_id=MISSING, after=2**70),)),
    ("find", (EventQuery(after=((MISSING, 2**70),)),)),
    ("find", (TaskQuery(role="\ud800"),)),
    ("find", (DeadLetterQuery(after=(2**70, "")),)),
    ("settle_dead_letters", (["\ud800"], "drop")),
    ("next_due", ("\ud800",)),
    ("next_due", (MISSING, None, [""])),
    ("acquire_jobs", ("\ud800", ["mail"], ["charge"], 1, 1)),
    ("acquire_jobs", (MISSING, ["mail"], ["charge"], 1, 2**70)),
    ("read_streams", ([StreamRead(run_id=MISSING, name="tokens", after=2**70)],)),
    ("heartbeat", ("\ud800", [], 1)),
    ("heartbeat", (MISSING, [None], 1)),
    ("claim", ("\ud800", 1)),
    ("admit", ({}, 1, "\ud800")),
    ("release", ("\ud800",)),
    ("renew", (MISSING, 2**70)),
    ("find_orphaned", (2**70,)),
    ("hand_over", ("\ud800", [], MISSING)),
    ("hand_over", (MISSING, [], "\ud800")),
    ("hand_over", (MISSING, ["\ud800"], MISSING)),
)
"""What cannot even be looked up."""

OPERATIONS: list[tuple[int, Callable[[World], Awaitable[None]]]] = [
    (12, create),
    (20, deliver),
    (12, claim),
    (8, admit),
    (6, look_again),
    (26, commit),
    (4, release_held),
    (12, renew),
    (3, release),
    (4, hand_over),
    (4, lock),
    (3, bulletins),
    (5, change_schedule),
    (12, acquire_jobs),
    (14, acquire_limited_jobs),
    (8, write_streams),
    (10, heartbeat),
    (8, settle),
    (4, change_bus),
    (12, pass_time),
    (2, set_clock_back),
    (2, lose_record),
    (5, purge),
    (6, read),
]
