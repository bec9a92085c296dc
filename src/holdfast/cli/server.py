"""`holdfast server`: the API of an app, with or without a node beside it."""

import asyncio
import logging
from typing import Annotated

from cyclopts import Parameter, validators

from holdfast.cli.ending import FINE
from holdfast.cli.target import load_app, settings_at
from holdfast.engine.logs import JsonFormatter, PlainFormatter
from holdfast.engine.options import NodeOptions
from holdfast.service.options import ServiceOptions

HOST, PORT = ServiceOptions().host, ServiceOptions().port
Port = Annotated[int, Parameter(validator=validators.Number(gte=0, lte=65_535))]


def server(
    target: str,
    /,
    *,
    store: str | None = None,
    host: str = HOST,
    port: Port = PORT,
    node: bool = True,
    queue: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = (),
    open_access: Annotated[bool, Parameter(name="--open", negative="", show_default=False)] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="", show_default=False)] = False,
) -> int:
    """Serve the API of an app until SIGTERM or Ctrl-C, and run its workflows too unless told not to.

    Parameters
    ----------
    target: str
        The app: shop.py, shop.py:app or pkg.module:app.
    store: str
        The address of the store, such as sqlite:///orders.db; otherwise HOLDFAST_STORE, then sqlite:///holdfast.db.
        It is made if it is not there.
    host: str
        Where to listen; the default is for this machine only.
    port: int
        Where to listen; 0 takes one that is free.
    node: bool
        Whether to run workflows; --no-node leaves them to other nodes.
    queue: str
        A queue whose activities are carried out here; for several queues, give it several times.
    open_access: bool
        Let in whoever comes, without a token.
    as_json: bool
        Write the log as lines of JSON, with run and step.
    """
    from holdfast.service.server import serve  # here, so that commands which do not serve do not wait for it

    app = load_app(target)
    set_up_logging(as_json)
    options = ServiceOptions(host=host, port=port, is_open=open_access)
    asyncio.run(serve(app, settings_at(store).store, options=options, node=NodeOptions(takes_runs=node, queues=queue)))
    return FINE


def set_up_logging(as_json: bool = False) -> None:
    """Log to stderr, with times, as a process does that serves. Uvicorn tells of its problems only."""
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if as_json else PlainFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
