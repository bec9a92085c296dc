"""The client: every operation as a method, in process or over HTTP, with the same answers and errors.

::

    async with Client("http://localhost:8321", token="…") as client:
        run = await client.runs.start("order", input={"order_id": "o-1"})
        await client.signals.send(run.run_id, "approval", payload={"approved": True})
        async for event in client.runs.stream(run.run_id):
            print(event.event_type)
        print(await client.result(run.run_id))

`Client(app)` does the same without a service, for an app whose node or connection is open. `SyncClient` is for code
without an event loop: scripts, Flask, Django views.
"""

from holdfast.client.asynchronous import Client
from holdfast.client.sync import SyncClient, SyncRun

__all__ = ["Client", "SyncClient", "SyncRun"]
