"""API keys. Requests need a key unless their route is open. Without configured keys, Authorization is ignored.

Keys come from the settings and from a file, which may change while the server runs.
"""

from __future__ import annotations

import logging
import secrets
import stat
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from hashlib import blake2b, sha256
from itertools import islice
from math import inf
from pathlib import Path
from typing import Final, NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from ..dialects import dialect_of
from ..request_state import state_of
from ..routing import Access
from ..settings import UsageError, read_key_file

logger = logging.getLogger(__name__)

SALT_BYTES: Final = 32
MAX_KEY_HEADERS: Final = 2
"""Maximum number of headers with a key in one request: Authorization and api-key. The server hashes each key."""
CHECK_EVERY_S: Final = 1.0
"""Seconds between two checks of the file."""
_NAMESPACE: Final = b"namespace"
"""The purpose of a digest, so that digests with the same salt but another purpose are unrelated."""
_Version = tuple[int, int, int, int]
_MISSING: Final[_Version] = (0, 0, 0, 0)
"""The version of a file that does not exist."""


class AuthMiddleware:
    """Accepts requests with a valid key as `Authorization: Bearer KEY`, `Authorization: KEY` or `api-key: KEY`.

    It sets `client`, `owner`, `namespace` and `key_id` of the RequestState.

    Args:
        keys: Keys for data routes. If there are none, data routes need no key.
        admin_keys: Keys for routes with Access.ADMIN_KEY.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeyStore, admin_keys: ApiKeyStore) -> None:
        self.app = app
        self.keys = keys
        self.admin_keys = admin_keys

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Responds with 401 to requests without the key that their route needs."""
        state = state_of(scope)
        access = state.access or Access.API_KEY
        if access is Access.OPEN:
            return self.app(scope, receive, send)
        keys = self.admin_keys if access is Access.ADMIN_KEY else self.keys
        owner = keys.owner_of(keys_in_headers(scope["headers"])) if keys.are_required else ""
        if owner is not None:
            state.client = keys.client_name(owner)
            state.owner = owner
            state.namespace = keys.namespace_of(owner)
            state.key_id = keys.key_id(owner)
            return self.app(scope, receive, send)
        kind = "admin key" if keys is self.admin_keys else "API key"
        message = f"The {kind} is missing or wrong; send it as the header 'Authorization: Bearer KEY'."
        if len(list(keys_in_headers(scope["headers"]))) > MAX_KEY_HEADERS:
            message = f"The request has more than {MAX_KEY_HEADERS} headers with an API key; send one."
        response = dialect_of(scope).status_error(401, message, {"www-authenticate": "Bearer"})
        return response(scope, receive, send)


