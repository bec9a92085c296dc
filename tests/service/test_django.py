"""Holdfast in a Django project: its client in views, API and page for the staff, and the command of `manage.py`."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import django
import httpx
import pytest
from asgiref.sync import sync_to_async
from django.conf import settings

import holdfast as hf
from holdfast.errors import NotAuthenticated

PROJECT = """
import os, sys
from django.core.management import execute_from_command_line
os.environ["DJANGO_SETTINGS_MODULE"] = "site_settings"
if __name__ == "__main__":
    execute_from_command_line(sys.argv)
"""
SETTINGS = """
SECRET_KEY = "a"
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "django.contrib.sessions", "holdfast.django"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "site.db"}}
HOLDFAST = {"APP": "site_workflows:app", "STORE": "sqlite:///holdfast.db"}
"""
WORKFLOWS = """
import holdfast as hf
app = hf.App("shop")

@app.workflow
async def hello(name: str) -> str:
    return f"hello {name}"
"""


PLAIN_STAFF = {"is_staff": True, "is_active": True, "is_superuser": False}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Configure Django, once for this process, with a project in a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "site_workflows.py").write_text(WORKFLOWS)
    sys.path.insert(0, str(folder))
    if not settings.configured:
        settings.configure(
            SECRET_KEY="a",
            ALLOWED_HOSTS=["*"],
            INSTALLED_APPS=[
                "django.contrib.contenttypes",
                "django.contrib.auth",
                "django.contrib.sessions",
                "holdfast.django",
            ],
            MIDDLEWARE=["django.contrib.sessions.middleware.SessionMiddleware"],
            DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(folder / "site.db")}},
            HOLDFAST={"APP": "site_workflows:app", "STORE": f"sqlite:///{folder}/holdfast.db"},
            ROOT_URLCONF="django.contrib.auth.urls",
            USE_TZ=True,
        )
        django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    yield folder
    from django.db import connections

    connections.close_all()
    sys.path.remove(str(folder))


def signed_in(name: str, *groups: str, **fields: Any) -> str:
    """Make a user, sign them in, and return the key of their session."""
    from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
    from django.contrib.auth.models import Group, User
    from django.contrib.sessions.backends.db import SessionStore

    user, _ = User.objects.update_or_create(username=name, defaults={**PLAIN_STAFF, **fields})
    user.set_password("p")
    user.save()
    user.groups.set([Group.objects.get_or_create(name=group)[0] for group in groups])
    session = SessionStore()
    session[SESSION_KEY] = str(user.pk)
    session[BACKEND_SESSION_KEY] = "django.contrib.auth.backends.ModelBackend"
    session[HASH_SESSION_KEY] = user.get_session_auth_hash()
    session.create()
    return str(session.session_key)


@asynccontextmanager
async def served() -> AsyncIterator[httpx.AsyncClient]:
    """Serve the project as its `asgi.py` does, and run the lifespan as a server does."""
    from django.core.asgi import get_asgi_application

    from holdfast.django import asgi_application

    application = asgi_application(get_asgi_application())
    received: asyncio.Queue[Any] = asyncio.Queue()
    sent: asyncio.Queue[Any] = asyncio.Queue()
    serving = asyncio.ensure_future(application({"type": "lifespan"}, received.get, sent.put))
    received.put_nowait({"type": "lifespan.startup"})
    assert (await sent.get())["type"] == "lifespan.startup.complete"
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://localhost") as http:
            yield http
    finally:
        received.put_nowait({"type": "lifespan.shutdown"})
        await serving


@pytest.mark.contract("API-4")
async def test_the_staff_of_the_site_uses_api_and_page(site: Path) -> None:
    async with served() as http:
        moved = await http.get("/holdfast")
        assert (moved.status_code, moved.headers["location"]) == (307, "/holdfast/")
        assert 'content="/holdfast"' in (await http.get("/holdfast/")).text
        assert (await http.get("/holdfast/v1/runs")).status_code == 401
        ann = await sync_to_async(signed_in)("ann", "holdfast-engineer")
        cookie = {"cookie": f"sessionid={ann}"}
        session = (await http.get("/holdfast/session", headers=cookie)).json()
        assert session["name"] == "ann"
        assert "runs:write" in session["scopes"]
        assert "admin" not in session["scopes"]
        start = {"workflow": "hello", "input": {"name": "a"}}
        foreign = await http.post("/holdfast/v1/runs", json=start, headers={**cookie, "origin": "http://evil"})
        assert foreign.status_code == 403
        own = await http.post("/holdfast/v1/runs", json=start, headers={**cookie, "origin": "http://localhost"})
        assert own.status_code == 201
        assert (await http.get("/login/")).status_code in (200, 500)  # Django's own


@pytest.mark.parametrize(
    ("fields", "groups", "status"),
    [
        ({"is_staff": False}, ("holdfast-admin",), 401),
        ({"is_active": False}, ("holdfast-admin",), 401),
        ({}, ("others",), 403),
        ({"is_superuser": True}, (), 200),
        ({}, ("holdfast-viewer",), 200),
    ],
)
async def test_who_is_not_of_the_staff_or_has_no_role_is_refused(
    site: Path, fields: dict[str, bool], groups: tuple[str, ...], status: int
) -> None:
    key = await sync_to_async(signed_in)("bob", *groups, **fields)
    async with served() as http:
        answer = await http.get("/holdfast/v1/runs", headers={"cookie": f"sessionid={key}"})
        assert answer.status_code == status


async def test_a_session_that_is_not_known_is_nobody(site: Path) -> None:
    from holdfast.django import authenticate_staff

    for cookie in (b"", b"sessionid=", b"sessionid=forged", b"\xff\xfe"):
        with pytest.raises(NotAuthenticated):
            await authenticate_staff({b"cookie": cookie})


def test_views_share_one_client(site: Path) -> None:
    from holdfast.django import app, client

    shared = client()
    assert shared is client()
    hello: hf.Workflow[..., str] = hf.Workflow(app().registry.workflow("hello"))
    run = shared.start(hello, "view")
    assert run.status() == "PENDING"  # a node is another process


@pytest.mark.parametrize(
    ("given", "match"),
    [({}, "names the app"), ({"APP": "a:b", "STOER": ""}, "STOER is not known"), (None, "names the app")],
)
def test_a_setting_that_is_wrong_is_named(site: Path, given: Any, match: str) -> None:
    from django.test.utils import override_settings

    from holdfast.django.apps import check_configuration

    with override_settings(HOLDFAST=given):
        [problem] = check_configuration(None)
        assert match in problem.msg
    assert check_configuration(None) == []


@pytest.mark.process
def test_the_command_of_manage_py_knows_app_and_store(tmp_path: Path) -> None:
    (tmp_path / "manage.py").write_text(PROJECT)
    (tmp_path / "site_settings.py").write_text(SETTINGS)
    (tmp_path / "site_workflows.py").write_text(WORKFLOWS)

    def manage(*words: str) -> str:
        command = [sys.executable, "manage.py", "holdfast", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    manage("store", "migrate")
    assert (tmp_path / "holdfast.db").exists()
    assert "hello" in manage("run", "start", "hello", "name=a", "--json")
    manage("check-histories")
    assert "SIGTERM" in manage("node", "--help")


def test_commands_about_an_app_get_that_of_the_settings(site: Path) -> None:
    from holdfast.django.management.commands.holdfast import arguments_of

    assert arguments_of(["node", "--queue", "mail"]) == ["node", "site_workflows:app", "--queue", "mail"]
    assert arguments_of(["run", "list"]) == ["run", "list", "--app", "site_workflows:app"]
    for given in (["run", "list", "--server", "http://localhost:1"], ["store", "info"], ["node", "--help"], []):
        assert arguments_of(given) == given
