"""Examines an installation: is the store sound, and can every unfinished run continue?

The facts come from the store (`store/health.py`) and are evaluated here. Runs that seem to wait for nothing, and a
sample of the others, are read in full and checked against the invariants (`core/invariants.py`). Nothing is changed,
and nodes may work meanwhile.
"""

import asyncio
import platform
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from importlib.metadata import version
from typing import Any

from msgspec import Struct

from holdfast.clock import Clock
from holdfast.core.bus import SinkStatus
from holdfast.core.call_limits import is_limited, shown_queue
from holdfast.core.index_rows import Task
from holdfast.core.instants import Instant, datetime_of
from holdfast.core.invariants import RunView, check
from holdfast.core.keys import FORK_TAG, RETRY_TAG, fork_tag, retry_tag
from holdfast.core.plans import level_of
from holdfast.core.state import FAILED, PAUSED, PENDING, RUNNING, state_of, was_paused_by
from holdfast.engine.abilities import abilities_of, lacks_of
from holdfast.engine.observe.takeovers import find_takeovers
from holdfast.errors import RunError, StoreCorrupt
from holdfast.store.decisions import is_free, name_of
from holdfast.store.health import (
    SECOND,
    Bounds,
    Facts,
    Finding,
    Untaken,
    fine,
    note,
    time_words,
    wrong,
)
from holdfast.store.inspect import view_of
from holdfast.store.payloads import concealed
from holdfast.store.port import HostLock, NodePlans, Plan, RunHead, RunQuery, SinkQuery, Stats, Store, TaskQuery

BOUNDS = Bounds()
TRIES = 3
"""How often a run that keeps changing is read. A run that makes progress all the time is not stuck."""

AT_ONCE = 4
"""How many runs are read concurrently: the default number of a store's connections."""

RECENT_US = 15 * 60_000_000
LISTED_ROWS = 1_000
"""How many runs and tasks are read to check that their rows are readable: the newest runs, and the first tasks."""

LOOKED_ROWS = 10_000
"""How many of the newest runs are searched for reruns of others."""

GOES_ON = "unfinished_runs_can_go_on"

FAILED_S = 3_600.0
"""The age in seconds up to which failed runs are reported."""

Progress = Callable[[int, int], None]
"""Called with the number of runs read so far, and the total."""


class Report(Struct, frozen=True, kw_only=True):
    """The findings. `looked` is false if the store could not be examined."""

    store: str
    looked: bool
    is_fine: bool
    findings: tuple[Finding, ...]
    runs_read: int = 0


class Picture(Struct, frozen=True, kw_only=True):
    """The data that the checks examine."""

    facts: Facts
    stats: Stats
    now: Instant
    bounds: Bounds
    missing: frozenset[Plan] = frozenset()
    nodes: tuple[NodePlans, ...] = ()
    locks: tuple[HostLock, ...] = ()
    sinks: tuple[SinkStatus, ...] = ()

    def since(self, instant: Instant) -> str:
        """Return how long ago that was, as text."""
        return time_words(self.now - instant)


async def examine(
    store: Store,
    clock: Clock,
    *,
    shown: str = "",
    bounds: Bounds = BOUNDS,
    thorough: bool = False,
    progress: Progress = lambda done, of: None,
) -> Report:
    """Examine a store. `clock` is this machine's; `shown` is the display name of the store."""
    skew = await _skew(store, clock, bounds)
    facts = await store.health(bounds, thorough=thorough)
    missing = frozenset(each.plan for each in await store.find_orphaned(int(bounds.late_s * 1_000)))
    nodes, stats = tuple(await store.find_nodes()), await store.stats()
    locks = tuple(await store.find_locks())
    picture = Picture(
        facts=facts,
        stats=stats,
        now=await store.now(),
        bounds=bounds,
        missing=missing,
        nodes=nodes,
        locks=locks,
        sinks=tuple(await store.find(SinkQuery(counted=True, limit=1_000))),
    )
    findings = [_versions(facts), *facts.findings, skew]
    for subject, judge, otherwise in CHECKS:
        findings += list(judge(picture)) or [fine(subject, otherwise)]
    findings += _sinks(picture)
    findings += await _paused(store, picture)
    findings += [await _retrying(store, picture), *await _failed(store, picture), await _overdue(store, picture)]
    findings += await _takeovers(store, picture)
    findings += await _unreadable(store, picture)
    read, of_runs = await _runs(store, picture, progress)
    return report_of(shown, findings + of_runs, runs_read=read)


