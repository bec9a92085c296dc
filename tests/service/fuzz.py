"""Asks the service nonsense, over both transports, and looks at every answer.

A request is made from the examples: with ids that exist or do not, with fields that are missing, foreign, or of any
type and size, or it is no request at all. No answer may be a 500, or one that the description does not have, and what
is answered must be what was promised. `python -m tests.service.fuzz --requests 50000` takes minutes; tests ask less.
"""

import argparse
import asyncio
import random
from collections import Counter
from typing import Any

import msgspec

from holdfast.service.http.openapi import EXAMPLES, LETTER, RUN, TASK, describe
from holdfast.service.http.problems import Problem
from holdfast.service.operations import OPERATIONS
from holdfast.service.options import ServiceOptions
from holdfast.store.port import Store
from tests.service.in_process import InProcessServer, serve_in_process

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**53, 2**64, -(2**70), 1.5, -0.0, 1e300, "", " ", "null", "true", "0"),
    *("x" * 300, "x" * 5_000, "é" * 100, "\x00", "\n", "a/b", "a|b", "..", "%2f", "holdfast.control", "2026-01-01"),
    *("2026-01-01T00:00:00Z", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", [], [[]], [None], ["a"] * 600, {}),
    *({"a": {"b": []}}, [{"run_id": "r"}], "eyJhIjoxfQ", "WyJydW5zIiwiYSJd", "RUNNING", "OPEN", "😀", "\u202e"),
)
GARBAGE = (
    *(b"", b"{", b"[", b"null", b"7", b'"x"', b"[]", b"{}", b"[[]]", b"[{}]", b"\xff\xfe", b"[" * 500, b"{" * 99),
    *(b'{"jsonrpc":"2.0"}', b'{"jsonrpc":"2.0","method":"system.health","id":[]}', b'[1,"x",null]', b"\x00" * 10),
    *(b'{"jsonrpc":"2.0","method":"runs.get","params":[1],"id":1}', b'{"a":1e999}', b'{"a":"\\ud800"}', b"nan"),
)
RPC_CODES = {-32_700, -32_600, -32_601, -32_602}

_answers = {name: msgspec.json.Decoder(operation.response_type) for name, operation in OPERATIONS.items()}


