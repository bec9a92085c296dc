"""How the process of a command ends that has a store in a bucket: no thread may abort it when everything is done."""

from __future__ import annotations

from pathlib import Path

from tests.cli.command_process import run
from tests.s3_server import S3Server

APP = """
import atexit
import os
import holdfast as hf

app = hf.App("shop")


class Noticed:
    def __del__(self) -> None:
        os.write(2, b"the interpreter is taken down")


noticed = Noticed()
atexit.register(os.write, 2, b"exit functions are called")
"""


def test_the_interpreter_is_not_taken_down_below_the_threads_of_the_bucket(tmp_path: Path, s3_server: S3Server) -> None:
    (tmp_path / "shop.py").write_text(APP)
    ended: dict[str, str] = {}
    for store in (f"s3://{s3_server.make_bucket()}/shop", "sqlite:///shop.db"):
        assert run(tmp_path, "store", "migrate", "--store", store, **s3_server.environment()).returncode == 0
        for words, code in ((("run", "list"), 0), (("run", "show", "nobody"), 3)):
            options = ("--app", "shop.py", "--store", store)
            done = run(tmp_path, *words, *options, **s3_server.environment())
            assert done.returncode == code, done.stderr
            ended[f"{store[:3]} {words[1]}"] = done.stderr
    assert all("exit functions are called" in said for said in ended.values())
    assert {name: "taken down" in said for name, said in ended.items()} == {
        "s3: list": False,
        "s3: show": False,
        "sql list": True,
        "sql show": True,
    }
