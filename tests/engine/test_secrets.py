"""Secrets: references in histories, values in attempts, and where the values come from."""

import asyncio
import io
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, NamedTuple, NewType, TypedDict, TypeVar

import pydantic
import pytest
from msgspec import Struct

import holdfast as hf
from holdfast import testing
from holdfast.core import codec
from holdfast.core import events as e
from holdfast.engine.activities.secrets import resolve_secrets
from holdfast.engine.check_histories import check_store
from holdfast.engine.observe.logs import PlainFormatter
from holdfast.errors import ActivityFailed, InvalidInput, NotDurable, RunCancelled, SecretNotFound, SecretsUnavailable
from holdfast.limits import NAME_BYTES, SECRET_BYTES, SECRETS
from tests.engine.harness import EngineVariant, wait_for_event

pytestmark = pytest.mark.contract("SEC-1")

T = TypeVar("T")
KEY = hf.Secret("stripe/key")
VALUE = "sk_live_51HxYzAbC"
HAS = {"stripe/key": VALUE}
B = hf.Secret("b")
SCOPE = hf.SecretScope("acme", "live")
ONCE = hf.Retry(max_attempts=1)
QUICK = hf.Retry(max_attempts=3, initial_ms=1, factor=1.0, jitter=0.0)


class Vault:
    """A provider that notes what it is asked for. What it has may be a function of the scope and the call's number."""

    def __init__(self, has: Mapping[str, Any] | Callable[[hf.SecretScope, int], Mapping[str, Any]] = HAS) -> None:
        self._has = has
        self.asked: list[tuple[list[str], hf.SecretScope]] = []

    async def resolve(self, refs: Sequence[str], scope: hf.SecretScope) -> Mapping[str, str]:
        """Return what there is."""
        self.asked.append((list(refs), scope))
        has = self._has(scope, len(self.asked)) if callable(self._has) else self._has
        return {ref: has[ref] for ref in refs if ref in has}


class Card(Struct):
    """Something with a secret in it."""

    number: str
    key: hf.Secret


@dataclass
class Account:
    """Something with secrets deep in it."""

    cards: list[Card]
    by_name: dict[str, hf.Secret]
    other: hf.Secret | None = None


def length_of(secret: hf.Secret) -> str:
    """Return what shows that a value was there, and does not show the value."""
    return f"{secret.name}: {len(secret.reveal())}"


def text_of(events: Sequence[hf.Event]) -> str:
    """Return everything that events say."""
    return "\n".join(f"{event.event_type} {codec.encode_body(event.data)}" for event in events)


# --- references


def test_a_reference_shows_its_name_and_is_stored_by_it() -> None:
    assert repr(KEY) == str(KEY) == "Secret('stripe/key')"
    assert bytes(codec.encode({"key": KEY})) == b'{"key":{"$secret":"stripe/key"}}'
    assert codec.decode(b'{"$secret":"stripe/key"}', hf.Secret) == KEY
    assert len({KEY, hf.Secret("stripe/key")}) == 1


@pytest.mark.parametrize(
    "name", ["", "/", "a/", "/a", "a//b", ".", "..", "a/../b", "a/.", "a\x00b", "a\nb", "x" * (NAME_BYTES + 1), 7, None]
)
def test_a_wrong_name_is_refused_where_it_is_given_and_where_it_is_read(name: Any) -> None:
    with pytest.raises(InvalidInput) as refused:
        hf.Secret(name)
    assert refused.value.code == "InvalidInput"
    with pytest.raises(InvalidInput):
        codec.decode(json.dumps({"$secret": name}).encode(), hf.Secret)


async def test_a_value_is_not_available_outside_of_activities() -> None:
    with pytest.raises(NotDurable, match="only available inside an activity"):
        KEY.reveal()
    with testing.secrets({"stripe/key": VALUE}):
        assert KEY.reveal() == VALUE
        with pytest.raises(NotDurable, match="was not resolved"):
            hf.Secret("other").reveal()
    with pytest.raises(NotDurable):
        KEY.reveal()


# --- attempts


@pytest.mark.parametrize("queue", ["", "far"], ids=["local", "queued"])
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "thread"])
async def test_an_activity_gets_values_and_a_history_references(
    variant: EngineVariant, queue: str, is_async: bool
) -> None:
    vault = Vault({"stripe/key": VALUE, "a": "value-of-a", "b": "value-of-b!", "option": "an-option's"})
    app = hf.App("shop", secrets=vault)

    def look(account: Account, key: hf.Secret, more: hf.Secret = B) -> list[str]:
        found = [*(card.key for card in account.cards), *account.by_name.values(), key, more, hf.Secret("option")]
        return [length_of(secret) for secret in found]

    async def look_async(account: Account, key: hf.Secret, more: hf.Secret = B) -> list[str]:
        await asyncio.sleep(0)
        return look(account, key, more)

    chosen: Any = look_async if is_async else look
    activity = app.activity(name="look", queue=queue, secrets=["option"], retry=ONCE)(chosen)

    @app.workflow
    async def work(key: hf.Secret) -> list[str]:
        with pytest.raises(NotDurable, match="not for workflows"):
            key.reveal()
        account = Account([Card("1", hf.Secret("a"))], {"b": hf.Secret("b")})
        found: list[str] = await activity(account, key)
        return found

    async with variant.node(app, queues=("far",)):
        run = await app.start(work, KEY, tenant="acme", environment="live")
        assert await run.result() == ["a: 10", "b: 11", "stripe/key: 17", "b: 11", "option: 11"]
        history = await run.events()
    assert vault.asked == [(["a", "b", "option", "stripe/key"], SCOPE)]
    [started] = [event.data for event in history if isinstance(event.data, e.StepStarted)]
    assert json.loads(bytes(started.input)) == {
        "account": {
            "cards": [{"number": "1", "key": {"$secret": "a"}}],
            "by_name": {"b": {"$secret": "b"}},
            "other": None,
        },
        "key": {"$secret": "stripe/key"},
    }
    assert json.loads(bytes(started.options))["secrets"] == [{"$secret": "option"}]