def keys_in_headers(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    """Yields the keys in the headers Authorization and api-key."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, rest = value.strip().partition(b" ")
            yield rest.strip() if scheme.lower() == b"bearer" else value.strip()
        elif name == b"api-key":
            yield value.strip()


class _Owner(NamedTuple):
    """The owner of a valid key. ApiKeyStore.key_id and ApiKeyStore.namespace_of return its fields."""

    key_id: str
    namespace: str


class ApiKeyStore:
    """Stores keys as salted digests, so that neither comparison times nor identities reveal a key.

    The file has one key per line. Empty lines and lines that start with # are skipped. It is read again after a
    change. If it then cannot be read or has no key, an error is logged, the previous keys stay valid, and it is read
    again until it is valid.

    Args:
        file: File with more keys.
        flag: Option that names the file, for errors and logs.
        salt: Secret salt of the identities. Equal salts give equal identities after a restart and in other processes.
            Default: a random salt.
        namespace_salt: Secret salt of the namespaces of cached vectors and prefixes. Servers that share a cache folder
            use the salt in that folder. Default: namespaces are identities.

    Raises:
        UsageError: The file cannot be read or has no key.
    """

    def __init__(
        self,
        keys: Sequence[str],
        file: Path | None = None,
        *,
        flag: str = "--api-key-file",
        salt: bytes | None = None,
        namespace_salt: bytes | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._salt = salt or secrets.token_bytes(SALT_BYTES)
        self._namespace_salt = namespace_salt
        self._configured = self._owners_of(keys)
        self._file = file
        self._flag = flag
        self._clock_s = clock_s
        self._next_check_s = clock_s() + CHECK_EVERY_S
        self._version: _Version | None = None  # of the keys in `_owners`
        self._failed_version: _Version | None = None  # its error has been logged
        self._owners = self._configured
        if file is not None:
            try:
                self._version = _version(file)
                self._owners = self._configured | self._read(file)
            except (OSError, ValueError) as error:
                raise UsageError(f"{flag}: {_file_error(error, file)}") from error

    @property
    def are_required(self) -> bool:
        """Whether requests need a key."""
        return bool(self._owners)

    def client_name(self, owner: str) -> str:
        """Returns the identity of an owner in the fair queue: "" if there is one key only."""
        return owner if len(self._owners) > 1 else ""

    def is_valid(self, owner: str) -> bool:
        """Returns whether the key of an owner is still valid. "" is valid, and without keys every owner is."""
        self._reload_if_changed()
        return not owner or not self._owners or owner in self._owners

    def namespace_of(self, owner: str) -> str:
        """Returns the namespace of an owner's cached vectors and prefixes, a digest of key and salt."""
        return self._owners[owner].namespace if owner in self._owners else owner

    def key_id(self, owner: str) -> str | None:
        """Returns the first 8 hex digits of the SHA-256 of an owner's key; None for "", the owner without keys."""
        return self._owners[owner].key_id if owner in self._owners else None

    def owner_of(self, keys: Iterable[bytes]) -> str | None:
        """Returns the identity of the valid key, or None without a valid key or with more than MAX_KEY_HEADERS keys."""
        self._reload_if_changed()
        candidates = list(islice(keys, MAX_KEY_HEADERS + 1))
        if len(candidates) > MAX_KEY_HEADERS:
            return None
        # The time of this lookup depends on digests with a secret salt, so it reveals nothing about a key.
        return next((owner for owner in map(self._digest, candidates) if owner in self._owners), None)

    def reload(self) -> None:
        """Reads the file again. If it cannot be read or has no key, an error is logged and the previous keys stay."""
        self._version = self._failed_version = None
        self._next_check_s = -inf
        self._reload_if_changed()

    def _reload_if_changed(self) -> None:
        """Reads the file again if it has changed. Checks it once in CHECK_EVERY_S, and so repeats a failed read."""
        if self._file is None or (now_s := self._clock_s()) < self._next_check_s:
            return
        self._next_check_s = now_s + CHECK_EVERY_S
        version = _MISSING
        try:
            version = _version(self._file)
            if version == self._version:
                return
            self._owners = self._configured | self._read(self._file)
        except (OSError, ValueError) as error:
            if version != self._failed_version:
                logger.error("%s: %s; the previous keys stay valid", self._flag, _file_error(error, self._file))
            self._failed_version = version
        else:
            logger.info("%s: read again; valid keys: %d", self._flag, len(self._owners))
            self._version = version
            self._failed_version = None

    def _read(self, file: Path) -> dict[str, _Owner]:
        if file.stat().st_mode & stat.S_IWOTH:
            raise ValueError("may be written by every user of the machine; run chmod o-w on it")
        return self._owners_of(read_key_file(file))

    def _owners_of(self, keys: Iterable[str]) -> dict[str, _Owner]:
        """Returns the owners of keys by identity, the digest of the key."""
        owners: dict[str, _Owner] = {}
        for key in map(str.encode, keys):
            namespace = identity = self._digest(key)
            if self._namespace_salt is not None:
                digest = blake2b(key, digest_size=16, key=self._namespace_salt, person=_NAMESPACE)
                namespace = digest.hexdigest()
            owners[identity] = _Owner(sha256(key).hexdigest()[:8], namespace)
        return owners

    def _digest(self, key: bytes) -> str:
        return blake2b(key, digest_size=16, key=self._salt).hexdigest()


def _version(file: Path) -> _Version:
    status = file.stat()
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino  # chmod changes st_ctime_ns only


def _file_error(error: OSError | ValueError, file: Path) -> str:
    if isinstance(error, OSError):
        return f"{file} cannot be read: {error.strerror}"
    return f"{file} is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else f"{file} {error}"
