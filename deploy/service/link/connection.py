"""A mutually authenticated connection: messages between two processes that share a secret.

Both sides prove that they know the secret before a message is sent. Each message is signed with it, both nonces and its
place in the conversation (keyed BLAKE2b, RFC 7693): neither side reads what the other did not write, or wrote for
another connection. The secret itself is never sent. Nothing is encrypted.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import struct
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Self

from deploy.service.link.serialization import pack, unpack

SECRET_BYTES = 32
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_NONCE_BYTES = 16
_SIGNATURE_BYTES = 32
_HEAD = struct.Struct(f"!I{_SIGNATURE_BYTES}s")
_PLACE = struct.Struct("!cQ")
_CALLER, _LISTENER = b"c", b"l"


class ProtocolError(ConnectionError):
    """The other side is not who it should be, or says what cannot be read."""


class Connection:
    """One end of a connection; it has one user."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> None:
        """Not to be called: see `call` and `accept`."""
        self._reader, self._writer, self._key = reader, writer, key
        self._nonces, self._own, self._others = b"", _CALLER, _LISTENER
        self._num_sent = self._num_read = 0

    @classmethod
    async def call(cls, host: str, port: int, secret: bytes) -> Self:
        """Connect. Raises OSError, ProtocolError where the other side does not know the secret, EOFError at its end."""
        reader, writer = await asyncio.open_connection(host, port)
        wire = cls(reader, writer, secret)
        try:
            ours = secrets.token_bytes(_NONCE_BYTES)
            writer.write(ours)
            wire._nonces = ours + await reader.readexactly(_NONCE_BYTES)
            await wire._hear_proof()
            writer.write(wire._proof(wire._own))
        except BaseException:
            await wire.close()
            raise
        return wire

    @classmethod
    async def accept(cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> Self:
        """The server's end of a new connection. Raises as `call`."""
        wire = cls(reader, writer, secret)
        wire._own, wire._others = _LISTENER, _CALLER
        ours = secrets.token_bytes(_NONCE_BYTES)
        wire._nonces = await reader.readexactly(_NONCE_BYTES) + ours
        writer.write(ours + wire._proof(wire._own))
        await wire._hear_proof()
        return wire

    async def _hear_proof(self) -> None:
        if not hmac.compare_digest(await self._reader.readexactly(_SIGNATURE_BYTES), self._proof(self._others)):
            raise ProtocolError("the other side does not know the secret")

    def _proof(self, side: bytes) -> bytes:
        return blake2b(b"hello" + side + self._nonces, key=self._key, digest_size=_SIGNATURE_BYTES).digest()

    async def send(self, message: object) -> None:
        """Send one message; waits while the other side is slow. Raises OSError, and ValueError for one too large."""
        payload = pack(message)
        if len(payload) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(payload)} bytes is too large")
        signature = self._signature(self._own, self._num_sent, payload)
        self._num_sent += 1
        self._writer.write(_HEAD.pack(len(payload), signature) + payload)
        await self._writer.drain()

    async def receive(self) -> Any:
        """The next message.

        Raises:
            EOFError: the other side ended.
            OSError: the connection broke, or its bytes are not signed with the secret (ProtocolError).
        """
        num_bytes, signature = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
        if num_bytes > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {num_bytes} bytes is too large")
        payload = await self._reader.readexactly(num_bytes)
        if not hmac.compare_digest(signature, self._signature(self._others, self._num_read, payload)):
            raise ProtocolError("a message is not signed with the secret")
        self._num_read += 1
        try:
            return unpack(payload)
        except ValueError as error:
            raise ProtocolError(str(error)) from error

    def abort(self) -> None:
        """End the connection now; what was not sent yet is lost."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """`abort`, and wait until that is done."""
        self.abort()
        with suppress(OSError):
            await self._writer.wait_closed()

    def _signature(self, side: bytes, place: int, payload: bytes) -> bytes:
        hashed = blake2b(self._nonces + _PLACE.pack(side, place), key=self._key, digest_size=_SIGNATURE_BYTES)
        hashed.update(payload)
        return hashed.digest()