def report_of(shown: str, findings: Iterable[Finding], **more: Any) -> Report:
    """Return the report with these findings."""
    found = tuple(findings)
    fields = {"looked": True, **more}
    return Report(store=shown, is_fine=all(each.level != "wrong" for each in found), findings=found, **fields)


# --- the installation ---------------------------------------------------------------------------------------------


def _versions(facts: Facts) -> Finding:
    versions = f"{facts.software}, Holdfast {version('holdfast')}, Python {platform.python_version()}"
    schema = f"the schema has version {facts.schema_version}"
    if facts.schema_version > facts.latest_version:
        sentence = f"{versions}; {schema}, and this Holdfast knows {facts.latest_version}"
        return note("versions", sentence, "a rolling upgrade is under way, or this Holdfast is an old one: upgrade it")
    return fine("versions", f"{versions}; {schema}")


async def _skew(store: Store, clock: Clock, bounds: Bounds) -> Finding:
    """Compare the store's time with this machine's, allowing for the time that the answer took."""
    before, there, after = clock.now(), await store.now(), clock.now()
    skew = max(before - there, there - after, 0)
    if skew >= bounds.skew_s * SECOND:
        which = "ahead of" if there > after else "behind"
        sentence = f"the store's clock is {time_words(skew)} {which} this machine's"
        advice = "let both follow a time server; runs go by the store's clock, so only logs disagree"
        return note("clock", sentence, advice)
    return fine("clock", "the store's clock and this machine's agree")


# --- what all runs have in common ---------------------------------------------------------------------------------


def _gone(picture: Picture) -> Iterator[Finding]:
    for gone in picture.facts.gone:
        advice = "start a node that knows their workflows: it takes them over"
        if gone.lease_until is None:
            sentence = f"{gone.runs} runs belong to the node {gone.node}, which is not known here"
            yield wrong("leases", sentence, "this is a mistake of ours: please report it")
        else:
            since = picture.since(gone.lease_until)
            yield wrong("leases", f"{gone.node} is gone for {since}, and {gone.runs} runs still belong to it", advice)


def _unclaimed(picture: Picture) -> Iterator[Finding]:
    nodes = picture.stats.nodes
    understood = max((each.abilities.level for each in abilities_of(picture.nodes)), default=0)
    for kind in picture.facts.unclaimed:
        version, level = level_of(kind.plan_version)
        if level > understood:
            sentence = (
                f"{kind.runs} runs of {kind.plan_id} version {version} need level {level} of the stored format, and no "
                f"node alive understands more than {understood}; the oldest is ready for {picture.since(kind.since)}"
            )
            yield wrong("ready runs", sentence, "start a node of the release that wrote them: nothing else claims them")
            continue
        sentence = (
            f"{kind.runs} runs of {kind.plan_id} version {version} are ready, the oldest for "
            f"{picture.since(kind.since)}, and no node claims them; there are {nodes} nodes"
        )
        advice = "see that a node with this workflow is running" if nodes else "start a node: `holdfast node`"
        if nodes and (kind.plan_id, kind.plan_version) in picture.missing:
            sentence += ", and none of them has this version"
            advice = "deploy it; until then runs that are due are paused"
        yield wrong("ready runs", sentence, advice)
    oldest = picture.stats.oldest_ready_at
    is_late = oldest is not None and oldest <= picture.now - picture.bounds.late_s * SECOND
    if oldest is not None and is_late and not picture.facts.unclaimed and not picture.facts.gone:
        sentence = f"a run has been ready for {picture.since(oldest)}, and the node that has it takes no turn"
        yield wrong("ready runs", sentence, "see what the nodes are busy with, or start more of them")


def _without_nodes(picture: Picture) -> Iterator[Finding]:
    unfinished = picture.stats.runs.get(RUNNING, 0) + picture.stats.runs.get(PENDING, 0)
    if unfinished and not any(each.abilities.workflows for each in abilities_of(picture.nodes)):
        runs = "1 run is" if unfinished == 1 else f"{unfinished} runs are"
        sentence = f"{runs} not finished, and no node that runs workflows is alive"
        yield note("nodes", sentence, "start a node, unless none should run now: `holdfast node`")


