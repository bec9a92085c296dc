"""Access tokens as a store keeps them: the digest of the secret, the bearer, and what the token permits.

A token is `holdfast_`, its id of sixteen hex digits, `_`, a secret of 256 random bits, and a checksum of eight digits,
so that scanners of source code find tokens and recognise false ones. Only the SHA-256 of the secret is stored. A slow
hash would add nothing: it makes guessing expensive where secrets have little entropy, such as passwords.

A revoked token never becomes valid again: a record only gains facts, so records of a token can be merged in any order.
"""

import re
from hashlib import sha256
from hmac import compare_digest
from zlib import crc32

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.instants import Instant

PREFIX = "holdfast_"
TOKEN_CHARS = len(PREFIX) + 16 + 1 + 64 + 8
FORMER_PREFIX = "hf_"
"""The former prefix of tokens. Other products use it too, so such a token is refused, with an error that says so."""

_TOKEN = re.compile(rf"({PREFIX}([0-9a-f]{{16}})_([0-9a-f]{{64}}))([0-9a-f]{{8}})")


class AccessToken(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A token as it is stored. `role` and `scopes` are what it permits; `roles` are its bearer's roles for tasks.

    Without a tenant it is valid for all tenants; without a project or an environment, for all of its tenant. A session
    is a browser's token. It is made from the token `session_of` and valid for as long as that one. `created_by` is the
    id of the token that made it, or the name of the person, if that is known by other means.
    """

    token_id: str
    digest: str
    name: str
    role: str = ""
    scopes: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    tenant: str | None = None
    project: str | None = None
    environment: str | None = None
    created_at: Instant
    created_by: str = ""
    expires_at: Instant | None = None
    session_of: str | None = None
    revoked_at: Instant | None = None
    revoked_by: str = ""
    last_used_at: Instant | None = None
    version: int = 1

    def is_valid(self, now: Instant) -> bool:
        """Return whether it is neither revoked nor expired."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


def write_token(token_id: str, secret: str) -> str:
    """Return the token as text, for its bearer."""
    text = f"{PREFIX}{token_id}_{secret}"
    return f"{text}{crc32(text.encode()):08x}"


def read_token(text: str) -> tuple[str, str] | None:
    """Return the id and the secret of a well-formed token, or None. The checksum is not secret: it saves a look-up."""
    found = _TOKEN.fullmatch(text) if len(text) == TOKEN_CHARS else None
    if found is None or f"{crc32(found[1].encode()):08x}" != found[4]:
        return None
    return found[2], found[3]


def digest_of(secret: str) -> str:
    """Return the digest of a secret; it is stored instead of the secret."""
    return sha256(secret.encode()).hexdigest()


def is_secret_of(token: AccessToken | None, secret: str) -> bool:
    """Return whether this is the token's secret. It takes constant time, even if there is no such token."""
    known = token.digest if token is not None else "0" * 64
    return compare_digest(known, digest_of(secret)) and token is not None


def merge_tokens(kept: AccessToken, given: AccessToken) -> AccessToken:
    """Return the merged record of a token: the first revocation, the last use, and the rest as stored."""
    revoked = min(
        (token for token in (kept, given) if token.revoked_at is not None),
        key=lambda token: token.revoked_at or 0,
        default=kept,
    )
    uses = [token.last_used_at for token in (kept, given) if token.last_used_at is not None]
    return replace(
        kept,
        revoked_at=revoked.revoked_at,
        revoked_by=revoked.revoked_by,
        last_used_at=max(uses, default=None),
    )


def is_expired_session(token: AccessToken, now: Instant) -> bool:
    """Return whether this is a session that has expired, so that its record can be deleted."""
    return token.session_of is not None and token.expires_at is not None and token.expires_at <= now