class Tagged(TypedDict):
    """A secret in a typed dict."""

    key: hf.Secret


class Pair(NamedTuple):
    """A secret in a named tuple."""

    name: str
    key: hf.Secret


@dataclass
class Tree:
    """A secret somewhere in a tree."""

    key: hf.Secret | None = None
    below: "tuple[Tree, ...]" = ()


@dataclass
class Box(Generic[T]):
    """Something in a box."""

    content: T


new_type: Any = NewType  # mypy fails with an internal error for a NewType of a Struct
ApiKey = new_type("ApiKey", hf.Secret)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (hf.Secret, KEY),
        (hf.Secret | None, KEY),
        (hf.Secret | str, KEY),
        (list[hf.Secret], [KEY]),
        (tuple[str, hf.Secret], ("a", KEY)),
        (frozenset[hf.Secret], frozenset({KEY})),
        (dict[str, list[hf.Secret]], {"a": [KEY]}),
        (Mapping[str, hf.Secret], {"a": KEY}),
        (Annotated[hf.Secret, "the key"], KEY),
        (ApiKey, KEY),
        (Tagged, {"key": KEY}),
        (Pair, Pair("a", KEY)),
        (Account, Account([Card("1", KEY)], {})),
        (Tree, Tree(below=(Tree(below=(Tree(KEY),)),))),
        (Box[hf.Secret], Box(KEY)),
        (Box[list[Card]], Box([Card("1", KEY)])),
    ],
    ids=str,
)
async def test_a_reference_is_found_wherever_an_annotation_has_it(kind: Any, value: Any) -> None:
    app = hf.App("shop", secrets=Vault())

    async def look(value: Any) -> str:
        return length_of(KEY)

    look.__annotations__["value"] = kind
    activity = app.activity(retry=ONCE)(look)

    @app.workflow
    async def work() -> str:
        return await activity(value)

    async with app.node("memory://"):
        assert await (await app.start(work)).result() == "stripe/key: 17"


async def test_what_is_not_annotated_is_not_resolved(variant: EngineVariant) -> None:
    """So a caller who sends such an object cannot have a secret resolved that the activity does not ask for."""
    vault = Vault()
    app = hf.App("shop", secrets=vault)

    @app.activity
    async def look(anything: Any, plain: dict[str, Any]) -> list[Any]:
        return [anything, plain]

    @app.workflow
    async def work() -> list[Any]:
        return await look(KEY, {"key": KEY})

    async with variant.node(app):
        assert await (await app.start(work)).result() == [{"$secret": "stripe/key"}, {"key": {"$secret": "stripe/key"}}]
    assert vault.asked == []


async def test_references_stay_references_wherever_they_are_handed_on(variant: EngineVariant) -> None:
    vault = Vault()
    app = hf.App("shop", secrets=vault)

    @app.activity(retry=ONCE)
    async def look(key: hf.Secret) -> hf.Secret:
        key.reveal()
        return key

    @app.workflow
    async def child(key: hf.Secret) -> hf.Secret:
        return await look(key)

    @app.workflow(signals={"key": Card})
    async def parent(key: hf.Secret) -> dict[str, hf.Secret]:
        hf.on_query("key", lambda: key)

        def change(to: hf.Secret) -> hf.Secret:
            return to

        hf.on_update("change", change)
        sent = await hf.wait_signal("key", Card)
        answer = await hf.task("change the key", Card, payload={"old": key})
        if sent.number == "1":
            hf.continue_as_new(key=sent.key)
        return {"child": await child(key), "sent": sent.key, "task": answer.key}

    async with variant.node(app):
        run = await app.start(parent, KEY)
        assert await run.query("key") == {"$secret": "stripe/key"}
        assert await run.update("change", to=KEY) == {"$secret": "stripe/key"}
        for number in ("1", "2"):
            await run.signal("key", Card(number, hf.Secret("stripe/key")))
            await wait_for_event(run, "TaskCreated", int(number))
            [task] = await app.tasks.list(run_id=run.run_id, status="OPEN")
            assert json.loads(bytes(codec.encode(task.payload))) == {"old": {"$secret": "stripe/key"}}
            await app.tasks.complete(task.task_id, Card("x", KEY), actor=hf.Actor("eve"))
        assert await run.result() == {"child": KEY, "sent": KEY, "task": KEY}
        for run_id in (run.run_id, f"{run.run_id}/1/child"):
            history = await app.run(run_id).events()
            text = text_of(history)
            assert '{"$secret":"stripe/key"}' in text
            assert VALUE not in text