def _untaken(picture: Picture) -> Iterator[Finding]:
    for kind in picture.facts.untaken:
        if is_limited(kind.queue):
            yield from _waiting_for_places(picture, kind)
            continue
        sentence = (
            f"{kind.jobs} jobs of {kind.activity} wait in the queue {kind.queue}, the oldest for "
            f"{picture.since(kind.since)}"
        )
        advice = f"start a node that knows it, or more of them: `holdfast node --queue {kind.queue}`"
        yield wrong("queues", sentence, advice)


def _waiting_for_places(picture: Picture, kind: Untaken) -> Iterator[Finding]:
    """Judge calls that wait for a place under their limit: that is normal if there is a node that would take them."""
    queue = shown_queue(kind.queue)
    what = f"call of {kind.activity} waits" if kind.jobs == 1 else f"calls of {kind.activity} wait"
    sentence = f"{kind.jobs} {what} for a place under the limit, the oldest for {picture.since(kind.since)}"
    able = [each.abilities for each in abilities_of(picture.nodes)]
    if any(queue in each.queues if queue else kind.activity in each.activities for each in able):
        yield note("queues", sentence, "raise the limit in the code, if what it protects allows more")
    else:
        more = f" --queue {queue}" if queue else ""
        sentence += ", and no node takes them"
        yield wrong("queues", sentence, f"start a node that knows it: `holdfast node{more}`")


def _lacking(picture: Picture) -> Iterator[Finding]:
    for activity, (plan_id, plan_version) in sorted(lacks_of(picture.nodes)):
        sentence = (
            f"runs of {plan_id} version {plan_version} wait for the activity {activity!r}, and no node alive has both"
        )
        yield wrong("activities", sentence, "start a node that has both: they go on by themselves")


def _late_writes(picture: Picture) -> Iterator[Finding]:
    for node in abilities_of(picture.nodes):
        late = node.abilities.late_writes
        if late is not None:
            sentence = (
                f"{late.count} writes of node {name_of(node.node)} took longer than its budget of {late.budget_ms} ms "
                f"within the last hour, the slowest {late.slowest_ms} ms"
            )
            yield wrong("write latency", sentence, "see what the store waits for: disk, locks, network")


def _retried(picture: Picture) -> Iterator[Finding]:
    found = picture.facts.retried
    if found:
        most = max(attempts for _, attempts in found)
        sentence = f"runs have messages that cannot be handled, and are retried; they were tried up to {most} times"
        advice = "see the log of the nodes; they become dead letters if it goes on"
        yield note("poison", sentence, advice, dict.fromkeys(run_id for run_id, _ in found))


def _locks(picture: Picture) -> Iterator[Finding]:
    for lock in picture.locks:
        node = name_of(lock.owner)
        if not is_free(lock, picture.now):
            yield fine("locks", f"{node} has the lock {lock.name} for {picture.since(lock.acquired_at)}")
        else:
            since = picture.since(min(lock.lease_until, picture.now))
            sentence = f"{node} held the lock {lock.name} last, and it has been free for {since}"
            yield note("locks", sentence, "start a node: the first one that has this duty takes it over")


def _sinks(picture: Picture) -> Iterator[Finding]:
    for status in picture.sinks:
        name, oldest = status.sink.name, status.oldest_at
        waits = "" if oldest is None else f"; {status.backlog} entries wait, the oldest for {picture.since(oldest)}"
        if status.dead_letters:
            sentence = f"sink {name} has {status.dead_letters} dead letters"
            again = f"`holdfast bus bulk requeue --sink {name}` sends all of them again"
            yield wrong("bus", sentence, f"`holdfast bus letters --sink {name}` shows them, {again}")
        if status.failures:
            sentence = f"sink {name} has failed {status.failures} times in a row: {status.error}{waits}"
            yield wrong("bus", sentence, f"fix the cause; `holdfast sink resume {name}` tries it at once")
        elif status.sink.is_paused:
            yield note("bus", f"sink {name} is paused{waits}", f"`holdfast sink resume {name}`")
        else:
            yield fine("bus", f"sink {name} has got {status.delivered} events{waits}")


def _letters(picture: Picture) -> Iterator[Finding]:
    if picture.stats.dead_letters:
        count = picture.stats.dead_letters
        sentence = f"{count} dead {'letter is' if count == 1 else 'letters are'} not settled"
        again = "`holdfast dead-letter bulk requeue` has all of them handled again"
        yield wrong("dead letters", sentence, f"`holdfast dead-letter list` shows them, {again}")


