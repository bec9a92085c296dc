"""Access tokens in the reference model."""

from collections.abc import Sequence

from holdfast.core.access import AccessToken, is_expired_session, merge_tokens
from holdfast.core.instants import Instant
from holdfast.store.queries import TokenQuery


class Tokens:
    """The tokens, by their ids."""

    def __init__(self) -> None:
        self._tokens: dict[str, AccessToken] = {}

    def put(self, tokens: Sequence[AccessToken], now: Instant) -> list[AccessToken]:
        """Store tokens, and delete expired sessions."""
        self._tokens = {id_: token for id_, token in self._tokens.items() if not is_expired_session(token, now)}
        for token in tokens:
            self._tokens[token.token_id] = merge_tokens(self._tokens.get(token.token_id, token), token)
        return [self._tokens[token.token_id] for token in tokens]

    def of_tenant(self, tenant: str | None) -> list[str]:
        """Return the ids of a tenant's tokens."""
        return [token_id for token_id, token in self._tokens.items() if token.tenant == tenant]

    def forget(self, token_ids: list[str]) -> None:
        """Delete tokens."""
        for token_id in token_ids:
            del self._tokens[token_id]

    def find(self, query: TokenQuery) -> list[AccessToken]:
        """Return the tokens that match the query."""
        return [
            token
            for token_id, token in sorted(self._tokens.items())
            if token_id > query.after
            and (query.token_ids is None or token_id in query.token_ids)
            and query.tenant in (None, token.tenant)
            and (query.sessions or token.session_of is None)
        ]