@pytest.mark.parametrize("queue", ["", "far"], ids=["local", "queued"])
async def test_each_attempt_resolves_anew(variant: EngineVariant, queue: str) -> None:
    """A key that was rotated meanwhile is the new one, and both are redacted, each from its attempt."""
    vault = Vault(lambda scope, call: {"stripe/key": f"value-number-{call}"})
    app = hf.App("shop", secrets=vault)
    seen: list[str] = []

    @app.activity(retry=QUICK, queue=queue)
    async def charge(key: hf.Secret) -> str:
        seen.append(key.reveal())
        if len(seen) < 3:
            raise ValueError(f"bad key {key.reveal()}")
        return f"charged with {key.reveal()}, not {seen[0]}"

    @app.workflow
    async def work() -> str:
        return await charge(KEY)

    async with variant.node(app, queues=("far",)):
        run = await app.start(work)
        # What another attempt had is no secret of this one: an activity that keeps it has changed hands.
        assert await run.result() == "charged with [redacted: stripe/key], not value-number-1"
        retried = [event.data for event in await run.events() if isinstance(event.data, e.StepRetried)]
    assert seen == ["value-number-1", "value-number-2", "value-number-3"]
    assert [each.error.message for each in retried if each.error] == ["bad key [redacted: stripe/key]"] * 2


async def test_each_tenant_and_environment_has_its_own(variant: EngineVariant) -> None:
    vault = Vault(lambda scope, call: {"stripe/key": f"key-of-{scope.tenant}-{scope.environment}"})
    app = hf.App("shop", secrets=vault)

    @app.activity
    async def owner(key: hf.Secret) -> list[str]:
        return key.reveal().split("-")[2:]

    @app.workflow
    async def work() -> list[str]:
        return await owner(KEY)

    places = [("acme", "live"), ("acme", "test"), ("other", "live")] * 2
    async with variant.node(app):
        runs = [await app.start(work, tenant=tenant, environment=env) for tenant, env in places]
        assert [tuple(await run.result()) for run in runs] == places
    assert sorted((scope.tenant, scope.environment) for _, scope in vault.asked) == sorted(places)


async def test_values_are_gone_when_the_attempt_is_over(variant: EngineVariant) -> None:
    app = hf.App("shop", secrets=Vault())
    kept: list[Any] = []
    is_over = asyncio.Event()

    async def later(key: hf.Secret) -> str:
        await is_over.wait()
        return key.reveal()

    @app.activity
    async def leave_behind(key: hf.Secret) -> None:
        key.reveal()
        kept.append(asyncio.create_task(later(key)))

    @app.workflow
    async def work() -> None:
        await leave_behind(KEY)

    async with variant.node(app):
        await (await app.start(work)).result()
        is_over.set()
        with pytest.raises(NotDurable, match="the attempt is over"):
            await kept[0]


async def test_code_of_a_workflow_that_an_activity_has_called_gets_no_value(variant: EngineVariant) -> None:
    """Queries and keys are computed in the caller's context, and the caller may be an activity with the same secret."""
    app = hf.App("shop", secrets=Vault())

    @app.workflow
    async def target(key: hf.Secret) -> None:
        hf.on_query("key", key.reveal)
        hf.on_update("key", key.reveal)
        await hf.wait_signal("go")

    @app.workflow(per_key=1, key=lambda key: key.reveal())
    async def limited(key: hf.Secret) -> None: ...

    @app.activity(retry=ONCE)
    async def ask(run_id: str, key: hf.Secret) -> list[str]:
        started = await app.start(target, key)
        asked = [
            app.run(run_id).query("key"),
            app.run(run_id).update("key"),
            started.query("key"),
            app.start(limited, key),
        ]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert key.reveal() == VALUE
        return [f"{type(answer).__name__} {answer}".replace(VALUE, "LEAKED") for answer in answers]

    @app.workflow
    async def work(run_id: str) -> list[str]:
        return await ask(run_id, KEY)

    async with variant.node(app):
        run = await app.start(target, KEY)
        answers = await (await app.start(work, run.run_id)).result()
    kinds = [answer.split()[0] for answer in answers]
    assert kinds == ["NotDurable", "UpdateFailed", "NotDurable", "InvalidInput"], answers
    assert "LEAKED" not in str(answers)