def _mailbox(picture: Picture) -> Iterator[Finding]:
    oldest = picture.facts.oldest_signal
    if oldest is not None and oldest[1] <= picture.now - picture.bounds.mailbox_s * SECOND:
        sentence = f"a signal has been in a mailbox for {picture.since(oldest[1])}, and no wait has taken it"
        yield note("mailboxes", sentence, "`holdfast signal mailbox RUN-ID`: is its name the right one?", oldest[:1])


CHECKS: tuple[tuple[str, Callable[[Picture], Iterable[Finding]], str], ...] = (
    ("leases", _gone, "no run belongs to a node that is gone"),
    ("nodes", _without_nodes, "no run is without a node that could continue it"),
    ("ready runs", _unclaimed, "no run has been ready for long"),
    ("queues", _untaken, "no job has waited for long"),
    ("activities", _lacking, "no run waits for an activity that no node has"),
    ("write latency", _late_writes, "no node has had a write over its budget within the last hour"),
    ("poison", _retried, "no message is retried again and again"),
    ("locks", _locks, "no host lock is held"),
    ("dead letters", _letters, "there is none that is not settled"),
    ("mailboxes", _mailbox, "no signal has waited for long"),
)
"""Each check, with the text for a check that finds nothing."""


_WHEN_MENDED = "`holdfast run show RUN-ID` shows why; when that is fixed, `holdfast run bulk resume SEARCH`"
_TO_RESUME = {
    "VersionMismatch": "deploy the version that each was started with, then requeue its dead letters, or "
    "`holdfast run bulk resume SEARCH`",
    "UnhandledError": "fix the code and deploy it: the runs continue by themselves. `holdfast run bulk resume SEARCH` "
    "tries again where the code was not at fault, `holdfast run bulk cancel SEARCH` gives them up",
    "NondeterminismError": "deploy code that fits their histories, with `hf.patched` or the former code: they go on by "
    "themselves. `holdfast check-histories TARGET` names every difference",
    "PoisonTurn": "each of its turns crashed the process of the node: see those logs, fix the cause, then "
    "`holdfast run resume RUN-ID` to try once more, or `holdfast run terminate RUN-ID`",
}
"""The advice for runs that were paused with this code."""


async def _unreadable(store: Store, picture: Picture) -> list[Finding]:
    """Report damaged rows in lists. Damage in runs that are read in full is reported there."""
    found: list[Finding] = []
    bounds, read = picture.bounds, {*dict(picture.facts.suspects), *picture.facts.sample}
    advice = "see when a backup has it whole; what can be read is listed, and goes on"
    newest = (await store.find(RunQuery(limit=LISTED_ROWS, newest=True))).unreadable
    runs = [run_id for run_id in newest if run_id not in read]
    tasks = (await store.find(TaskQuery(limit=LISTED_ROWS))).unreadable
    if runs:
        found.append(wrong("runs", f"{len(runs)} rows of runs cannot be read", advice, runs[: bounds.listed]))
    if tasks:
        named = ", ".join(tasks[: bounds.listed])
        found.append(wrong("tasks", f"{len(tasks)} rows of tasks cannot be read: {named}", advice))
    return found


_TO_RETRY = (
    "when the cause is fixed, `holdfast run bulk retry_step SEARCH` tries the step again, and they go on; "
    "`holdfast run show RUN-ID` shows one. `holdfast run bulk raise SEARCH` would raise the error in the workflow, and "
    "fail a run that does not catch it"
)


async def _paused(store: Store, picture: Picture) -> list[Finding]:
    """Report the runs that were paused by an error, not by an operator."""
    if not picture.stats.runs.get(PAUSED):
        return [fine("paused runs", "there is none")]
    heads = await store.find(RunQuery(status=PAUSED, newest=True, limit=LISTED_ROWS))
    more = "at least " if len(heads) >= LISTED_ROWS else ""
    by_cause: dict[tuple[str, str, str], list[RunHead]] = {}
    for head in heads:
        cause = _cause_of_pause(head)
        if cause is not None:
            by_cause.setdefault(cause, []).append(head)
    found = []
    for (code, words, search), some in sorted(by_cause.items()):
        advice = _TO_RETRY if words.startswith(FAILED_STEP) else _TO_RESUME.get(code, _WHEN_MENDED)
        found.append(
            wrong(
                "paused runs",
                f"{more}{_runs_were(len(some))} paused by {words.replace('STEPS', _steps_of(some))}",
                _filled(advice, some, f'--status PAUSED --text "{search}"'),
                _some(some, picture),
                f"status:paused with:children {search}",
            )
        )
    operators = len(heads) - sum(map(len, by_cause.values()))
    return found or [fine("paused runs", f"{more}{_runs_were(operators)} paused by operators")]


