"""The connection to an S3 server: a client configured by the machine's AWS settings, and its errors in plain sentences."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import botocore.session
from botocore.config import Config
from botocore.configprovider import ConfiguredEndpointProvider
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ReadTimeoutError,
    ResponseStreamingError,
)
from botocore.utils import determine_content_length, parse_timestamp

from alignment_core.errors import EnvironmentFault, NotFound, StoreError, Unavailable, UserError

if TYPE_CHECKING:
    from botocore.client import BaseClient
    from botocore.session import Session

ATTEMPTS = 8
"""Most attempts of a request; the pauses between them are random and double from one second up to twenty."""
_LONGEST_PAUSE = 20.0
_CONNECTIONS = 64
_SMALL = 1 << 20
_WITH_NAMES = ("amazonaws.com", "amazonaws.com.cn")
"""Servers with a host name for each bucket, which others rarely have."""

ENCRYPTION, ENCRYPTION_KEY = "ALIGN_S3_SSE", "ALIGN_S3_SSE_KMS_KEY_ID"
"""Environment variables: the server-side encryption of each upload, and the KMS key for it."""
_ENCRYPTIONS = ("AES256", "aws:kms", "aws:kms:dsse")
_UPLOADS = ("PutObject", "CreateMultipartUpload", "CopyObject")
"""Operations that accept the headers for encryption; parts are encrypted as their upload was begun."""

_THROTTLED = 429, "TooManyRequests"
_TRANSIENT = {"TooManyRequests", "RequestTimeout"}
"""Codes of transient errors, whatever their status."""
ABSENT = {"NoSuchKey", "404", "NotFound"}
LOST = {"PreconditionFailed", "412"}
AGAIN = {"ConditionalRequestConflict", "409", "OperationAborted"}
NO_UPLOAD = {"NoSuchUpload"}
BROKEN_OFF = (IncompleteReadError, ReadTimeoutError, ResponseStreamingError)
"""Errors of reading a response whose connection ends too early."""
_DENIED = {
    "AccessDenied": "these credentials may not do this; ask for the right to read, write, list and delete below the prefix, "
    f"and set {ENCRYPTION} if the bucket requires encryption",
    "400": "the server refuses the credentials; renew them if they have expired",  # to HEAD, which gets no reason
    "403": "access is denied; are the credentials those of this bucket, and have they not expired?",
    "InvalidAccessKeyId": "the server does not know the access key; check AWS_ACCESS_KEY_ID or the profile",
    "SignatureDoesNotMatch": "the secret key does not fit the access key; check AWS_SECRET_ACCESS_KEY or the profile",
    "ExpiredToken": "the credentials have expired; renew them",
    "ExpiredTokenException": "the credentials have expired; renew them",
    "TokenRefreshRequired": "the credentials have expired; renew them",
    "RequestTimeTooSkewed": "this machine's clock differs from the server's by too much; set it",
    "RequestExpired": "this machine's clock differs from the server's by too much; set it",
    "NoSuchBucket": "there is no such bucket; create it first",
    "PermanentRedirect": "the bucket is in another region; set AWS_REGION to it",
    "AuthorizationHeaderMalformed": "the bucket is in another region; set AWS_REGION to it",
    "QuotaExceeded": "the quota of the bucket is used up; free space (`align artifacts gc`) or raise it",
    "XMinioStorageFull": "the server's disk is full; free space (`align artifacts gc`)",
    "507": "the server's disk is full; free space (`align artifacts gc`)",
}


def new_client() -> BaseClient:
    """A client with the credentials, region and endpoint that the AWS tools would use here."""
    session = botocore.session.get_session()
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_time)
    region, settings = prepared(session)
    events = session.get_component("event_emitter")
    events.register_last("before-call.s3", _without_waiting)
    headers = encryption()
    for operation in _UPLOADS if headers else ():
        events.register(f"before-parameter-build.s3.{operation}", lambda params, **_: params.update(headers))
    config = Config(
        max_pool_connections=_CONNECTIONS,
        user_agent=f"alignment-core botocore/{botocore.__version__}",  # otherwise botocore builds it for each request
        **settings,
    )
    return session.create_client("s3", region_name=region, config=config)


def prepared(session: Session) -> tuple[str, dict[str, Any]]:
    """Region and settings (arguments of ``Config``) of every client of S3; throttled requests of the ``session`` are repeated.

    The session may be one of aiobotocore.
    """
    settings: dict[str, Any] = {
        "retries": {"mode": "standard", "total_max_attempts": ATTEMPTS},
        "connect_timeout": 10,
        "read_timeout": 60,
        "tcp_keepalive": True,
        "request_checksum_calculation": "when_required",  # ours are SHA-256
        "response_checksum_validation": "when_required",  # whole files are verified
    }
    if region := os.environ.get("AWS_REGION"):  # as in the AWS CLI; botocore itself reads AWS_DEFAULT_REGION alone
        session.set_config_variable("region", region)
    session.get_component("event_emitter").register("needs-retry.s3", _retry_throttled)
    profile = session.get_scoped_config()
    endpoint = ConfiguredEndpointProvider(session.full_config, profile, "s3").provide()
    has_names = not endpoint or urlsplit(endpoint).netloc.endswith(_WITH_NAMES)
    if "addressing_style" not in (profile.get("s3") or {}) and not has_names:
        settings["s3"] = {"addressing_style": "path"}
    return session.get_config_variable("region") or "us-east-1", settings


def encryption() -> dict[str, str]:
    """The parameters of an upload that encrypt it as ``$ALIGN_S3_SSE`` and ``$ALIGN_S3_SSE_KMS_KEY_ID`` say; none if these are
    not set, and the bucket decides. Raises UserError for other values than S3 knows."""
    algorithm, key = os.environ.get(ENCRYPTION, ""), os.environ.get(ENCRYPTION_KEY, "")
    if key and not algorithm:
        algorithm = "aws:kms"
    if algorithm and algorithm not in _ENCRYPTIONS:
        raise UserError(
            f"{ENCRYPTION} is {algorithm!r}: set it to {', '.join(_ENCRYPTIONS[:-1])} or {_ENCRYPTIONS[-1]}"
        )
    if key and algorithm == "AES256":
        raise UserError(f"{ENCRYPTION_KEY} names a KMS key, and {ENCRYPTION} is AES256: set {ENCRYPTION} to aws:kms")
    parameters = {"ServerSideEncryption": algorithm, "SSEKMSKeyId": key}
    return {name: value for name, value in parameters.items() if value}


def _retry_throttled(response: tuple[Any, dict[str, Any]] | None, attempts: int, **_: object) -> float | None:
    """Seconds before a throttled request is sent again: botocore's standard retries know neither status 429 nor the code
    TooManyRequests. ``attempts``: the number of attempts so far; ``response``: None if there was no answer."""
    if response is None or attempts >= ATTEMPTS:
        return None
    http, answer = response
    throttled = http.status_code in _THROTTLED or answer.get("Error", {}).get("Code") in _THROTTLED
    return pause(attempts - 1) if throttled else None


def pause(retry: int) -> float:
    """Seconds before retry number ``retry``, 0 for the first: random, and twice as long each time."""
    return random.uniform(0.5, 1.0) * min(_LONGEST_PAUSE, 2.0**retry)


def _without_waiting(params: dict[str, Any], **_: object) -> None:
    """Send small bodies at once: ``Expect: 100-continue`` costs another round trip."""
    if (determine_content_length(params["body"]) or 0) < _SMALL:
        params["headers"].pop("Expect", None)


def _time(text: str) -> datetime:
    """Parse the two usual formats by fast functions: a listing has a thousand times."""
    for form in (datetime.fromisoformat, parsedate_to_datetime):
        with suppress(AttributeError, TypeError, ValueError):
            return form(text)
    return parse_timestamp(text)


def code_of(error: Exception) -> str:
    """The server's name for an error; empty when it did not answer."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def status_of(error: ClientError) -> int:
    """The HTTP status of an error."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _reason(error: ClientError) -> str:
    """The server's code and message and, if given, the bucket's region; a HEAD request gets the HTTP status alone."""
    answer = error.response.get("Error", {})
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    code, message = code_of(error), answer.get("Message", "")
    region = answer.get("Region") or headers.get("x-amz-bucket-region", "")
    words = f"HTTP {code}" if code.isdigit() else code
    return ", ".join(part for part in (words, message, region and f"region {region}") if part)


@contextmanager
def translate_errors(action: str, uri: str, path: str) -> Iterator[None]:
    """Raise botocore's errors as NotFound, EnvironmentFault, Unavailable or StoreError."""
    sentence = f"cannot {action} {uri}/{path}".rstrip("/")
    try:
        yield
    except ClientError as error:
        code, status = code_of(error), status_of(error)
        reason = _reason(error)
        if code in _DENIED or status in (401, 403):
            cure = f"{_DENIED[code]} " if code in _DENIED else ""
            raise EnvironmentFault(f"{sentence}: {cure}({reason})") from error
        if code in ABSENT:
            raise NotFound(f"{uri} has no {path}") from error
        if status >= 500 or status == 429 or code in LOST | AGAIN | NO_UPLOAD | _TRANSIENT:
            raise Unavailable(f"{sentence}: {reason}") from error
        raise StoreError(f"{sentence}: {reason}") from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise EnvironmentFault(
            f"{sentence}: there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or give "
            "this machine a role"
        ) from error
    except (ConnectionError, HTTPClientError, *BROKEN_OFF) as error:
        raise Unavailable(f"{sentence}: the server does not answer ({error})") from error
    except BotoCoreError as error:
        raise EnvironmentFault(f"{sentence}: {error}") from error
