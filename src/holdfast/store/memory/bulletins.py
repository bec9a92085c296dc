"""Bulletins in the reference model."""

from collections.abc import Iterable, Mapping

from msgspec import Raw

from holdfast.core.instants import Instant
from holdfast.store.queries import BulletinQuery
from holdfast.store.types import Bulletin


class Bulletins:
    """What processes have left for each other, by kind and id."""

    def __init__(self) -> None:
        self._bulletins: dict[tuple[str, str], Bulletin] = {}

    def put(self, kind: str, bodies: Mapping[str, Raw], keep_ms: int, now: Instant) -> list[bool]:
        """Put bulletins, except under ids that have one, and delete those that have expired."""
        self._bulletins = {key: each for key, each in self._bulletins.items() if each.expires_at > now}
        return [self._put(kind, bulletin_id, body, now, now + keep_ms * 1_000) for bulletin_id, body in bodies.items()]

    def _put(self, kind: str, bulletin_id: str, body: Raw, now: Instant, expires_at: Instant) -> bool:
        key, body = (kind, bulletin_id), Raw(bytes(body))
        bulletin = Bulletin(kind=kind, bulletin_id=bulletin_id, at=now, expires_at=expires_at, body=body)
        return self._bulletins.setdefault(key, bulletin) is bulletin

    def find(self, query: BulletinQuery, now: Instant) -> list[Bulletin]:
        """Return the bulletins that match the query."""
        return find_among(self._bulletins.values(), query, now)


def find_among(bulletins: Iterable[Bulletin], query: BulletinQuery, now: Instant) -> list[Bulletin]:
    """Return the bulletins that match the query, in order."""
    found = [
        each
        for each in bulletins
        if each.kind == query.kind
        and each.expires_at > now
        and (each.at, each.bulletin_id) > query.after
        and (query.since is None or each.at >= query.since)
        and (query.bulletin_ids is None or each.bulletin_id in query.bulletin_ids)
    ]
    return sorted(found, key=lambda each: (each.at, each.bulletin_id))