FAILED_STEP = "a failed step: STEPS"


def _cause_of_pause(head: RunHead) -> tuple[str, str, str] | None:
    """Return the code of the error that has paused a run, its description, and a search text; None if no error has.

    A run that an operator has paused may have failed before, which is not the cause.
    """
    snapshot = head.snapshot
    if snapshot is None or snapshot.last_error is None:
        return None
    error = snapshot.last_error
    if snapshot.failed_step_ids:
        return error.code, f"{FAILED_STEP} with {error.code}", error.code
    if not was_paused_by(snapshot.pause, error):
        return None
    if error.code != "UnhandledError":
        return error.code, error.code, error.code
    raised = error.message.partition(";")[0]
    place = raised.rpartition(" at ")[2].replace("\\", "/").rpartition("/")[2]
    return error.code, f"{error.code}: {raised}", error.code + (f" {place}" if place and " " not in place else "")


def _steps_of(heads: list[RunHead]) -> str:
    """List the steps that have failed, the most frequent first."""
    counts = Counter(step for head in heads if head.snapshot for step in head.snapshot.failed_step_ids)
    return ", ".join(step for step, _ in counts.most_common(3)) + (" and others" if len(counts) > 3 else "")


def _filled(advice: str, heads: list[RunHead], search: str) -> str:
    """Return advice that can be typed as it is: with the id of a run, and with the search that finds all of them."""
    return advice.replace("RUN-ID", heads[0].run_id).replace("SEARCH", search)


async def _retrying(store: Store, picture: Picture) -> Finding:
    """Report the activities that fail and are being retried, with their errors."""
    heads: list[RunHead] = []
    for status in (RUNNING, PAUSED):  # by status, which has an index: otherwise all finished runs would be read
        heads += await store.find(RunQuery(status=status, retrying=True, newest=True, limit=LISTED_ROWS))
    if not heads:
        return fine("retries", "no activity is tried again")
    by_error: dict[tuple[str, str], int] = {}
    most = 0
    for head in heads:
        if head.snapshot is not None and head.snapshot.retrying is not None:
            again = head.snapshot.retrying
            by_error[again.activity, again.error_code] = by_error.get((again.activity, again.error_code), 0) + 1
            most = max(most, again.failures)
    named = sorted(by_error.items(), key=lambda each: -each[1])[:3]
    what = ", ".join(f"{activity} with {code} ({count})" for (activity, code), count in named)
    often = "once" if most == 1 else f"up to {most} times"
    sentence = f"activities of {_runs_of(heads)} are tried again, and have failed {often}: {what}"
    advice = "when what they call is back, `holdfast run bulk try_now --retrying` does not wait for their next attempts"
    return note("retries", sentence, advice, _some(heads, picture), "is:retrying with:children")


async def _failed(store: Store, picture: Picture) -> list[Finding]:
    """Report the runs that have failed recently and were not rerun, by their errors."""
    since = picture.now - round(FAILED_S * SECOND)
    heads = await store.find(RunQuery(status=FAILED, finished_from=since, newest=True, limit=LISTED_ROWS))
    more = "at least " if len(heads) >= LISTED_ROWS else ""
    again = await _done_again(store, since) if heads else frozenset()
    by_code: dict[str, list[RunHead]] = {}
    for head in heads:
        if again.isdisjoint((retry_tag(head.run_id), fork_tag(head.run_id))):
            code = head.snapshot.last_error_code if head.snapshot is not None else None
            by_code.setdefault(code or "", []).append(head)
    advice = (
        "`holdfast run show RUN-ID` says why; when that is fixed, `holdfast run bulk retry SEARCH` goes on from where "
        "each has failed, and `holdfast run bulk retry_from_start SEARCH` does them again"
    )
    found = [
        note(
            "failed runs",
            f"{more}{_runs_have(some)} failed with {code or 'an error'} within the last hour",
            _filled(advice, some, f'--status FAILED --finished-from 1h --text "{code}"'),
            _some(some, picture),
            f"status:failed with:children finished_at>={datetime_of(since):%Y-%m-%dT%H:%M:%SZ} {code}",
        )
        for code, some in sorted(by_code.items(), key=lambda each: -len(each[1]))[: picture.bounds.listed]
    ]
    done = " that was not done again" if heads else ""
    return found or [fine("failed runs", f"none has failed within the last hour{done}")]


