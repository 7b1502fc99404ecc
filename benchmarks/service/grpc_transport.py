"""Experimental gRPC transport between ingress and engine: generic handlers, metadata token, TLS.

| method | request | answers |
|---|---|---|
| `/d1.Engine/Stream` | a `Job` | lists of events, batched if they arrive together; the stream ends with the job |

It uses the messages of `deploy/service/link/serialization.py`, so no generated code is needed.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from deploy.service.contract import EngineLostError, Job
from deploy.service.link.connection import MAX_MESSAGE_BYTES
from deploy.service.link.contact import LOOPBACK

_SERVICE, _STREAM = "d1.Engine", "Stream"
_TOKEN = "token"
_NAME = "engine"
_GRACE_S = 10.0
_LIMITS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
]
# A process that was suspended sends its pings in a burst, which must not count as an attack.
_SERVER_OPTIONS = [*_LIMITS, ("grpc.so_reuseport", 0), ("grpc.http2.max_ping_strikes", 0)]
_CHANNEL_OPTIONS = [*_LIMITS, ("grpc.ssl_target_name_override", _NAME)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Codec:
    """Serialisation of messages."""

    to_bytes: Callable[[Any], bytes]
    from_bytes: Callable[[bytes], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """Self-signed certificate of an engine, the only one that its callers trust."""

    certificate: bytes
    """PEM."""
    private_key: bytes = field(repr=False)
    """PEM."""


def make_certificate() -> Certificate:
    """Make a certificate that is valid for one day."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _NAME)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(_NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    as_pkcs8, in_clear = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return Certificate(certificate=made.public_bytes(pem), private_key=key.private_bytes(pem, as_pkcs8, in_clear))


class GrpcServer:
    """gRPC server of the engine, for one event loop."""

    def __init__(self, stream: Callable[[Any], AsyncGenerator[Any]], codec: Codec, token: str) -> None:
        """Serve jobs by `stream` to callers that present the token."""
        self._stream, self._token = stream, token.encode()
        self._server = grpc.aio.server(options=_SERVER_OPTIONS)
        method = grpc.unary_stream_rpc_method_handler(
            self._answer, request_deserializer=codec.from_bytes, response_serializer=codec.to_bytes
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_STREAM: method}),))

    async def start(self, certificate: Certificate | None) -> int:
        """Listen on loopback, without TLS if there is no certificate. Returns the port."""
        if certificate is None:
            port = self._server.add_insecure_port(f"{LOOPBACK}:0")
        else:
            pairs = [(certificate.private_key, certificate.certificate)]
            port = self._server.add_secure_port(f"{LOOPBACK}:0", grpc.ssl_server_credentials(pairs))
        await self._server.start()
        return port

    async def stop(self) -> None:
        """Refuse new calls and cancel those in flight."""
        await self._server.stop(None)

    async def _answer(self, job: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        """Stream the events of a job. gRPC cancels it if the caller disconnects or its deadline passes."""
        told = str(dict(context.invocation_metadata() or ()).get(_TOKEN, ""))
        if not hmac.compare_digest(told.encode(), self._token):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "The token is wrong.")
        async with aclosing(self._stream(job)) as stream:
            async for events in stream:
                yield events


class GrpcClient:
    """gRPC client of the ingress: one channel for all jobs, for one event loop."""

    def __init__(self, port: int, codec: Codec, token: str, trusted: bytes | None) -> None:
        """Connect to an engine on loopback that has the `trusted` certificate. None: without TLS."""
        target = f"{LOOPBACK}:{port}"
        if trusted is None:
            self._channel = grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
        else:
            credentials = grpc.ssl_channel_credentials(trusted)
            self._channel = grpc.aio.secure_channel(target, credentials, options=_CHANNEL_OPTIONS)
        self._call = self._channel.unary_stream(
            f"/{_SERVICE}/{_STREAM}", request_serializer=codec.to_bytes, response_deserializer=codec.from_bytes
        )
        self._metadata = ((_TOKEN, token),)

    async def stream(self, job: Job) -> AsyncGenerator[Any]:
        """Stream the events of a job, as `Backend.stream`."""
        call = self._call(job, timeout=job.timeout_s + _GRACE_S, metadata=self._metadata)
        try:
            while (events := await call.read()) is not grpc.aio.EOF:
                yield events
        except grpc.aio.AioRpcError as error:
            raise EngineLostError(f"{error.code().name}: {error.details()}") from error
        finally:
            # Cancelling frees the engine's slots.
            call.cancel()

    async def aclose(self) -> None:
        """Close the channel."""
        await self._channel.close()
