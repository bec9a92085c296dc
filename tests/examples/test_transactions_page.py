"""What `docs/transactions.md` says: its program runs, and its excerpts work in their frameworks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import holdfast as hf

PAGE = (Path(__file__).parents[2] / "docs" / "transactions.md").read_text()
[PROGRAM] = re.findall(r"(?<!an excerpt -->\n)```python\n(.*?)```", PAGE, re.DOTALL)
ALCHEMY, DJANGO = re.findall(r"an excerpt -->\n```python\n(.*?)```", PAGE, re.DOTALL)

IN_DJANGO = """
import django, sys
from django.conf import settings
settings.configure(
    DATABASES={{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db"}}}},
    INSTALLED_APPS=["holdfast.django"],
    HOLDFAST={{"APP": "shop:app", "STORE": "sqlite:///shop.db"}},
    USE_TZ=True,
)
django.setup()
import holdfast.django
import holdfast as hf
from django.db import connection, models, transaction
from holdfast.client import SyncClient
from shop import app, order

class Order(models.Model):
    id = models.TextField(primary_key=True)
    class Meta:
        app_label = "holdfast"

with SyncClient(app, "sqlite:///shop.db", node=hf.NodeOptions()) as node:
    with connection.schema_editor() as editor:
        editor.create_model(Order)
    try:
        with transaction.atomic():
            holdfast.django.client().start(order, "gone", reference_key="gone", connection=connection)
            raise KeyError
    except KeyError:
        pass
{excerpt}
    [run] = node.runs.list().items
    node.run(run.run_id).signal("paid")
    print(node.result(run.run_id), [row.id for row in Order.objects.all()])
connection.close()
"""


def run(folder: Path, script: str) -> str:
    """Run a script beside the page's program."""
    (folder / "shop.py").write_text(PROGRAM)
    command = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_program_runs(tmp_path: Path) -> None:
    assert run(tmp_path, "import asyncio, shop; asyncio.run(shop.main())") == "shipped o-1\n"


def test_the_excerpt_works_in_django(tmp_path: Path) -> None:
    excerpt = "".join(f"    {line}\n" for line in DJANGO.splitlines())
    assert run(tmp_path, IN_DJANGO.format(excerpt=excerpt)) == "shipped o-1 ['o-1']\n"


@pytest.mark.postgres
async def test_the_excerpt_works_with_sqlalchemy(postgres_url: str) -> None:
    class Base(DeclarativeBase):
        pass

    class Order(Base):
        __tablename__ = "caller_orders"
        id: Mapped[str] = mapped_column(primary_key=True)

    app = hf.App("shop")

    @app.workflow
    async def order(order_id: str) -> str:
        return f"shipped {order_id}"

    engine = create_async_engine(postgres_url.replace("postgresql://", "postgresql+asyncpg://"))
    names = {"AsyncSession": AsyncSession, "engine": engine, "Order": Order, "app": app, "order": order}
    body = "".join(f"    {line}\n" for line in ALCHEMY.splitlines())
    exec(f"async def excerpt():\n{body}", names)
    async with app.node(postgres_url):
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        await names["excerpt"]()  # type: ignore[operator]
        again = await app.start(order, "o-1", request_id="o-1")
        assert await again.result() == "shipped o-1"
        async with engine.begin() as connection:
            assert len((await connection.exec_driver_sql("SELECT id FROM caller_orders")).all()) == 1
            await connection.run_sync(Base.metadata.drop_all)
    await engine.dispose()