async def _done_again(store: Store, since: Instant) -> frozenset[str]:
    """Return the tags of the runs that were started since then to rerun or continue others."""
    found: list[RunHead] = []
    for kind in (RETRY_TAG, FORK_TAG):
        query = RunQuery(text=kind, created_from=since, newest=True, limit=LISTED_ROWS, look=LOOKED_ROWS)
        found += await store.find(query)
    return frozenset(tag for head in found for tag in head.tags)


async def _overdue(store: Store, picture: Picture) -> Finding:
    """Count the overdue tasks."""
    tasks = await store.find(TaskQuery(status="OPEN", due_before=picture.now, limit=LISTED_ROWS))
    if not tasks:
        return fine("tasks", "none is overdue")
    oldest = min(task.due_at for task in tasks if task.due_at is not None)
    more = "at least " if len(tasks) >= LISTED_ROWS else ""
    are, which = ("task is", "") if len(tasks) == 1 else ("tasks are", "the oldest ")
    whose = sorted(Counter(map(_whose, tasks)).items(), key=lambda each: (-each[1], each[0]))
    named = ", ".join(f"{who} ({count})" for who, count in whose[:3])
    sentence = f"{more}{len(tasks)} {are} overdue, {which}for {picture.since(oldest)}: {named}"
    advice = (
        "`holdfast task list --overdue` shows them to those they are for, and to an admin; "
        "`holdfast task bulk reassign --overdue --to NAME` gives them to somebody"
    )
    return note("tasks", sentence, advice, dict.fromkeys(task.run_id for task in tasks[: picture.bounds.listed]))


def _whose(task: Task) -> str:
    """Return whom a task is for, as text."""
    if task.assignee is not None:
        return f"of {task.assignee}"
    return f"for {' or '.join(task.roles)}" if task.roles else "for everybody"


async def _takeovers(store: Store, picture: Picture) -> list[Finding]:
    """Report the nodes that recently ended without stopping; other nodes have taken over their runs."""
    found = await find_takeovers(store, picture.now - RECENT_US, LISTED_ROWS)
    if not found:
        return [fine("takeovers", "no node has gone on with runs of another one of late")]
    last = found[-1]
    node, other = last.takeover.node, last.takeover.taken_from
    gone = {each.takeover.taken_from for each in found}
    total = sum(each.takeover.runs for each in found)
    runs = "1 run" if total == 1 else f"{total} runs"
    if len(gone) > 1:
        sentence = (
            f"{len(gone)} nodes ended without stopping within the last quarter of an hour, and others have taken over "
            f"{runs}; the last was {other}, {picture.since(last.at)} ago"
        )
        advice = "see in the logs of the nodes that are gone, or of their machines, why they ended"
        return [note("takeovers", sentence, advice)]
    of = "its former process" if other == node else other
    sentence = f"{node} has taken over {runs} of {of} {picture.since(last.at)} ago"
    return [note("takeovers", sentence, "see in the log of the node that is gone, or of its machine, why it ended")]


def _some(heads: list[RunHead], picture: Picture) -> list[str]:
    return [head.run_id for head in heads[: picture.bounds.listed]]


def _runs_of(heads: list[RunHead]) -> str:
    more = "at least " if len(heads) >= LISTED_ROWS else ""
    return "1 run" if len(heads) == 1 else f"{more}{len(heads)} runs"


def _runs_have(heads: list[RunHead]) -> str:
    return "1 run has" if len(heads) == 1 else f"{len(heads)} runs have"


def _runs_were(count: int) -> str:
    return "1 run was" if count == 1 else f"{count} runs were"


# --- runs, one by one ---------------------------------------------------------------------------------------------


