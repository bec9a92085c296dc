"""Creating runs: one for each request, whichever process crashes when.

A request is an object that holds the complete run to be created, and is written if there is none. It decides: a process
that finds a request without its run creates the run that it holds. If the id of that run belongs to another request,
the request is *void*, and may be replaced.
"""

from collections.abc import Sequence
from functools import partial
from urllib.parse import unquote

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from holdfast.clock import Secrets
from holdfast.core.audit import run_entry
from holdfast.core.instants import Instant
from holdfast.core.keys import storage_key
from holdfast.core.messages import Message, SignalRequest
from holdfast.core.restarts import RESTART_MARK, restart_number
from holdfast.errors import CallerError, InvalidInput, Overloaded
from holdfast.limits import Limits
from holdfast.store import decisions, port, validation
from holdfast.store.s3.admission import Admission
from holdfast.store.s3.bucket import Bucket, Stored
from holdfast.store.s3.head import StoredRun, decode_run, encode_run, note_audit, segment_key
from holdfast.store.s3.heads import Heads
from holdfast.store.s3.mirror import HEADS, Mirror, head_key

Sender = tuple[str, int]
"""A run, and the number of the item that it sends."""


class RequestRecord(Struct, frozen=True):
    """A request: which run it creates, and the run itself, as its head."""

    run_id: str
    input_sha256: str
    run: str
    mark: str


class Creator:
    """Creates runs."""

    def __init__(
        self, bucket: Bucket, mirror: Mirror, heads: Heads, admission: Admission, secrets: Secrets, limits: Limits
    ) -> None:
        self._admission = admission
        self._bucket = bucket
        self._mirror = mirror
        self._heads = heads
        self._secrets = secrets
        self._limits = limits

    async def create(
        self, new: port.NewRun, owner: str | None, now: Instant, order: int, started_by: Sender | None = None
    ) -> port.Created | port.Existing | port.Refused:
        """Create a run, or return the one that the same request has created, or why there is none."""
        problem = validation.check_new_run(new)
        if problem is not None:
            return port.Refused(problem)
        if new.reuse is None:
            return await self._create(new, owner, now, order, started_by)
        while True:
            verdict = await self._reuse(new, now)
            answer = verdict or await self._create(new, owner, now, order, started_by)
            if verdict is not None or not isinstance(answer, port.Refused) or not await self._is_overtaken(new):
                return answer

    async def _create(
        self, new: port.NewRun, owner: str | None, now: Instant, order: int, started_by: Sender | None
    ) -> port.Created | port.Existing | port.Refused:
        too_long = await self._too_long(new)
        if too_long is not None:
            return port.Refused(too_long)
        unfit = validation.check_first_signals(new, self._limits)
        run = StoredRun(new, owner, now, order)
        run.started_by = started_by
        signals = () if unfit is not None else deliver_first(run, new, self._limits, now)
        if new.reuse is not None and new.reuse.stop is not None:
            run.keep_outgoing(stopping(new, new.reuse.stop), now)
        if new.audit is not None:
            whose = (new.tenant, new.project, new.environment)
            note_audit(run, [run_entry(new.audit, new.run_id, whose, now)])
        place = f"requests/{new.request_key}"
        stored = None if unfit is not None else await self._request(place, run, None)
        while stored is None:
            found = await self._bucket.get(place)
            existing = None if found is None else await self._existing(new.request_key, found, now)
            if existing is not None:
                return await self._again(new, existing, started_by, now)
            if unfit is not None:
                taken = await self._mirror.fetch(new.run_id) is not None
                return port.Refused(decisions.run_id_taken(new.run_id) if taken else unfit)
            stored = await self._request(place, run, found)
        problem = await self._admit_and_write(run, owner, now)
        if problem is None:
            return port.Created(new.run_id, run.head.lease_epoch, signals)
        there = await self._mirror.fetch(new.run_id)
        if there is not None and there.run.request_key == new.request_key:
            return await self._again(new, there.run, started_by, now)
        mark = self._secrets.new_secret()[:24]
        void = msgspec.json.encode(RequestRecord("", new.input_sha256, "", mark))
        await self._bucket.replace(place, void, stored.etag, mark.encode())
        return port.Refused(problem)

    async def _reuse(self, new: port.NewRun, now: Instant) -> port.Existing | port.Refused | None:
        """Return the verdict on an id that may be taken; None if the run is to be created, provided the id is free."""
        assert new.reuse is not None
        found = await self._bucket.get(f"requests/{new.request_key}")
        if found is not None and await self._existing(new.request_key, found, now) is not None:
            return None  # the request was made before: it names the run that it has created
        latest = await self._latest(new.reuse.run_id)
        verdict = decisions.reuse_of(new, latest)
        if verdict is not None or latest is None:
            return verdict
        deliver_again = partial(deliver_to_latest, new=new, limits=self._limits, now=now)
        delivered = await self._heads.change(latest.run_id, deliver_again)
        if delivered is None and decisions.is_debounced(new):  # it was deleted meanwhile
            return await self._reuse(new, now)
        return decisions.accepted_before(new, latest, delivered or ())

    async def _latest(self, run_id: str) -> decisions.Taken | None:
        """Return the latest run of an id, as it is in the bucket now."""
        low, high = (head_key(run_id) + bound for bound in (RESTART_MARK, RESTART_MARK + ":"))
        listed = await self._bucket.list(HEADS, low, high)
        restarts = {unquote(each.key.rpartition("/")[2]) for each in listed if low < each.key < high}
        for found in sorted((each for each in restarts if restart_number(run_id, each)), reverse=True):
            held = await self._mirror.fetch(found)
            if held is not None:
                return held.run.taken
        held = await self._mirror.fetch(run_id)
        return None if held is None else held.run.taken

    async def _is_overtaken(self, new: port.NewRun) -> bool:
        """Return whether a run was refused because another one was created with the id that it was to get."""
        held = await self._mirror.fetch(new.run_id)
        return held is not None and held.run.request_key != new.request_key

    async def _too_long(self, new: port.NewRun) -> CallerError | None:
        """Return why the names of a run do not fit into keys of the bucket, before anything of it is stored."""
        keys = {"run_id": segment_key(new.run_id, 1, "x" * 24)}
        if new.admission is not None:
            keys["workflow"] = storage_key("admission", new.plan_id)
        for field, key in keys.items():
            problem = await self._bucket.unfit(key)
            if problem is not None:
                return InvalidInput(f"{field}: {problem.message}", field=field, most=problem.details["most"])
        return None

    async def is_requested(self, request_key: str) -> bool:
        """Return whether there is a request with this key; the request of a deleted run is deleted too."""
        return await self._bucket.get(f"requests/{request_key}") is not None

    async def _admit_and_write(self, run: StoredRun, owner: str | None, now: Instant) -> CallerError | None:
        """Write the first head of a run, after it got its place in the admission queue; or return why it is refused."""
        run_id = run.head.run_id
        if run.admission is None:
            return None if await self._heads.create(run) else decisions.run_id_taken(run_id)
        if await self._mirror.fetch(run_id) is not None:
            return decisions.run_id_taken(run_id)
        admitted = await self._admission.enter(run, now)
        if isinstance(admitted, Overloaded):
            return admitted
        if run_id in admitted and run.head.queued_at is not None:
            run.admit(now)
            if owner is not None:
                run.head = replace(run.head, lease_owner=owner, lease_epoch=1)
        if not await self._heads.create(run):
            await self._admission.leave(run.head.plan_id, run_id)
            return decisions.run_id_taken(run_id)
        await self._admission.release([other for other in admitted if other != run_id], now)
        return None

    async def _request(self, place: str, run: StoredRun, void: Stored | None) -> Stored | None:
        """Write a request if there is none, or replace a void one."""
        mark = self._secrets.new_secret()[:24]
        record = RequestRecord(run.head.run_id, run.input_sha256, encode_run(run.copy(), mark).decode(), mark)
        data = msgspec.json.encode(record)
        if void is None:
            return await self._bucket.create(place, data, mark.encode())
        return await self._bucket.replace(place, data, void.etag, mark.encode())

    async def _existing(self, request_key: str, found: Stored, now: Instant) -> StoredRun | None:
        """Return the run that a request has created; create it if it does not exist. None: the request is void."""
        record = msgspec.json.decode(found.data, type=RequestRecord)
        if not record.run_id:
            return None
        held = await self._mirror.fetch(record.run_id)
        if held is None:
            run = decode_run(record.run.encode(), f"requests/{request_key}")
            await self._admit_and_write(run, None, now)
            held = await self._mirror.fetch(record.run_id)
        return None if held is None or held.run.request_key != request_key else held.run

    async def _again(
        self, new: port.NewRun, run: StoredRun, started_by: Sender | None, now: Instant
    ) -> port.Created | port.Existing | port.Refused:
        """Answer a request that was made before."""
        run_id = run.head.run_id
        if run.input_sha256 != new.input_sha256:
            return port.Refused(decisions.request_conflict(run_id))
        if started_by is not None and run.started_by == started_by:  # it was relayed before
            return port.Created(run_id)
        requests = decisions.first_signals(new, run_id, run.head.plan_version)
        if not requests:
            return port.Existing(run_id)
        signals = await self._heads.change(run_id, lambda run: deliver_first(run, new, self._limits, now))
        return port.Existing(run_id, signals or ())


