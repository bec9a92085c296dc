"""Access tokens as they are kept: what is known of the secret, who has it, and what it is good for.

A token is `holdfast_`, sixteen hex digits by which it is found and recognised, `_`, a secret of 256 random bits, and
a checksum of eight digits: so scanners of source code find tokens, and tell them from what only looks like one. Of
the secret only its SHA-256 is kept. A slow hash would add nothing: it makes guessing expensive where secrets are few,
such as passwords, and nobody guesses 256 bits.

A kept token never becomes valid again: what is known of it only grows, so records of it can be joined in any order.
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
"""What tokens began with before; others' tokens do too, so it is refused, with a word of it."""

_TOKEN = re.compile(rf"({PREFIX}([0-9a-f]{{16}})_([0-9a-f]{{64}}))([0-9a-f]{{8}})")


class AccessToken(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is kept of a token. `role` and `scopes` are what it is good for, `roles` are its bearer's for tasks.

    Without a tenant it is for all of them; without a project or an environment, for all of its tenant. A session is a
    token of a browser, made from the token `session_of`, and good for as long as that one is. `created_by` is the id of
    the token that made it, or the name of who did where that is known by other means.
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
        """Say whether it is neither revoked nor past its end."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


def write_token(token_id: str, secret: str) -> str:
    """Return the token as its bearer has it."""
    text = f"{PREFIX}{token_id}_{secret}"
    return f"{text}{crc32(text.encode()):08x}"


def read_token(text: str) -> tuple[str, str] | None:
    """Return id and secret of what may be a token, or None. The checksum is no secret: it only saves a look-up."""
    found = _TOKEN.fullmatch(text) if len(text) == TOKEN_CHARS else None
    if found is None or f"{crc32(found[1].encode()):08x}" != found[4]:
        return None
    return found[2], found[3]


def digest_of(secret: str) -> str:
    """Return what is kept of a secret."""
    return sha256(secret.encode()).hexdigest()


def is_secret_of(token: AccessToken | None, secret: str) -> bool:
    """Say whether this is the token's secret, in the same time whether it is, or whether there is a token at all."""
    known = token.digest if token is not None else "0" * 64
    return compare_digest(known, digest_of(secret)) and token is not None


def joined(kept: AccessToken, given: AccessToken) -> AccessToken:
    """Return what is known of a token from two records: the first revocation, and the last use. The rest is kept."""
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


def has_run_out(token: AccessToken, now: Instant) -> bool:
    """Say whether this is a session past its end, which nobody needs to know of any more."""
    return token.session_of is not None and token.expires_at is not None and token.expires_at <= now
