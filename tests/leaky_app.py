"""An app whose activities leak their secret, in every form and by every way that there is."""

import asyncio
import io
import logging
from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import holdfast as hf
from holdfast.store.port import DeadLetterQuery
from tests.secret_forms import FORMS

VALUE = 'sk/+ "live" ñ€ 51HxYz'
KEY = hf.Secret("stripe/key")
TWICE = hf.Retry(max_attempts=2, initial_ms=1, factor=1.0, jitter=0.0)
FOREIGN = logging.getLogger("somebody.elses.client")


class Nested(Exception):
    """An error that shows the value wherever an error can show something."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = f"code {text}"
        self.response = {"headers": {"authorization": text}}


class Vault:
    """The one provider of this test."""

    async def resolve(self, refs: Any, scope: Any) -> dict[str, str]:
        """Return the value of every secret."""
        return dict.fromkeys(refs, VALUE)


class LeakyApp:
    """An app that leaks, and what it has leaked to beside its store.

    Its workflow sends what it was given to another run, which cannot take it: so it is in a dead letter as well.
    """

    def __init__(self) -> None:
        self.app = hf.App("leaky", secrets=Vault())
        self.logs = io.StringIO()
        self.spans = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(hf.RedactingSpanProcessor(SimpleSpanProcessor(self.spans)))
        self._tracer = provider.get_tracer("somebody.elses")
        activities = [
            self.app.activity(retry=TWICE)(each)
            for each in (self.succeed_async, self.succeed_in_a_thread, self.fail_async, self.fail_in_a_thread)
        ]

        @self.app.workflow
        async def listening() -> int:
            return await hf.wait_signal("note", int)

        @self.app.workflow
        async def leaking(queue: str, key: hf.Secret, listener: str) -> list[Any]:
            found: list[Any] = []
            for activity in activities:
                try:
                    found.append(await activity.options(queue=queue)(key))
                except hf.errors.ActivityFailed as failure:
                    found.append(str(failure))
            await self.app.run(listener).signal("note", found)
            return found

        self.leaking, self.listening = leaking, listening

    async def succeed_async(self, key: hf.Secret) -> dict[str, Any]:
        """Leak, and return the value."""
        self._leak(key)
        await asyncio.sleep(0)
        return {"forms": _forms(key), key.reveal(): [key.reveal().encode()]}

    def succeed_in_a_thread(self, key: hf.Secret) -> list[str]:
        """Leak, and return the value, at the second attempt."""
        self._leak(key)
        if hf.activity_context().attempt == 1:
            raise ValueError(key.reveal())
        return list(_forms(key).values())

    async def fail_async(self, key: hf.Secret) -> None:
        """Leak, and fail."""
        await asyncio.sleep(0)
        self.fail_in_a_thread(key)

    def fail_in_a_thread(self, key: hf.Secret) -> None:
        """Leak, and fail with errors in errors."""
        self._leak(key)
        try:
            try:
                raise KeyError(_forms(key))
            except KeyError as problem:
                raise Nested(key.reveal()) from problem
        except Nested as problem:
            problem.add_note(f"note: {key.reveal()}")
            others = [ValueError(form) for form in _forms(key).values()]
            raise ExceptionGroup(f"group {key.reveal()}", [problem, *others]) from problem

    def _leak(self, key: hf.Secret) -> None:
        hf.activity_context().heartbeat(_forms(key))
        for log in (self.app.logger, FOREIGN):
            for form in _forms(key).values():
                log.warning("calling with %s", form, extra={"header": {"authorization": form}})
            try:
                raise Nested(key.reveal())
            except Nested:
                log.exception("failed", extra={"header": None})
        with self._tracer.start_as_current_span(f"call {key.reveal()}") as span:
            span.set_attributes({"key": key.reveal(), key.reveal(): list(_forms(key).values())})
            span.add_event(key.reveal(), {"key": key.reveal()})
            span.record_exception(Nested(key.reveal()))

    async def leak(self, queue: str = "") -> tuple[hf.RunHandle[Any], str]:
        """Let a run leak. Return it, when it is over, and the id of the dead letter of what it has sent."""
        listener = await self.app.start(self.listening)
        run = await self.app.start(self.leaking, queue, KEY, listener.run_id)
        assert len(await run.result()) == 4
        query = DeadLetterQuery(run_id=listener.run_id)
        while not (letters := await self.app.runtime().store.find(query)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return run, letters[0].letter_id


def _forms(key: hf.Secret) -> dict[str, str]:
    return {name: form(key.reveal()) for name, form in FORMS.items()}
