"""Search by attributes, seen by callers of different tenants, projects and environments, and live."""

import pytest

import holdfast as hf
from holdfast.core.search import Order, parse_conditions
from holdfast.service.auth.tenancy import TenantView
from holdfast.store.port import RunCount, RunCountQuery, RunQuery
from holdfast.testing.samples import new_run


@pytest.mark.contract("API-4", "QUE-4")
async def test_a_tenant_finds_and_counts_its_own_runs_alone() -> None:
    store = hf.MemoryStore()
    places = [("a", "x", "live"), ("a", "x", "test"), ("a", "y", "live"), ("b", "x", "live")]
    await store.create(
        [
            new_run(f"r{number}", tenant=tenant, project=project, environment=environment, attributes={"cents": number})
            for number, (tenant, project, environment) in enumerate(places)
        ]
    )
    where = parse_conditions("cents>=0", {})
    for place, expected in (
        (("a", None, None), ["r0", "r1", "r2"]),
        (("a", "x", None), ["r0", "r1"]),
        (("a", "x", "test"), ["r1"]),
        (("b", None, None), ["r3"]),
        (("c", None, None), []),
    ):
        own = TenantView(store, *place)
        found: list[str] = []
        behind = None
        while True:
            page = await own.find(RunQuery(where=where, order=Order("cents", "n"), behind=behind, limit=1))
            found += [head.run_id for head in page]
            behind = page.cursor
            if behind is None:
                break
        assert found == expected
        counted = await own.find(RunCountQuery(runs=RunQuery(where=where)))
        assert sum(each.count for each in counted) == len(expected)
        assert all(isinstance(each, RunCount) for each in counted)
        assert counted.cursor is None