class Fuzz:
    """One player with one seed."""

    def __init__(self, server: InProcessServer, seed: int) -> None:
        self._stage = server
        self._chance = random.Random(seed)
        self._ids: dict[str, list[str]] = {RUN: ["nowhere"], TASK: ["nowhere"], LETTER: ["nowhere"]}
        paths = describe(OPERATIONS)["paths"]
        self._documented = {
            name: {int(status) for status in paths[operation.path][operation.verb.lower()]["responses"]}
            for name, operation in OPERATIONS.items()
        }
        self.seen: Counter[tuple[str, int]] = Counter()

    async def play(self, requests: int) -> None:
        """Make so many requests."""
        for number in range(requests):
            if number % 100 == 0:
                await self._refresh()
            kind = self._chance.random()
            if kind < 0.05:
                await self._garbage()
            elif kind < 0.55:
                await self._rest(*self._ask())
            else:
                await self._rpc(*self._ask())

    async def _refresh(self) -> None:
        """Have something that is alive to ask about."""
        workflow = self._chance.choice(["order", "asking", "patient", "echo", "paying"])
        input = {"order": {"order_id": "o"}, "asking": {"who": "x"}, "paying": {"order_id": "o"}}.get(workflow, {})
        self._ids[RUN].append(await self._stage.start(workflow, **input))
        tasks = (await self._stage.rest("tasks.list", {"status": "OPEN", "limit": 5}))[1]["items"]
        self._ids[TASK] += [task["task_id"] for task in tasks]
        for known in self._ids.values():
            del known[1:-10]

    # --- making requests

    def _ask(self) -> tuple[str, dict[str, Any]]:
        name = self._chance.choice(list(OPERATIONS))
        fields = dict(EXAMPLES[name])
        for field, value in fields.items():
            if isinstance(value, str) and value in self._ids:
                fields[field] = self._chance.choice(self._ids[value])
        fields.pop("wait", None)
        fields.pop("wait_s", None)
        for _ in range(self._chance.choice([0, 0, 1, 1, 2, 5])):
            self._mutate(name, fields)
        return name, fields

    def _mutate(self, name: str, fields: dict[str, Any]) -> None:
        known = [field for field in OPERATIONS[name].request_type.__struct_fields__ if field not in ("wait", "wait_s")]
        field = self._chance.choice([*known, "colour"]) if known else "colour"
        kind = self._chance.random()
        if kind < 0.2:
            fields.pop(field, None)
        else:
            fields[field] = self._chance.choice(VALUES)

    # --- looking at answers

    async def _rest(self, name: str, fields: dict[str, Any]) -> None:
        operation = OPERATIONS[name]
        for field in operation.path_fields:
            value = fields.get(field)
            is_sendable = isinstance(value, str) and value not in ("", "..")  # clients resolve those
            fields[field] = value if is_sendable else "nowhere"
        status, answer = await self._stage.rest(name, fields)
        self.seen[name, status] += 1
        assert status in self._documented[name], (name, fields, status, answer)
        self._look(name, fields, status, answer)

    async def _rpc(self, name: str, fields: dict[str, Any]) -> None:
        id = self._chance.choice([1, "x", 2.5, None])
        request = {"jsonrpc": "2.0", "id": id, "method": name, "params": fields}
        answer = (await self._stage.http.post("/rpc", json=request)).json()
        assert (answer["jsonrpc"], answer["id"]) == ("2.0", id)
        assert ("result" in answer) != ("error" in answer)
        if "result" in answer:
            self._look(name, fields, OPERATIONS[name].status, answer["result"])
            return
        problem = answer["error"]["data"]
        self._look(name, fields, problem["status"], problem)
        assert -32_602 <= answer["error"]["code"] <= -32_000, answer

    def _look(self, name: str, fields: dict[str, Any], status: int, answer: Any) -> None:
        assert status != 500, (name, fields, answer)
        if status == OPERATIONS[name].status:
            _answers[name].decode(msgspec.json.encode(answer))
        else:
            assert msgspec.convert(answer, Problem).status == status

    async def _garbage(self) -> None:
        body = self._chance.choice(GARBAGE)
        if self._chance.random() < 0.3:
            body = bytes(self._chance.randrange(256) for _ in range(self._chance.randrange(40)))
        path = self._chance.choice(["/rpc", "/v1/runs", "/v1/signals", "/v1/runs/nowhere/cancel"])
        response = await self._stage.http.post(path, content=body, headers={"content-type": "application/json"})
        assert response.status_code in (200, 201, 204, 400, 404, 422), (path, body, response.text)
        if path == "/rpc" and response.status_code == 200:
            for answer in response.json() if isinstance(response.json(), list) else [response.json()]:
                assert answer["error"]["code"] in RPC_CODES


async def play(requests: int, seed: int, store: str | Store = "memory://") -> Counter[tuple[str, int]]:
    """Play on a service of its own with this store; return how often each operation gave each status over REST."""
    options = ServiceOptions(
        request_s=0.5, refusals_per_minute=1_000_000, reads_per_minute=1_000_000_000
    )  # else hardly anything would be heard
    async with serve_in_process(store, options=options, most_seconds=None) as server:
        fuzz = Fuzz(server, seed)
        await fuzz.play(requests)
        return fuzz.seen


def main() -> None:
    """Play as long as the command line asks."""
    parser = argparse.ArgumentParser(prog="python -m tests.service.fuzz", description=__doc__)
    parser.add_argument("--requests", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    seen = asyncio.run(play(arguments.requests, arguments.seed))
    statuses = Counter[int]()
    for (_, status), count in seen.items():
        statuses[status] += count
    print(f"{arguments.requests} requests, no answer that should not be; over REST: {dict(sorted(statuses.items()))}")


if __name__ == "__main__":
    main()