def stopping(new: port.NewRun, stop: SignalRequest) -> port.Turn:
    """Return what the first head of a replacing run sends to the run that it replaces."""
    return port.Turn(run_id=new.run_id, expected_version=len(new.events), epoch=0, snapshot=new.snapshot, sends=(stop,))


def deliver_first(run: StoredRun, new: port.NewRun, limits: Limits, now: Instant) -> tuple[port.Delivered, ...]:
    """Deliver the signals that come with a request."""
    requests = decisions.first_signals(new, run.head.run_id, run.head.plan_version)
    return deliver_all(run, requests, limits, now)


def deliver_to_latest(run: StoredRun, new: port.NewRun, limits: Limits, now: Instant) -> tuple[port.Delivered, ...]:
    """Deliver the signals of a start to the latest run of its id, as far as its present state allows."""
    return deliver_all(run, decisions.signals_to(new, run.taken), limits, now)


def deliver_all(
    run: StoredRun, items: Sequence[SignalRequest | Message], limits: Limits, now: Instant
) -> tuple[port.Delivered, ...]:
    """Deliver messages and signals to a run, in order."""
    return tuple(deliver_one(run, item, limits, now) for item in items)


def deliver_one(run: StoredRun, item: SignalRequest | Message, limits: Limits, now: Instant) -> port.Delivered:
    """Deliver a validated message or signal to a run."""
    problem = validation.check_item(item, limits)
    if problem is not None:
        return port.Refused(problem)
    if isinstance(item, Message):
        return run.deliver_message(item, now)
    answer = run.deliver_signal(item, limits, now)
    if isinstance(answer, port.Accepted) and item.audit is not None:
        whose = (run.head.tenant, run.head.project, run.head.environment)
        note_audit(run, [run_entry(item.audit, run.head.run_id, whose, now)])
    return answer
