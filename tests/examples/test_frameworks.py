"""What `docs/frameworks.md` says: its programs run, in their frameworks, as files beside each other."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
FILES = dict(re.findall(r'```python title="(\w+\.py)"\n(.*?)```', PAGE, re.DOTALL))

IN_FASTAPI = """
from starlette.testclient import TestClient
from web import web

with TestClient(web, base_url="http://localhost") as http:
    run_id = http.post("/orders/o-1").json()["run_id"]
    assert http.post("/orders/o-1").json()["run_id"] == run_id
    assert http.get("/ops/").status_code == 200
    assert http.get("/orders/none").json()["code"] == "NotFound"
    assert http.post(f"/ops/v1/runs/{run_id}/signals/approval", json={}).status_code == 202
    print(http.get(f"/ops/v1/runs/{run_id}/result?wait_s=20").json()["result"])
"""
IN_FLASK = """
import asyncio, threading
from flask_web import client, web
import holdfast as hf
from shop import app
from holdfast.client import SyncClient

with SyncClient(app, "sqlite:///shop.db", node=hf.NodeOptions()):
    http = web.test_client()
    run_id = http.post("/orders/o-1").json["run_id"]
    print(http.post(f"/orders/{run_id}/approval").json["result"])
"""
IN_DJANGO = """
import django
from django.conf import settings
import os
os.environ["DJANGO_SETTINGS_MODULE"] = "project"
django.setup()
from django.test import Client
from django.core.management import call_command
call_command("check")
call_command("migrate", verbosity=0)
run_id = Client().post("/orders/o-1").json()["run_id"]
from holdfast.django import client
import holdfast as hf
from holdfast.client import SyncClient
from shop import app
from asgi import application
assert callable(application)
with SyncClient(app, "sqlite:///holdfast.db", node=hf.NodeOptions()):
    client().run(run_id).signal("approval")
    print(client().run(run_id).result())
"""
PROJECT = """
from settings import *
SECRET_KEY = "a"
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "urls"
USE_TZ = True
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "site.db"}}
"""
URLS = """
from django.urls import path
from views import place
urlpatterns = [path("orders/<str:order_id>", place)]
"""


@pytest.mark.parametrize("script", [IN_FASTAPI, IN_FLASK, IN_DJANGO], ids=["FastAPI", "Flask and scripts", "Django"])
def test_the_programs_on_the_page_run(script: str, tmp_path: Path) -> None:
    for name, text in {**FILES, "project.py": PROJECT, "urls.py": URLS}.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-W", "error", "-W", "ignore:Using `httpx`", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "receipt of o-1" in done.stdout


@pytest.mark.process
def test_the_test_on_the_page_passes(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-o", "asyncio_mode=auto", "test_web.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
