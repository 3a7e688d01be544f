"""S3 in trouble: errors, lost answers, cut connections and damaged bodies on the way, and a server that dies."""

from __future__ import annotations

import itertools
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from alignment_core.artifacts import open_store
from alignment_core.artifacts.downloads import PART
from alignment_core.artifacts.leases import HeldLease, Leases
from alignment_core.artifacts.s3 import S3Backend
from alignment_core.artifacts.s3_client import pause
from alignment_core.errors import Corrupt, EnvironmentFault, InfrastructureError
from tests.servers.faulty import Fault, Faulty, at_random
from tests.servers.s3 import S3Server
from tests.servers.unconditional import unconditional_server


@pytest.fixture
def proxy(s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    """Between the client and the server; the retries of the client come at once."""
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.001)
    monkeypatch.setattr("alignment_core.artifacts.s3_client.pause", lambda _: 0.001)
    monkeypatch.setattr("alignment_core.artifacts.s3_requests.pause_before", lambda _: None)
    with Faulty(s3_server.url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


@pytest.fixture
def backend(proxy: Faulty, bucket: str, tmp_path: Path) -> S3Backend:
    return S3Backend(bucket, f"{tmp_path.name}/")


def first(fault: Fault, method: str, part: str = "", times: int = 1) -> Callable[[str, str, int], Fault | None]:
    """The rule that the first so many requests with this method and this in their target meet the fault."""
    left, guard = [times], threading.Lock()

    def rule(met: str, target: str, number: int) -> Fault | None:
        with guard:
            if met == method and part in target and left[0]:
                left[0] -= 1
                return fault
        return None

    return rule


def large(folder: Path, size: int = PART + 5) -> Path:
    source = folder / "large"
    source.write_bytes(random.Random(1).randbytes(size))
    return source


FAULTS = {
    "lost": Fault(lost=True),
    "503": Fault(status=503),
    "429": Fault(status=429),
    "429 of another name": Fault(status=429, code="RateExceeded"),
    "TooManyRequests": Fault(status=400, code="TooManyRequests"),
    "409": Fault(status=409),
    "cut": Fault(cut_request=3),
}
CALLS = {
    "PutObject": ("PUT", "/one"),
    "CreateMultipartUpload": ("POST", "?uploads"),
    "UploadPart": ("PUT", "partNumber"),
    "CompleteMultipartUpload": ("POST", "uploadId"),
    "DeleteObject": ("DELETE", ""),
    "HeadObject": ("HEAD", ""),
    "GetObject": ("GET", "/one"),
    "ListObjects": ("GET", "list-type"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_single_failure_of_any_request_changes_no_outcome(
    backend: S3Backend, proxy: Faulty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, fault: str
) -> None:
    if fault == "409" and call not in ("PutObject", "CompleteMultipartUpload", "DeleteObject"):
        return  # only conditional writes are answered so
    if fault == "TooManyRequests" and call == "HeadObject":
        return  # the answer to HEAD has no place for a code
    monkeypatch.setattr("alignment_core.artifacts.downloads.PART", 1 << 16)
    source = large(tmp_path, 100_000)
    method, part = CALLS[call]
    proxy.rule = first(FAULTS[fault], method, part)
    version = backend.put("one", b"1")
    assert version is not None, "the writer knows that it has won"
    assert backend.put("one", b"2") is None
    assert backend.put("large", source) is not None
    assert {entry.path for entry in backend.list("")} == {"one", "large"}
    assert backend.stat("one") is not None
    assert backend.read("one") == b"1"
    backend.download("large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
    backend.delete("one")
    assert backend.stat("one") is None
    assert any(request.fault for request in proxy.requests)


@pytest.mark.slow
def test_a_store_opens_although_a_fifth_of_the_answers_is_500_503_or_429(
    proxy: Faulty, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request is sent at most 8 times, and 0.2 ** 8 is 3 in a million: of some 150 requests none fails for good."""
    proxy.rule = at_random(1, status=0.2)
    for number in range(12):
        monkeypatch.setenv("ALIGN_HOME", str(tmp_path / f"home-{number}"))  # so that each opening probes
        store = open_store(f"s3://{bucket}/{tmp_path.name}-{number}")
        assert open_store(store.uri).tags.all() == {}
    assert {request.status for request in proxy.requests} >= {429, 500, 503}


def test_a_throttled_request_waits_longer_each_time() -> None:
    """Half to all of 1, 2, 4, 8 and 16 seconds, and at most 20, as the AWS tools do."""
    bounds = [(0.5, 1), (1, 2), (2, 4), (4, 8), (8, 16), (10, 20), (10, 20)]
    for retry, (least, most) in enumerate(bounds):
        assert least <= pause(retry) <= most


@pytest.mark.parametrize("status", [409, 429, 500, 503])
def test_a_persistent_error_is_raised_after_a_bounded_number_of_tries(
    backend: S3Backend, proxy: Faulty, status: int
) -> None:
    proxy.rule = lambda *_: Fault(status=status)
    with pytest.raises(InfrastructureError, match="cannot write"):
        backend.put("one", b"1")
    assert len(proxy.requests) <= 16


def test_a_412_is_a_lost_condition_unless_the_object_is_the_writers_own(backend: S3Backend, proxy: Faulty) -> None:
    proxy.rule = first(Fault(status=412), "PUT")
    assert backend.put("one", b"1") is None
    assert backend.stat("one") is None
    version = backend.put("one", b"1")
    proxy.rule = first(Fault(lost=True), "PUT")
    assert backend.put("one", b"2", replaces=version), (
        "the answer to the first try was lost, and the second met its object"
    )
    assert backend.put("one", b"3", replaces=version) is None
    assert backend.read("one") == b"2"


def test_a_release_whose_answer_is_lost_leaves_the_lease_of_the_next_holder(
    backend: S3Backend, proxy: Faulty, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, taken, deletions = S3Backend(backend.bucket, backend.prefix), list[HeldLease | None](), itertools.count()
    with monkeypatch.context() as direct:
        direct.setenv("AWS_ENDPOINT_URL", s3_server.url)
        assert other.stat("leases/one") is None  # and stays connected past the proxy

    def rule(method: str, target: str, number: int) -> Fault | None:
        if method != "DELETE":
            return None
        if next(deletions) == 0:
            return Fault(lost=True)
        taken.append(Leases(other).acquire("leases/one"))  # before the second try reaches the server
        return None

    lease = Leases(backend).acquire("leases/one")
    assert lease is not None
    proxy.rule = rule
    lease.release()
    assert len(taken) == 1
    assert taken[0] is not None
    proxy.rule = lambda *_: None
    assert backend.stat("leases/one") is not None
    taken[0].release()
    assert backend.stat("leases/one") is None


def test_deletion_is_unconditional_if_the_server_does_not_support_the_condition(
    backend: S3Backend, proxy: Faulty
) -> None:
    backend.put("one", b"1")
    proxy.rule = first(Fault(status=501, code="NotImplemented"), "DELETE")
    backend.delete("one", '"another"')
    assert backend.stat("one") is None


@pytest.mark.parametrize("at", [1, PART + 3])
def test_an_interrupted_download_resumes_where_it_stopped(
    backend: S3Backend, proxy: Faulty, tmp_path: Path, at: int
) -> None:
    source = large(tmp_path, 2 * PART)
    backend.put("large", source)
    proxy.requests.clear()
    proxy.rule = first(Fault(cut_answer=at), "GET", times=1)
    assert b"".join(backend.stream("large")) == source.read_bytes()
    cut, rest = (request.down for request in proxy.requests if request.method == "GET")
    assert (cut, 0 <= cut + rest - 2 * PART < 1 << 20) == (at, True), "all but a piece of a MiB is kept"
    proxy.rule = first(Fault(cut_answer=at), "GET", times=3)
    backend.download("large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == source.read_bytes()


def test_a_short_or_corrupted_body_is_downloaded_again(proxy: Faulty, bucket: str, tmp_path: Path, home: Path) -> None:
    store, source = open_store(f"s3://{bucket}/{tmp_path.name}"), tmp_path / "model"
    source.mkdir()
    (source / "weights").write_bytes(random.Random(2).randbytes(100_000))
    reference = store.publish(source, "model")
    for fault in (Fault(short=10), Fault(short=0), Fault(flip=99_999)):
        proxy.rule = first(fault, "GET", "/blobs/")
        fetched = store.fetch(reference)
        assert (fetched / "weights").read_bytes() == (source / "weights").read_bytes()
        store.workspace.discard(fetched)
    proxy.rule = lambda method, target, number: Fault(flip=5) if "/blobs/" in target else None
    with pytest.raises(Corrupt, match="weights"):
        store.fetch(reference)
    proxy.rule = lambda method, target, number: Fault(short=9) if "list-type" in target else None
    with pytest.raises(InfrastructureError, match="cannot list"):
        list(store.backend.list(""))


@pytest.mark.parametrize(
    ("call", "status", "code", "sentence"),
    [
        ("PUT", 400, "ExpiredToken", "the credentials have expired"),
        ("GET", 403, "RequestTimeTooSkewed", "this machine's clock differs"),
        ("GET", 403, "SignatureDoesNotMatch", "the secret key does not fit"),
        ("PUT", 403, "AccessDenied", "ask for the right"),
        (
            "HEAD",
            400,
            "ExpiredToken",
            "renew them if they have expired",
        ),  # the answer to HEAD has no place for a reason
        ("HEAD", 403, "ExpiredToken", "have they not expired"),
    ],
)
def test_a_refusal_in_the_middle_of_work_is_reported_in_a_sentence(
    backend: S3Backend, proxy: Faulty, call: str, status: int, code: str, sentence: str
) -> None:
    def work() -> None:
        for number in range(4):
            backend.put(f"one-{number}", b"1")
            backend.stat(f"one-{number}")
            backend.read(f"one-{number}")

    def refuses(method: str, target: str, number: int) -> Fault | None:
        return Fault(status=status, code=code) if method == call and "one-3" in target else None

    proxy.rule = refuses
    with pytest.raises(EnvironmentFault, match=sentence):
        work()
    assert len(proxy.requests) < 14, "it is not tried again"


def test_uploads_and_downloads_continue_after_a_restart_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    server = S3Server(tmp_path / "server").start()
    request.addfinalizer(lambda: server.end(signal.SIGKILL))
    server.make_bucket("mine")
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    source = large(tmp_path, 3 * PART)
    killed = []

    def kills_in_the_middle(method: str, target: str, number: int) -> Fault | None:
        """Once for each direction, at a request for a part."""
        if method in ("PUT", "GET") and "large" in target and method not in killed:
            killed.append(method)
            server.end(signal.SIGKILL)
            server.start()
            return Fault(cut_request=5) if method == "PUT" else Fault(cut_answer=5)
        return None

    with Faulty(server.url, kills_in_the_middle) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        backend = S3Backend("mine", "store/")
        backend.put("one", b"1")
        assert backend.put("large", source)
        backend.download("large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
    assert sorted(killed) == ["GET", "PUT"]


def test_a_server_that_ignores_conditions_is_refused(
    tmp_path: Path, home: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with unconditional_server(tmp_path / "served") as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        with pytest.raises(
            EnvironmentFault, match="s3://bucket/store ignores conditional writes, so that two writers could"
        ):
            open_store("s3://bucket/store")
    assert [file for file in (tmp_path / "served").rglob("*probe*") if file.is_file()] == []


def test_a_publication_and_a_fetch_need_few_requests_for_each_file(
    proxy: Faulty, bucket: str, tmp_path: Path, home: Path
) -> None:
    """Each request is about 20 ms on a service that is far away."""
    store, source, files = open_store(f"s3://{bucket}/{tmp_path.name}"), tmp_path / "model", 20
    source.mkdir()
    for number in range(files):
        (source / f"part-{number}").write_text(str(number))

    def requests_of(work: Callable[[], object]) -> tuple[int, int]:
        """Requests for blobs and others."""
        proxy.requests.clear()
        work()
        blobs = sum("/blobs/" in request.target for request in proxy.requests)
        return blobs, len(proxy.requests) - blobs

    references = []
    assert requests_of(lambda: references.append(store.publish(source, "model"))) == (files, 6)
    assert requests_of(lambda: store.fetch(references[0])) == (files, 1)