async def test_activities_side_by_side_have_their_own_secrets(variant: EngineVariant) -> None:
    app = hf.App("shop", secrets=Vault({"a": "the-first-value", "b": "the-second-value"}))
    both = asyncio.Barrier(2)

    @app.activity(retry=ONCE)
    async def look(key: hf.Secret, other: str) -> str:
        await both.wait()
        with pytest.raises(NotDurable):
            hf.Secret(other).reveal()
        return f"{key.reveal()} the-first-value the-second-value"

    @app.workflow
    async def work() -> list[str]:
        return list(await asyncio.gather(look(hf.Secret("a"), "b"), look(hf.Secret("b"), "a")))

    async with variant.node(app):
        assert await (await app.start(work)).result() == [
            "[redacted: a] [redacted: a] the-second-value",
            "[redacted: b] the-first-value [redacted: b]",
        ]


# --- when there is no value


class Broken:
    """A provider that fails in some way, so many times."""

    def __init__(self, failure: BaseException | Any, times: int = 100) -> None:
        self.failure = failure
        self.left = times

    async def resolve(self, refs: Sequence[str], scope: hf.SecretScope) -> Any:
        """Fail."""
        if self.left == 0:
            return dict.fromkeys(refs, VALUE)
        self.left -= 1
        if isinstance(self.failure, BaseException):
            raise self.failure
        return self.failure


OF_VALUE = "SecretsUnavailable: the value of secret 'stripe/key'"
UNFIT = f"{OF_VALUE} has to have 4 characters or more, so that it can be redacted, and at most 65536 bytes"


def charging(provider: Any, retry: hf.Retry = QUICK, queue: str = "") -> tuple[hf.App, Any, list[int]]:
    """Return an app whose activity needs a secret, its workflow, and the attempts that began."""
    app = hf.App("shop", secrets=provider)
    began: list[int] = []

    @app.activity(retry=retry, queue=queue)
    async def charge(key: hf.Secret) -> str:
        began.append(hf.activity_context().attempt)
        return length_of(key)

    @app.workflow
    async def work(key: hf.Secret) -> str:
        try:
            return await charge(key)
        except ActivityFailed as failure:
            return f"{failure.info.code}: {failure.info.message}"

    return app, work, began


@pytest.mark.parametrize("queue", ["", "far"], ids=["local", "queued"])
@pytest.mark.parametrize(
    ("provider", "expected"),
    [
        (None, "SecretsUnavailable: there is no provider of secrets: give App(secrets=…), or set HOLDFAST_SECRETS"),
        (Vault({}), "SecretNotFound: there is no secret 'stripe/key': its provider does not have it"),
        (
            Broken(ConnectionError(f"token {VALUE} is expired")),
            "SecretsUnavailable: the provider of secrets, Broken, failed with ConnectionError; asked for stripe/key",
        ),
        (
            Broken(SystemExit(VALUE)),
            "SecretsUnavailable: the provider of secrets, Broken, failed with SystemExit; asked for stripe/key",
        ),
        (
            Broken([VALUE]),
            "SecretsUnavailable: the provider of secrets, Broken, answered with a list; asked for stripe/key",
        ),
        (Broken(SecretsUnavailable("sealed")), "SecretsUnavailable: sealed"),
        (Vault({"stripe/key": b"bytes"}), f"{OF_VALUE} is not text"),
        (Vault({"stripe/key": "\ud800abc"}), f"{OF_VALUE} is not valid Unicode"),
        *((Vault({"stripe/key": value}), UNFIT) for value in ("", "abc", " a  ", "x" * (SECRET_BYTES + 1))),
    ],
)
async def test_a_failure_of_the_provider_fails_the_attempt(queue: str, provider: Any, expected: str) -> None:
    app, work, began = charging(provider, queue=queue)
    async with app.node("memory://", options=hf.NodeOptions(queues=("far",))):
        run = await app.start(work, KEY)
        assert await run.result() == expected
        retried = [event for event in await run.events() if isinstance(event.data, e.StepRetried)]
        assert len(retried) == 2  # it was tried again by its policy
        assert VALUE not in text_of(await run.events())
    assert began == []


async def test_a_provider_that_comes_back_is_asked_again(variant: EngineVariant) -> None:
    app, work, began = charging(Broken(ConnectionError("down"), times=2))
    async with variant.node(app):
        assert await (await app.start(work, KEY)).result() == "stripe/key: 17"
    assert began == [3]


@pytest.mark.parametrize(("retryable", "attempts"), [(True, 3), (False, 1)])
async def test_a_missing_secret_is_tried_again_if_its_provider_says_so(
    variant: EngineVariant, retryable: bool, attempts: int
) -> None:
    provider = Broken(SecretNotFound("gone", retryable=retryable, secret="stripe/key"))
    app, work, began = charging(provider)
    async with variant.node(app):
        assert await (await app.start(work, KEY)).result() == "SecretNotFound: gone"
    assert (100 - provider.left, began) == (attempts, [])


async def test_a_provider_that_hangs_is_given_up_with_the_attempt(variant: EngineVariant) -> None:
    class Hanging:
        async def resolve(self, refs: Sequence[str], scope: hf.SecretScope) -> dict[str, str]:
            await asyncio.Event().wait()
            return {}

    app = hf.App("shop", secrets=Hanging())

    @app.activity(timeout=0.05, retry=ONCE)
    async def charge(key: hf.Secret) -> None: ...

    @app.workflow
    async def work() -> str:
        with pytest.raises(ActivityFailed) as failed:
            await charge(KEY)
        return str(failed.value.info.code)

    async with variant.node(app):
        assert await (await app.start(work)).result() == "TimeoutError"