async def _runs(store: Store, picture: Picture, progress: Progress) -> tuple[int, list[Finding]]:
    """Read the suspects and the sample; return how many could be read, and the findings."""
    suspects = dict(picture.facts.suspects)
    run_ids = list(dict.fromkeys([*suspects, *picture.facts.sample]))
    findings: list[Finding] = []
    stuck: dict[str, list[str]] = {}
    broken: dict[str, list[str]] = {}
    read = 0
    async for run_id, view in _views(store, run_ids, picture.bounds, progress):
        if isinstance(view, StoreCorrupt):
            findings.append(_damaged(view, run_id))
        if not isinstance(view, RunView):
            continue
        read += 1
        violations = check(view)
        why = [
            violation.problem for violation in violations if violation.invariant == GOES_ON and not _rests_in_code(view)
        ]
        for problem in why or (_in_vain(view) if suspects.get(run_id) == view.version else []):
            stuck.setdefault(problem, []).append(run_id)
        for violation in violations:
            if violation.invariant != GOES_ON:
                broken.setdefault(f"{violation.invariant}: {violation.problem}", []).append(run_id)
    findings += _stuck(stuck, picture.bounds) or [fine("stuck runs", "every run that was looked at can go on")]
    sound = fine("runs", f"{_runs_were(read)} read in full, and nothing is amiss")
    findings += _broken(broken, picture.bounds) or ([sound] if run_ids or picture.bounds.sample_runs else [])
    return read, findings


async def _views(
    store: Store, run_ids: list[str], bounds: Bounds, progress: Progress
) -> AsyncIterator[tuple[str, RunView | StoreCorrupt | None]]:
    """Read runs, a few concurrently: a server may be far away."""
    for start in range(0, len(run_ids), AT_ONCE):
        some = run_ids[start : start + AT_ONCE]
        for found in zip(some, await asyncio.gather(*(_view(store, run_id, bounds) for run_id in some)), strict=True):
            yield found
        progress(start + len(some), len(run_ids))


async def _view(store: Store, run_id: str, bounds: Bounds) -> RunView | StoreCorrupt | None:
    try:
        [run] = await store.load([run_id])
        if run is None or run.head.version > bounds.sample_events:
            return None
        return concealed(await view_of(store, run_id, tries=TRIES))  # without keys, encrypted values count as equal
    except StoreCorrupt as damage:
        return damage


def _rests_in_code(view: RunView) -> bool:
    """Return whether a run waits for the next signal or update in its own code (`wait_until`), which is not a step.

    A message that has already arrived must make it ready.
    """
    try:
        state = state_of(view.run_id, view.events)
    except RunError:
        return False  # another invariant reports it
    is_between_steps = all(step.kind == "update" for step in state.open_steps.values())
    return state.status is RUNNING and is_between_steps and not view.messages


def _in_vain(view: RunView) -> list[str]:
    """Return what a suspect waits for that will never come: a step without a job and without an unfinished child.

    That was the case at the run's present version, and nothing of it has changed since.
    """
    try:
        steps = state_of(view.run_id, view.events).open_steps.values()
    except RunError:
        return []  # another invariant reports it
    if view.is_finished or view.is_in_hand or view.ready_at is not None or any(step.is_detached for step in steps):
        return []
    in_queues = [f"step {step.step_id!r} has no job in the queue {step.queue!r}" for step in steps if step.queue]
    children = [f"step {step.step_id!r} waits for a child that has ended" for step in steps if step.kind == "child"]
    return in_queues + children


def _unfinished(count: int) -> str:
    return "1 unfinished run" if count == 1 else f"{count} unfinished runs"


def _stuck(stuck: dict[str, list[str]], bounds: Bounds) -> list[Finding]:
    advice = "skip or retry the step (`holdfast run skip`, `retry-step`), or cancel the run; and please report it"
    return [
        wrong(
            "stuck runs",
            f"nothing will wake {_unfinished(len(run_ids))}: {problem}",
            advice,
            run_ids[: bounds.listed],
        )
        for problem, run_ids in list(stuck.items())[: bounds.listed]
    ]


def _broken(broken: dict[str, list[str]], bounds: Bounds) -> list[Finding]:
    advice = "keep a copy of the store, and please report it; other runs go on"
    return [
        wrong("runs", f"what must always hold does not: {problem}", advice, run_ids[: bounds.listed])
        for problem, run_ids in list(broken.items())[: bounds.listed]
    ]


def _damaged(damage: StoreCorrupt, run_id: str) -> Finding:
    named = [run_id] if run_id else []
    return wrong("runs", f"a run cannot be read: {damage.message}", "see when a backup has it whole", named)
