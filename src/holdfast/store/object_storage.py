"""Opens object storage by its address: credentials, region and endpoint come from the environment, as usual for S3.

Without credentials the library would query the metadata address of a virtual machine, 169.254.169.254, even if the user
has only forgotten a variable. So it is queried only if the environment names it.

The library delivers answers by threads of its own, which end later than a caller gets its answer. One that is still
inside the interpreter when this is taken down aborts the process. So the end of a process waits for them.
"""

import atexit
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

from obstore.store import from_url

from holdfast.clock import elapsed_us
from holdfast.errors import InvalidInput

KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
METADATA = "AWS_METADATA_ENDPOINT"
WAYS = (
    KEYS,
    ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN"),
    ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",),
    ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"),
    (METADATA,),
)
"""The variables of which one complete set must be given."""


def open_objects(address: str, field: str, **options: Any) -> Any:
    """Return the object store at an address, as an `obstore` object. `field` is the setting that holds the address."""
    if address.partition("://")[0].lower() in ("s3", "s3a"):
        _check_credentials(os.environ, field)
    return from_url(address, **options)


LEAVE_US = 2_000_000
"""How long the end of a process waits at most. Other libraries may have threads that stay inside the interpreter."""

LOOK_AGAIN_S = 0.001


def _wait_for_threads_inside() -> None:
    """Wait until no thread that Python does not know is inside the interpreter."""
    until, pause = elapsed_us() + LEAVE_US, threading.Event()
    while _are_threads_inside() and elapsed_us() < until:
        pause.wait(LOOK_AGAIN_S)


def _are_threads_inside() -> bool:
    return not sys._current_frames().keys() <= {thread.ident for thread in threading.enumerate()}


atexit.register(_wait_for_threads_inside)


def _check_credentials(environ: Mapping[str, str], field: str) -> None:
    """Raise `InvalidInput`, naming the variables to set, if the environment has no credentials for S3."""
    if environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true"):
        return
    empty = [name for name in KEYS if environ.get(name) == ""]
    if not empty and any(all(map(environ.get, names)) for names in WAYS):
        return
    found = f"{' and '.join(empty)} {'is' if len(empty) == 1 else 'are'} empty" if empty else "there are none"
    raise InvalidInput(
        f"a bucket needs credentials, and {found}: set {' and '.join(KEYS)}, or, on a virtual machine that has a role "
        f"of its own, {METADATA}=http://169.254.169.254 (docs/s3.md)",
        field=field,
    )
