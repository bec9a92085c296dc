"""Encryption of payloads with AES-GCM, and the keys for it. It needs the package `cryptography`.

**Keys** have an id and 256 bits. The first one encrypts, the others are there to read what was written before: to
rotate, put a new key in front, and remove an old one once nothing that it encrypted is kept any more. What is stored
begins with the id of its key.

**Bound to a run.** Each run has keys of its own, derived from these by HMAC-SHA256, and the id of the run is the
associated data. So a value cannot be moved to another run, and however many values there are, a key of AES-GCM never
meets more than those of one run. The nonce is drawn anew for each value.

**Fingerprints**, by which the store recognises a value that is sent again, are an HMAC of its digest: a digest alone
would let everyone with the database try out what the value is. Their key is drawn when a store first sees encryption,
and is kept in it once for each of these keys, hidden by a pad derived from that key: it survives rotations, and the
store alone does not reveal it.

The length of a value, and that there is one, are not hidden.
"""

import hmac
import re
from base64 import b64decode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.clock import Secrets, SystemSecrets
from holdfast.errors import InvalidInput
from holdfast.settings import EncryptionSettings
from holdfast.store.payloads import Payload
from holdfast.store.port import Store

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
except ImportError as missing:
    raise InvalidInput(
        "encryption needs a package: pip install 'holdfast[encryption]'", field="encryption"
    ) from missing

KEY_BYTES = 32
NONCE_BYTES = 12
CACHED_RUNS = 4_096

_KEY_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FINGERPRINT_KEY = "payload-fingerprints"


class Encryption:
    """Encrypts payloads: a `PayloadCodec`. Give it to `App(codecs=…)`, or name keys in the settings."""

    name = "aes-gcm"

    def __init__(
        self, keys: Mapping[str, bytes | str], *, encrypts: bool = True, secrets: Secrets | None = None
    ) -> None:
        """`keys` by their ids, each as 32 bytes or their text in hex or base64. The first one encrypts.

        Without `encrypts` it only reads: for the time in which not all nodes have the keys yet.
        """
        if not keys:
            raise InvalidInput("encryption needs at least one key", field="keys")
        self._keys = {_key_id(key_id): _key(key_id, key) for key_id, key in keys.items()}
        self._encrypts = encrypts
        self._secrets = secrets or SystemSecrets()
        self._ciphers: dict[tuple[str, str], AESGCM] = {}
        self._fingerprints = b""

    def __repr__(self) -> str:
        return f"Encryption(keys={list(self._keys)})"

    @classmethod
    def from_settings(cls, settings: EncryptionSettings) -> "Encryption":
        """Return the encryption that settings name: keys as `id:key`, separated by commas or line ends."""
        text = settings.keys
        if settings.keys_file:
            try:
                text = Path(settings.keys_file).read_text()
            except (OSError, UnicodeDecodeError) as problem:
                raise InvalidInput(f"the keys cannot be read: {problem}", field="encryption.keys_file") from problem
        keys: dict[str, bytes | str] = {}
        for entry in re.split(r"[,\s]+", text.strip()):
            key_id, separator, key = entry.partition(":")
            if not separator or key_id in keys:
                raise InvalidInput("keys are written as id:key, each id once", field="encryption.keys")
            keys[key_id] = key
        return cls(keys, encrypts=settings.encrypts)

    async def open(self, store: Store) -> None:
        """Find or make the store's key for fingerprints."""
        key = b""
        for key_id in reversed(self._keys):  # the oldest first: it was there when the others came
            pad = hmac.digest(self._keys[key_id], b"holdfast fingerprints", "sha256")
            fresh = key or bytes.fromhex(self._secrets.new_secret())
            kept = await store.put_key(f"{_FINGERPRINT_KEY}/{key_id}", _xor(fresh, pad).hex())
            key = key or _xor(bytes.fromhex(kept), pad)
        self._fingerprints = key

    async def encode(self, payloads: Sequence[Payload]) -> list[bytes | None]:
        """Return each payload encrypted with the first key."""
        if not self._encrypts:
            return [None] * len(payloads)
        key_id = next(iter(self._keys))
        head = key_id.encode() + b":"
        sealed: list[bytes | None] = []
        for scope, data in payloads:
            nonce = bytes.fromhex(self._secrets.new_secret())[:NONCE_BYTES]
            sealed.append(head + nonce + self._cipher(key_id, scope).encrypt(nonce, data, _bound_to(key_id, scope)))
        return sealed

    async def decode(self, payloads: Sequence[Payload]) -> list[bytes | str]:
        """Return each payload decrypted, or why it cannot be."""
        return [self._decrypt(scope, data) for scope, data in payloads]

    def _decrypt(self, scope: str, data: bytes) -> bytes | str:
        head, _, rest = data.partition(b":")
        key_id = head.decode("ascii", "replace")
        if key_id not in self._keys:
            return f"it is encrypted with key {key_id!r}, which is missing here"
        try:
            cipher, bound_to = self._cipher(key_id, scope), _bound_to(key_id, scope)
            return bytes(cipher.decrypt(rest[:NONCE_BYTES], rest[NONCE_BYTES:], bound_to))
        except (InvalidTag, ValueError):
            return f"it is not what was encrypted with key {key_id!r} for this run: it was changed, or moved"

    def fingerprint(self, scope: str, sha256: str) -> str:
        """Return the HMAC of a digest."""
        return hmac.digest(self._fingerprints, f"{scope}|{sha256}".encode(), "sha256").hex()

    def _cipher(self, key_id: str, scope: str) -> AESGCM:
        cipher = self._ciphers.get((key_id, scope))
        if cipher is None:
            if len(self._ciphers) >= CACHED_RUNS:
                self._ciphers.clear()
            key = hmac.digest(self._keys[key_id], f"holdfast run {scope}".encode(), "sha256")
            cipher = self._ciphers[key_id, scope] = AESGCM(key)
        return cipher


def _bound_to(key_id: str, scope: str) -> bytes:
    return f"holdfast|{key_id}|{scope}".encode()


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


def _key_id(key_id: Any) -> str:
    if not isinstance(key_id, str) or not _KEY_ID.fullmatch(key_id):
        raise InvalidInput("the id of a key is 1 to 64 letters, digits and _ . -", field="keys")
    return key_id


def _key(key_id: str, key: bytes | str) -> bytes:
    """Return the 32 bytes of a key. What is wrong with one is said without showing it."""
    found = b""
    try:
        if isinstance(key, bytes):
            found = key
        elif isinstance(key, str):
            found = bytes.fromhex(key) if len(key) == 2 * KEY_BYTES else b64decode(key, validate=True)
    except ValueError:
        pass
    if len(found) != KEY_BYTES:
        raise InvalidInput(f"key {key_id!r} is not {KEY_BYTES} bytes, as they are, in hex or in base64", field="keys")
    return found
