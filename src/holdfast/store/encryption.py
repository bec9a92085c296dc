"""Encryption of payloads with AES-GCM, and its keys. This needs the package `cryptography`.

**Keys** have an id and 256 bits. The first one encrypts; the others only decrypt older values. To rotate, put a new key
in front, and remove an old one when nothing that it encrypted is kept any more. Stored values begin with the id of
their key.

**Bound to a run.** Each run has its own keys, derived from these by HMAC-SHA256, and the id of the run is the
associated data. So a value cannot be moved to another run, and however many values there are, an AES-GCM key only
encrypts those of one run. Each value gets a new random nonce.

**Fingerprints**, by which the store recognises a repeated value, are an HMAC of its digest: with a plain digest,
everyone with access to the database could test guesses of the value. The key of the HMAC is generated when a store is
first used with encryption. It is stored there once for each of the encryption keys, hidden by a pad derived from that
key: it survives rotations, and the store alone does not reveal it.

**Artifacts** are encrypted as they stream, in frames of a bounded size. Each artifact has its own key, derived with a
salt that is stored in front of it; the nonce is the number of the frame and whether it is the last. So frames cannot be
exchanged, left out or added, and no nonce occurs twice. The associated data is the artifact's location.

The length of a value, and its existence, are not hidden.
"""

import hmac
import re
from base64 import b64decode
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.clock import Secrets, SystemSecrets
from holdfast.errors import ArtifactCorrupt, InvalidInput, PayloadUnreadable
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
SALT_BYTES = 32
TAG_BYTES = 16
FRAME_BYTES = 1024 * 1024
"""The size of an encrypted frame of an artifact."""
CACHED_RUNS = 4_096

_KEY_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FINGERPRINT_KEY = "payload-fingerprints"


class Encryption:
    """Encrypts payloads: a `PayloadCodec`. Give it to `App(codecs=…)`, or name keys in the settings."""

    name = "aes-gcm"

    def __init__(
        self, keys: Mapping[str, bytes | str], *, encrypts: bool = True, secrets: Secrets | None = None
    ) -> None:
        """`keys` by their ids, each as 32 bytes or as text in hex or base64. The first one encrypts.

        Without `encrypts` it only decrypts, for the time in which not all nodes have the keys yet.
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
        """Load or create the store's key for fingerprints."""
        key = b""
        for key_id in reversed(self._keys):  # the oldest first: it existed when the others were added
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
        """Return each payload decrypted, or the reason why it cannot be decrypted."""
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

    def encode_stream(self, of: str, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes] | None:
        """Return an artifact encrypted with the first key."""
        return self._encrypted(of, chunks) if self._encrypts else None

    async def _encrypted(self, of: str, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        key_id, salt = next(iter(self._keys)), bytes.fromhex(self._secrets.new_secret())[:SALT_BYTES]
        cipher, bound_to = self._stream_cipher(key_id, salt), _bound_to(key_id, of)
        yield key_id.encode() + b":" + salt
        number, pending = 0, bytearray()
        async for chunk in chunks:
            pending += chunk
            while len(pending) > FRAME_BYTES:
                yield cipher.encrypt(_frame_nonce(number), bytes(pending[:FRAME_BYTES]), bound_to)
                del pending[:FRAME_BYTES]
                number += 1
        yield cipher.encrypt(_frame_nonce(number, is_last=True), bytes(pending), bound_to)

    async def decode_stream(self, of: str, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield an artifact decrypted. Each frame is verified before any of it is yielded."""
        pending, number = bytearray(), 0
        cipher: AESGCM | None = None
        bound_to = b""
        async for chunk in chunks:
            pending += chunk
            if cipher is None:
                head, separator, rest = bytes(pending).partition(b":")
                if not separator or len(rest) < SALT_BYTES:
                    continue
                cipher, bound_to = self._opening_cipher(of, head, rest[:SALT_BYTES])
                del pending[: len(head) + 1 + SALT_BYTES]
            while len(pending) > FRAME_BYTES + TAG_BYTES:
                yield _opened(cipher, _frame_nonce(number), bytes(pending[: FRAME_BYTES + TAG_BYTES]), bound_to, of)
                del pending[: FRAME_BYTES + TAG_BYTES]
                number += 1
        if cipher is None:
            raise _corrupt(of)
        yield _opened(cipher, _frame_nonce(number, is_last=True), bytes(pending), bound_to, of)

    def _opening_cipher(self, of: str, head: bytes, salt: bytes) -> tuple[AESGCM, bytes]:
        key_id = head.decode("ascii", "replace")
        if key_id not in self._keys:
            words = f"artifact {of!r} is encrypted with key {key_id[:64]!r}, which is missing here"
            raise PayloadUnreadable(words)
        return self._stream_cipher(key_id, salt), _bound_to(key_id, of)

    def _stream_cipher(self, key_id: str, salt: bytes) -> AESGCM:
        return AESGCM(hmac.digest(self._keys[key_id], b"holdfast artifact " + salt, "sha256"))

    def _cipher(self, key_id: str, scope: str) -> AESGCM:
        cipher = self._ciphers.get((key_id, scope))
        if cipher is None:
            if len(self._ciphers) >= CACHED_RUNS:
                self._ciphers.clear()
            key = hmac.digest(self._keys[key_id], f"holdfast run {scope}".encode(), "sha256")
            cipher = self._ciphers[key_id, scope] = AESGCM(key)
        return cipher


def _frame_nonce(number: int, *, is_last: bool = False) -> bytes:
    return number.to_bytes(NONCE_BYTES - 1, "big") + bytes([is_last])


def _opened(cipher: AESGCM, nonce: bytes, frame: bytes, bound_to: bytes, of: str) -> bytes:
    try:
        return bytes(cipher.decrypt(nonce, frame, bound_to))
    except (InvalidTag, ValueError):
        raise _corrupt(of) from None


def _corrupt(of: str) -> ArtifactCorrupt:
    return ArtifactCorrupt(f"artifact {of!r} is not what was encrypted: it was changed, cut or moved")


def _bound_to(key_id: str, scope: str) -> bytes:
    return f"holdfast|{key_id}|{scope}".encode()


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


def _key_id(key_id: Any) -> str:
    if not isinstance(key_id, str) or not _KEY_ID.fullmatch(key_id):
        raise InvalidInput("the id of a key is 1 to 64 letters, digits and _ . -", field="keys")
    return key_id


def _key(key_id: str, key: bytes | str) -> bytes:
    """Return the 32 bytes of a key. Errors describe a malformed key without showing it."""
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
