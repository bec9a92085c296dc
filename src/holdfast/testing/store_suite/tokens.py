"""The store suite, access tokens: kept as they were created, found by page, and never valid again once revoked."""

from itertools import permutations
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.core.access import AccessToken, merge_tokens
from holdfast.errors import InvalidInput
from holdfast.store.port import Store
from holdfast.store.queries import TokenQuery
from holdfast.testing import START, VirtualClock
from holdfast.testing.samples import access_token
from holdfast.testing.store_suite.base import SuiteBase, unchanged

RICH = access_token(
    role="operator",
    scopes=("runs:write",),
    roles=("clerk", "boss"),
    tenant="acme",
    project="shop",
    environment="test",
    created_by="bob",
    expires_at=START + 7,
)


class TokenSuite(SuiteBase):
    """Knowledge about tokens only grows."""

    @pytest.mark.contract("API-4")
    async def test_tokens_are_kept_as_they_were_made(self, store: Store, peer: Store) -> None:
        """Other processes see them immediately."""
        plain = access_token("a" * 16, name="日本語")
        assert await store.put_tokens([RICH, plain]) == [RICH, plain]
        assert await peer.find_tokens(TokenQuery()) == [RICH, plain]
        assert await store.find_tokens(TokenQuery(token_ids=(plain.token_id, "nowhere"))) == [plain]
        assert await store.find_tokens(TokenQuery(token_ids=())) == []

    @pytest.mark.contract("API-4")
    async def test_a_token_that_was_revoked_stays_so_whatever_is_kept_later(self, store: Store, peer: Store) -> None:
        """Such as the record of a process that does not know of the revocation, and only reports a use of the token."""
        await store.put_tokens([RICH])
        revoked = replace(RICH, revoked_at=START + 3, revoked_by="ann")
        assert await store.put_tokens([revoked]) == [revoked]
        [late] = await peer.put_tokens([replace(RICH, last_used_at=START + 5)])
        assert (late.revoked_at, late.revoked_by, late.last_used_at) == (START + 3, "ann", START + 5)
        assert await store.find_tokens(TokenQuery()) == [late]
        [again] = await store.put_tokens([replace(RICH, revoked_at=START + 9, revoked_by="bob")])
        assert again == late

    @pytest.mark.contract("API-4")
    async def test_nothing_else_of_a_token_can_be_changed(self, store: Store) -> None:
        """Neither its identity, nor its permissions, nor its secret."""
        await store.put_tokens([RICH])
        async with unchanged(store):
            other = access_token(RICH.token_id, "e" * 64, role="admin", tenant=None, name="eve")
            assert await store.put_tokens([other]) == [RICH]

    @pytest.mark.contract("API-4")
    async def test_records_of_a_token_can_be_kept_in_any_order(self, store: Store) -> None:
        """The result is that of `merge_tokens`."""
        changes: list[dict[str, Any]] = [
            {"last_used_at": START + 1},
            {"last_used_at": START + 4},
            {"revoked_at": START + 2, "revoked_by": "ann"},
            {"revoked_at": START + 3, "revoked_by": "bob", "last_used_at": START + 2},
        ]
        for number, order in enumerate(permutations(changes)):
            token = access_token(f"{number:016x}")
            expected = token
            for change in order:
                expected = merge_tokens(expected, replace(token, **change))
                [kept] = await store.put_tokens([replace(token, **change)])
            assert kept == expected
            assert (kept.revoked_by, kept.last_used_at) == ("ann", START + 4)

    @pytest.mark.contract("API-4")
    async def test_tokens_are_found_by_tenant_and_page(self, store: Store) -> None:
        """The order is by id."""
        tokens = [access_token(f"{number:016x}", tenant=f"t{number % 2}") for number in range(45)]
        await store.put_tokens(list(reversed(tokens)))
        found: list[AccessToken] = []
        while page := await store.find_tokens(TokenQuery(tenant="t1", after=found[-1].token_id if found else "")):
            found += page
        assert found == tokens[1::2]
        assert await store.find_tokens(TokenQuery(limit=2)) == tokens[:2]

    @pytest.mark.contract("API-4")
    async def test_sessions_are_found_if_asked_for_and_go_when_they_have_run_out(
        self, store: Store, clock: VirtualClock
    ) -> None:
        """Expired tokens stay, so that their former holders can be seen."""
        session = access_token("a" * 16, session_of=RICH.token_id, expires_at=START + 1_000)
        ended = replace(RICH, expires_at=START + 1_000)
        await store.put_tokens([ended, session])
        assert await store.find_tokens(TokenQuery()) == [ended]
        assert await store.find_tokens(TokenQuery(sessions=True)) == [ended, session]
        clock.advance(ms=1)
        await store.put_tokens([access_token("b" * 16)])
        left = await store.find_tokens(TokenQuery(sessions=True))
        assert [token.token_id for token in left] == [ended.token_id, "b" * 16]

    @pytest.mark.contract("API-2")
    async def test_a_malformed_token_is_refused(self, store: Store) -> None:
        """None of the tokens in the same call is stored."""
        malformed: list[dict[str, Any]] = [
            {"token_id": ""},
            {"token_id": "\ud800"},
            {"name": None},
            {"digest": "secret"},
            {"scopes": ("",)},
            {"roles": (7,)},
            {"tenant": ""},
            {"expires_at": 1.5},
            {"revoked_at": 2**70},
            {"revoked_by": "\ud800"},
        ]
        async with unchanged(store):
            for changes in malformed:
                with pytest.raises(InvalidInput):
                    await store.put_tokens([access_token("a" * 16), replace(RICH, **changes)])
            with pytest.raises(InvalidInput):
                await store.put_tokens(["token"])  # type: ignore[list-item]
            with pytest.raises(InvalidInput):
                await store.find_tokens(TokenQuery(token_ids=("\ud800",)))
