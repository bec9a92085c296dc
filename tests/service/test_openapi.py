"""The description says what the service does: shown by asking it nonsense, ours and Schemathesis'.

`TEST_EXAMPLES=20` lets Schemathesis draw so many examples for each operation, as `make soak` does.
"""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore as ObjectsInMemory

from holdfast.service.http.openapi import describe
from holdfast.service.operations import OPERATIONS
from holdfast.store.s3 import S3Store
from holdfast.store.s3.bucket import Bucket
from tests.service.fuzz import play
from tests.service.test_server import process

EXAMPLES = os.environ.get("TEST_EXAMPLES", "1")
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.mark.contract("API-1", "API-2")
@pytest.mark.parametrize(("seed", "is_bucket"), [(1, False), pytest.param(2, True, marks=pytest.mark.slow)], ids=str)
async def test_nonsense_is_answered_as_described(seed: int, is_bucket: bool) -> None:
    """In a bucket some operations are not there at all."""
    store = S3Store(Bucket(ObjectsInMemory())) if is_bucket else "memory://"
    seen = await play(18 * len(OPERATIONS), seed, store)
    assert len({name for name, _ in seen}) == len(OPERATIONS)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.contract("API-1", "API-2")
async def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    async with process("memory://", "works", seconds=600) as (_, port):
        place = f"http://127.0.0.1:{port}/openapi.json"
        command = [sys.executable, "-m", "schemathesis.cli", "run", place, "--checks", CHECKS]
        command += ["--max-examples", EXAMPLES]
        command += ["--seed", "1", "--phases", "examples,coverage,fuzzing"]
        command += ["--exclude-tag", "lists", "--exclude-operation-id", "runs.stream"]  # they do not end
        asked = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, stdout=PIPE, stderr=STDOUT)
        try:
            said, _ = await asked.communicate()
        finally:
            if asked.returncode is None:
                asked.kill()
                await asked.communicate()
        assert asked.returncode == 0, said.decode()


def references(value: Any) -> set[str]:
    """Return everything that is referred to."""
    if isinstance(value, dict):
        found = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return found.union(*(references(part) for part in value.values()))
    return set().union(*(references(part) for part in value)) if isinstance(value, list) else set()


@pytest.mark.contract("API-1")
def test_the_description_is_whole() -> None:
    description = describe(OPERATIONS)
    assert description["openapi"] == "3.1.0"
    schemas = description["components"]["schemas"]
    assert {reference.rpartition("/")[2] for reference in references(description)} == set(schemas)
    for path, verbs in description["paths"].items():
        for verb, operation in verbs.items():
            named = {parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "path"}
            assert named == set(OPERATIONS[operation["operationId"]].path_fields), (verb, path)
            assert {"422", "500", "503", "504"} < operation["responses"].keys()
            for status, response in operation["responses"].items():
                kind = "application/json" if int(status) < 400 else "application/problem+json"
                assert set(response["content"]) == {kind}