async def test_the_time_for_a_provider_is_bounded(variant: EngineVariant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.engine.activities.secrets.SECRETS_S", 0.01)

    class Hanging(Vault):
        async def resolve(self, refs: Sequence[str], scope: hf.SecretScope) -> Mapping[str, str]:
            await asyncio.Event().wait()
            return {}

    app, work, began = charging(Hanging(), ONCE)
    async with variant.node(app):
        answer = await (await app.start(work, KEY)).result()
    assert answer.startswith("SecretsUnavailable: the provider of secrets, ")
    assert answer.endswith("Hanging, failed with TimeoutError; asked for stripe/key")
    assert began == []


async def test_too_many_secrets_are_refused(variant: EngineVariant) -> None:
    app = hf.App("shop", secrets=Vault())
    many = [hf.Secret(f"key/{number}") for number in range(SECRETS + 1)]
    with pytest.raises(InvalidInput, match="the most is 100"):
        app.activity(secrets=many)(lambda: None)
    for wrong in ("stripe/key", [7], ["a//b"]):
        with pytest.raises(InvalidInput):
            app.activity(secrets=wrong)(lambda: None)

    @app.activity(retry=QUICK)
    async def look(keys: list[hf.Secret]) -> None: ...

    @app.workflow
    async def work() -> str:
        with pytest.raises(ActivityFailed) as failed:
            await look(many)
        return f"{failed.value.info.code}: {failed.value.info.message}"

    async with variant.node(app):
        run = await app.start(work)
        assert await run.result() == "InvalidInput: an activity is given 101 secrets; the most is 100"
        assert not any(isinstance(event.data, e.StepRetried) for event in await run.events())


# --- redaction at the borders


async def test_a_result_that_does_not_fit_its_type_without_the_value_fails_the_step(variant: EngineVariant) -> None:
    app = hf.App("shop", secrets=Vault({"stripe/key": "4711471147114711"}))

    @app.activity(retry=QUICK)
    async def number(key: hf.Secret) -> int:
        return int(key.reveal())

    @app.workflow
    async def work() -> str:
        with pytest.raises(ActivityFailed) as failed:
            await number(KEY)
        return str(failed.value.info.message)

    async with variant.node(app):
        run = await app.start(work)
        assert "Expected `int`, got `str`" in await run.result()
        text = text_of(await run.events())
        assert "4711471147114711" not in text
        assert "StepRetried" not in text  # it has done its work, and would do it again


async def test_an_error_is_redacted_before_it_is_cut(variant: EngineVariant) -> None:
    app = hf.App("shop", secrets=Vault())

    @app.activity(retry=ONCE)
    async def fail(key: hf.Secret) -> None:
        raise ValueError("x" * 7_990 + key.reveal() + "y" * 8_000)

    @app.workflow
    async def work() -> None:
        with pytest.raises(ActivityFailed):
            await fail(KEY)

    async with variant.node(app):
        run = await app.start(work)
        await run.result()
        text = text_of(await run.events())
    assert VALUE[:5] not in text
    assert VALUE[-5:] not in text


async def test_progress_is_redacted_and_an_outcome_that_an_activity_reports_elsewhere(variant: EngineVariant) -> None:
    app = hf.App("shop", secrets=Vault())
    tokens: list[str] = []

    @app.activity(retry=ONCE)
    async def wait() -> str:
        tokens.append(hf.activity_context().token)
        hf.activity_context().complete_later()

    @app.activity(retry=QUICK)
    async def report(key: hf.Secret, fails: bool) -> Any:
        context = hf.activity_context()
        if context.attempt == 1:
            context.heartbeat({"so far": [key.reveal()]})
            raise ValueError("again")
        if fails:
            await app.fail_activity(tokens[-1], f"bad {key.reveal()}")
        else:
            await app.complete_activity(tokens[-1], f"good {key.reveal()}")
        return context.details

    @app.workflow
    async def work(fails: bool) -> list[Any]:
        waiting = asyncio.create_task(wait())
        await hf.wait_signal("go")
        details = await report(KEY, fails)
        try:
            return [details, await waiting]
        except ActivityFailed as failure:
            return [details, failure.info.message]

    for fails in (False, True):
        tokens.clear()
        async with variant.node(app):
            run = await app.start(work, fails)
            await wait_for_event(run, "StepDetached")
            await run.signal("go")
            details, outcome = await run.result()
        assert details == {"so far": ["[redacted: stripe/key]"]}
        assert outcome == ("bad" if fails else "good") + " [redacted: stripe/key]"


@pytest.mark.parametrize("formatter", [hf.JsonFormatter(), logging.Formatter("%(message)s %(detail)s")])
async def test_logs_of_an_activity_are_redacted(variant: EngineVariant, formatter: logging.Formatter) -> None:
    app = hf.App("shop", secrets=Vault())
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(formatter)
    handler.addFilter(hf.SecretFilter())
    foreign = logging.getLogger("somebody.elses.client")

    @app.activity(retry=ONCE)
    def talk(key: hf.Secret) -> None:
        for log in (app.logger, foreign):
            log.warning("key %s", key.reveal(), extra={"detail": {"nested": [key.reveal()]}})
            if log is app.logger:  # the handler of pytest raises for others
                log.warning("wrong %d", key.reveal(), extra={"detail": None})
            try:
                raise KeyError({"key": key.reveal()})
            except KeyError:
                log.exception("failed", extra={"detail": key}, stack_info=True)

    @app.workflow
    async def work() -> None:
        await talk(KEY)

    logging.getLogger().addHandler(handler)
    try:
        async with variant.node(app):
            await (await app.start(work)).result()
        foreign.warning("outside %s", VALUE, extra={"detail": ""})
    finally:
        logging.getLogger().removeHandler(handler)
    inside, _, outside = text.getvalue().partition("outside")
    assert inside.count("[redacted: stripe/key]") == 7
    assert VALUE not in inside
    assert "KeyError" in inside
    assert VALUE in outside  # what is logged elsewhere is not touched


def test_the_log_of_the_command_is_redacted_and_an_error_cannot_look_like_a_record() -> None:
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(PlainFormatter())
    log = logging.getLogger("somebody.elses.plain")
    log.addHandler(handler)
    with testing.secrets({"stripe/key": VALUE}):
        try:
            raise ValueError(f"{VALUE}\n2026-01-28 12:00:00 INFO holdfast.node: forged")
        except ValueError:
            log.exception("failed with %s", VALUE)
    log.removeHandler(handler)
    first, *rest = text.getvalue().splitlines()
    assert first.endswith("failed with [redacted: stripe/key]")
    assert all(line.startswith("    ") for line in rest)
    assert "    ValueError: [redacted: stripe/key]" in rest
    assert VALUE not in text.getvalue()


# --- providers


@pytest.mark.parametrize("wrong", [7, {"stripe/key": VALUE}, object(), "nowhere", "ftp://x", "file:relative"])
def test_what_is_no_provider_is_refused_when_the_app_is_made(wrong: Any) -> None:
    with pytest.raises(InvalidInput):
        hf.App("shop", secrets=wrong)


async def test_nothing_is_resolved_for_a_tenant_that_is_not_known() -> None:
    """A job that an older version has put does not name the tenant of its run."""
    vault = Vault()
    for scope in (hf.SecretScope("", ""), hf.SecretScope("acme", ""), hf.SecretScope("", "live")):
        with pytest.raises(SecretsUnavailable, match="older version"):
            await resolve_secrets(vault, [KEY], scope)
    assert vault.asked == []


async def test_variables_are_found_by_prefix() -> None:
    environ = {"SECRET_STRIPE_KEY": VALUE, "PATH": "/bin", "APP_ACME_LIVE_STRIPE_KEY": "acme's"}
    provider = hf.EnvironmentSecrets(environ=environ)
    assert await provider.resolve(["stripe/key"], SCOPE) == {"stripe/key": VALUE}
    with pytest.raises(SecretNotFound, match="SECRET_PATH is not set") as missing:
        await provider.resolve(["path"], SCOPE)
    assert missing.value.retryable is False
    assert missing.value.details == {"secret": "path"}
    scoped = hf.EnvironmentSecrets("APP_{tenant}_{environment}_", environ)
    assert await scoped.resolve(["stripe/key"], SCOPE) == {"stripe/key": "acme's"}
    for tenant in ("acme_live", "ACME", "a-cme", "{environment}", ""):  # two of them could have the same variables
        with pytest.raises(SecretsUnavailable):
            await scoped.resolve(["stripe/key"], hf.SecretScope(tenant, "live"))
    with pytest.raises(InvalidInput):
        hf.EnvironmentSecrets("")


async def test_files_are_read_as_they_are_mounted(tmp_path: Path) -> None:
    mounted = tmp_path / "mounted"
    data = mounted / "..2026_01_28"  # as Kubernetes does it
    data.mkdir(parents=True)
    (data / "key").write_text(f"{VALUE}\r\n")
    (data / "lines").write_text("first line\nsecond line\n\n")
    (mounted / "..data").symlink_to(data.name)
    (mounted / "key").symlink_to("..data/key")
    (mounted / "lines").symlink_to("..data/lines")
    (mounted / "stripe").mkdir()
    (mounted / "stripe" / "key").write_text("nested")
    provider = hf.FileSecrets(mounted)
    found = await provider.resolve(["key", "lines", "stripe/key"], SCOPE)
    assert found == {"key": VALUE, "lines": "first line\nsecond line\n", "stripe/key": "nested"}
    (data / "key").write_text("rotated")
    assert await provider.resolve(["key"], SCOPE) == {"key": "rotated"}


async def test_no_file_outside_of_the_folder_is_read(tmp_path: Path) -> None:
    folder, outside = tmp_path / "acme", tmp_path / "outside"
    folder.mkdir()
    outside.write_text(VALUE)
    (folder / "link").symlink_to(outside)
    (folder / "up").symlink_to(tmp_path)
    (folder / "folder").mkdir()
    (folder / "binary").write_bytes(b"\xff\xfe")
    provider = hf.FileSecrets(folder)
    for ref in ("../outside", "a/../../outside", str(outside), "./x"):
        with pytest.raises(InvalidInput):
            await provider.resolve([ref], SCOPE)
    for ref in ("link", "up/outside"):
        with pytest.raises(SecretsUnavailable, match="outside of the folder"):
            await provider.resolve([ref], SCOPE)
    for ref in ("folder", "missing", "missing/key"):
        with pytest.raises(SecretNotFound) as missing:
            await provider.resolve([ref], SCOPE)
        assert missing.value.retryable
    with pytest.raises(SecretsUnavailable, match="not UTF-8"):
        await provider.resolve(["binary"], SCOPE)
    (folder / "key").write_text(VALUE)
    scoped = hf.FileSecrets(f"{tmp_path}/{{tenant}}")
    assert await scoped.resolve(["key"], SCOPE) == {"key": VALUE}
    for tenant in ("..", ".", "", "other/../acme", "a/b", "\\", "{tenant}/"):
        with pytest.raises(SecretsUnavailable):
            await scoped.resolve(["key"], hf.SecretScope(tenant, "live"))
    with pytest.raises(SecretNotFound):
        await scoped.resolve(["key"], hf.SecretScope("{tenant}", "live"))


async def test_the_settings_name_a_provider(
    variant: EngineVariant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stripe").mkdir()
    (tmp_path / "stripe" / "key").write_text("in a file")
    monkeypatch.setenv("SHOP_STRIPE_KEY", "in a variable")
    for address, length in ((f"file://{tmp_path}", 9), ("env://SHOP_", 13), ("", 17)):
        monkeypatch.setenv("HOLDFAST_SECRETS", address)
        app, work, _ = charging(None if address else Vault(), ONCE)
        async with variant.node(app):
            assert await (await app.start(work, KEY)).result() == f"stripe/key: {length}"
    monkeypatch.setenv("HOLDFAST_SECRETS", "vault://token:hunter2@host/path")
    app, work, _ = charging(None)
    with pytest.raises(InvalidInput, match=r"holdfast\.secrets") as refused:
        async with variant.node(app):
            pass
    assert "hunter2" not in str(refused.value)


async def test_a_node_without_a_provider_warns_of_activities_that_need_one(caplog: pytest.LogCaptureFixture) -> None:
    for provider, warnings in ((None, 1), (Vault(), 0)):
        caplog.clear()
        app, _, _ = charging(provider)
        app.activity(name="other")(lambda: None)
        async with app.connect("memory://"):
            assert not caplog.records
        async with app.node("memory://"):
            found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
            assert found == ["there is no provider of secrets, and these activities need one: charge"] * warnings


async def test_a_package_can_bring_a_provider(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    info = tmp_path / "shop_vault-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shop-vault\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[holdfast.secrets]\nshopvault = shop_vault:provide\n")
    code = "class V:\n    async def resolve(self, refs, scope):\n        return dict.fromkeys(refs, self.address)\n"
    code += "def provide(address):\n    v = V()\n    v.address = address\n    return v\n"
    (tmp_path / "shop_vault.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    app, work, _ = charging("shopvault://a-place", ONCE)
    async with app.node("memory://"):
        assert await (await app.start(work, KEY)).result() == f"stripe/key: {len('shopvault://a-place')}"


# --- nodes and services


async def test_the_node_that_takes_a_job_resolves_its_secrets(tmp_path: Path) -> None:
    """The node that runs the workflow has no provider."""
    address = f"sqlite:///{tmp_path}/jobs.db"
    starter, work, _ = charging(None, ONCE, queue="far")
    worker, _, began = charging(Vault(), ONCE, queue="far")
    options = hf.NodeOptions(queues=("far",), takes_runs=False)
    async with starter.node(address), worker.node(address, options=options):
        run = await starter.start(work, KEY, tenant="acme", environment="live")
        assert await run.result() == "stripe/key: 17"
    assert began == [1]


async def test_cancelling_reaches_an_attempt_whose_secrets_are_being_resolved(variant: EngineVariant) -> None:
    asked = asyncio.Event()

    class Slow:
        async def resolve(self, refs: Sequence[str], scope: hf.SecretScope) -> dict[str, str]:
            asked.set()
            await asyncio.Event().wait()
            return {}

    app, work, began = charging(Slow())
    async with variant.node(app) as node:
        run = await app.start(work, KEY)
        await asked.wait()
        await run.cancel()
        with pytest.raises(RunCancelled):
            await run.result()
        assert node.activities_running == 0
    assert began == []


async def test_replay_asks_for_no_secret(tmp_path: Path) -> None:
    address = f"sqlite:///{tmp_path}/replay.db"
    vault = Vault()
    app = hf.App("shop", secrets=vault)

    @app.activity
    async def look(key: hf.Secret) -> str:
        return length_of(key)

    @app.workflow
    async def work(key: hf.Secret) -> list[str]:
        first = await look(key)
        await hf.wait_signal("go")
        return [first, await look(key)]

    async with app.node(address):
        run = await app.start(work, KEY)
        await wait_for_event(run, "StepCompleted")
    async with app.node(address):
        assert await check_store(app.registry, app.runtime().store) == []
        assert len(vault.asked) == 1
        await app.run(run.run_id).signal("go")
        assert await app.run(run.run_id).result() == ["stripe/key: 17", "stripe/key: 17"]
    assert len(vault.asked) == 2


# --- keyed steps


async def test_a_verifier_has_the_secrets_of_the_attempt_and_its_words_are_redacted(variant: EngineVariant) -> None:
    vault = Vault()
    app = hf.App("shop", secrets=vault)
    verdicts: list[Any] = []

    async def verify(key: hf.Secret) -> Any:
        said = verdicts.pop(0)(key.reveal())
        if isinstance(said, Exception):
            raise said
        return said

    @app.activity(retry=QUICK, idempotency_key=lambda: "once", verify=verify)
    async def charge(key: hf.Secret) -> str:
        if hf.activity_context().attempt == 1:
            raise ValueError(f"lost {key.reveal()}")
        return f"called with {key.reveal()}"

    @app.workflow
    async def work() -> str:
        return await charge(KEY)

    async with variant.node(app):
        verdicts.append(lambda value: hf.NotCompleted())
        assert await (await app.start(work)).result() == "called with [redacted: stripe/key]"
        assert len(vault.asked) == 2  # one call for each attempt, verifier included
        verdicts.append(lambda value: hf.Completed(f"found {value}"))
        assert await (await app.start(work)).result() == "found [redacted: stripe/key]"
        for verdict in (lambda value: hf.Indeterminate(f"who knows {value}"), lambda value: ValueError(f"bad {value}")):
            verdicts.append(verdict)
            run = await app.start(work)
            await wait_for_event(run, "StepUnresolved")
            text = text_of(await run.events())
            assert "[redacted: stripe/key]" in text
            assert VALUE not in text


@pytest.mark.parametrize("queue", ["", "far"], ids=["local", "queued"])
async def test_a_secret_that_is_missing_leaves_no_doubt_about_a_keyed_step(variant: EngineVariant, queue: str) -> None:
    """The function was not called, so no verifier and no operator is asked."""
    app = hf.App("shop", secrets=Broken(ConnectionError("down"), times=2))

    @app.activity(retry=QUICK, queue=queue, idempotency_key=lambda: "once")
    async def charge(key: hf.Secret) -> str:
        return length_of(key)

    @app.workflow
    async def work() -> str:
        try:
            return await charge(KEY)
        except ActivityFailed as failure:
            return str(failure.info.code)

    async with variant.node(app, queues=("far",)):
        assert await (await app.start(work)).result() == "stripe/key: 17"
    app.registry.secrets = Broken(ConnectionError("down"))
    async with variant.node(app, queues=("far",)):
        run = await app.start(work)
        assert await run.result() == "SecretsUnavailable"
        assert not any(event.event_type == "StepUnresolved" for event in await run.events())


async def test_a_verifier_without_its_secrets_leaves_the_step_to_an_operator(variant: EngineVariant) -> None:
    app = hf.App("shop", secrets=Vault(lambda scope, call: HAS if call == 1 else {}))

    async def verify(key: hf.Secret) -> Any:
        return hf.NotCompleted()

    @app.activity(retry=QUICK, idempotency_key=lambda: "once", verify=verify)
    async def charge(key: hf.Secret) -> None:
        raise ValueError("lost")

    @app.workflow
    async def work() -> None:
        await charge(KEY)

    async with variant.node(app):
        run = await app.start(work)
        unresolved = await wait_for_event(run, "StepUnresolved")
        assert "SecretNotFound: there is no secret 'stripe/key'" in codec.encode_body(unresolved.data)


# --- models of pydantic


async def test_a_model_of_pydantic_may_hold_references(variant: EngineVariant) -> None:
    class Gateway(pydantic.BaseModel):
        url: str
        key: hf.Secret
        others: dict[str, list[hf.Secret]]

    vault = Vault({"stripe/key": VALUE, "b": "value-of-b"})
    app = hf.App("shop", secrets=vault)

    @app.activity(retry=ONCE)
    async def look(gateway: Gateway) -> list[str]:
        return [length_of(gateway.key), *(length_of(each) for each in gateway.others["b"])]

    @app.workflow
    async def work(gateway: Gateway) -> list[str]:
        return await look(gateway)

    async with variant.node(app):
        run = await app.start(work, Gateway(url="https://x", key=KEY, others={"b": [B]}))
        assert await run.result() == ["stripe/key: 17", "b: 10"]
        assert '"key":{"$secret":"stripe/key"}' in text_of(await run.events())
        with pytest.raises(pydantic.ValidationError, match=r"key\n"):
            Gateway.model_validate({"url": "x", "key": {"$secret": "../x"}, "others": {}})
        schema = app.registry.activities["look"].signature.schemas()[0]
        assert '"$secret"' in json.dumps(schema)
