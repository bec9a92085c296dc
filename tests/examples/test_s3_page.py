"""`docs/s3.md` is typed as it stands, at a real object storage: a node works on a bucket, and an S3 client signals."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.examples.page_session import PageSession
from tests.seaweed_server import SharedSeaweed

PAGE = (Path(__file__).parents[2] / "docs" / "s3.md").read_text()
BUCKET = "my-bucket"
"""What a bucket of the test stands for."""

ORDERS = """
import holdfast as hf

app = hf.App("orders")


@app.workflow
async def order() -> bool:
    return (await hf.wait_signal("approval", dict))["approved"]
"""

AWS = f"""#!{sys.executable}
# `aws s3 cp - s3://BUCKET/KEY`, by the library of AWS that its command is made of: the command need not be installed.
import sys
import boto3
_, *words, target = sys.argv
assert words == ["s3", "cp", "-"], words
bucket, _, key = target.removeprefix("s3://").partition("/")
boto3.client("s3").upload_fileobj(sys.stdin.buffer, bucket, key)
"""


@pytest.mark.slow
def test_every_line_of_the_page_works(tmp_path: Path, seaweed: SharedSeaweed) -> None:
    bucket = seaweed.make_bucket()
    page = PAGE.replace(BUCKET, bucket)
    start, signal = page.split("## Signals with an S3 client")
    session = PageSession(tmp_path, **seaweed.environment())
    session.add_command("aws", AWS)
    (tmp_path / "orders.py").write_text(ORDERS)
    try:
        assert session.play_scripts(start) == 3
        session.type("holdfast run start order --run-id order-7 --app orders.py --store $HOLDFAST_STORE")
        assert session.play_scripts(signal) == 3
        assert session.type("holdfast run result order-7 --store $HOLDFAST_STORE") == ["true"]
    finally:
        session.close()
        seaweed.remove_bucket(bucket)
