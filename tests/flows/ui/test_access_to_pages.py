"""Who may read and change: the token, the origin of a page, and the names of the server."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from alignment.flows.ui import server, token
from alignment.flows.ui.app import application
from alignment_core.artifacts import Store
from alignment_core.errors import EnvironmentFault
from tests.flows.ui.conftest import ORIGIN, TOKEN, Make


def browser(store: Store, reads_need_token: bool = False, **headers: str) -> TestClient:
    pages = application(store, TOKEN, reads_need_token=reads_need_token)
    return TestClient(pages, base_url=ORIGIN, follow_redirects=False, headers=headers)


def test_a_change_needs_the_token_and_a_page_of_this_server(store: Store, make: Make) -> None:
    model = make("sft")
    path, form = f"/artifacts/{model}/tag", {"tag": "policy/production", "reason": "better"}
    stranger = browser(store, origin=ORIGIN)
    assert stranger.post(path, data=form).status_code == 403
    signed_in = browser(store)
    answer = signed_in.get(f"/artifacts?q=a&token={TOKEN}")
    assert (answer.status_code, answer.headers["location"]) == (303, "/artifacts?q=a")
    cookie = answer.headers["set-cookie"]
    assert all(part in cookie for part in ("HttpOnly", "SameSite=lax", "Path=/"))
    for origin in ("http://127.0.0.1:8000", "http://localhost", "null", "https://127.0.0.1"):
        assert signed_in.post(path, data=form, headers={"origin": origin}).status_code == 403, origin
    assert signed_in.post(path, data=form).status_code == 403, "a request without an origin is of no page"
    assert store.tags.all() == {}
    answer = signed_in.post(path, data=form, headers={"origin": ORIGIN})
    assert (answer.status_code, answer.headers["location"]) == (303, f"/artifacts/{model}/promoted")
    assert store.tags.all() == {"policy/production": model}
    assert store.tags.history("policy/production")[0].reason == "better"


def test_programs_send_the_token_in_a_header(store: Store, make: Make) -> None:
    path, form = f"/artifacts/{make('sft')}/tag", {"tag": "policy/production", "reason": "better"}
    basic = b64encode(f"anyone:{TOKEN}".encode()).decode()
    wrong = b64encode(b"other").decode()
    for value in (f"Bearer {TOKEN}x", f"Basic {wrong}", "Basic ?", "Bearer", TOKEN):
        assert browser(store, authorization=value).post(path, data=form).status_code == 403, value
    assert browser(store, authorization=f"Bearer {TOKEN}").post(path, data=form).status_code == 303
    form["now:policy/production"] = str(store.tags.all()["policy/production"])
    assert browser(store, authorization=f"Basic {basic}").post(path, data=form).status_code == 303


def test_a_tag_that_was_moved_since_the_page_was_loaded_stays(store: Store, make: Make, signed_in: TestClient) -> None:
    first, second, third = make("a"), make("b"), make("c")
    store.tags.move("policy/production", first, None, "")
    page = signed_in.get(f"/artifacts/{third}/promoted").text
    assert f'name="now:policy/production" value="{first}"' in page
    store.tags.move("policy/production", second, first, "")
    form = {"tag": "policy/production", "reason": "late", "now:policy/production": str(first)}
    answer = signed_in.post(f"/artifacts/{third}/tag", data=form)
    assert answer.status_code == 409
    assert "policy/production" in answer.text
    assert store.tags.all() == {"policy/production": second}
    assert signed_in.post(f"/artifacts/{third}/tag", data={"tag": "no tag!", "reason": "?"}).status_code == 400


def test_the_sign_in_page_leads_back_and_nowhere_else(store: Store) -> None:
    pages = browser(store)
    assert pages.get("/sign-in").status_code == 200
    wrong = pages.post("/sign-in", data={"token": "wrong", "next": "/runs"})
    assert (wrong.status_code, "That is not the token" in wrong.text) == (403, True)
    assert "set-cookie" not in wrong.headers
    right = pages.post("/sign-in", data={"token": f" {TOKEN} ", "next": "/runs"})
    assert (right.status_code, right.headers["location"]) == (303, "/runs")
    elsewhere = (
        "https://e.example/",
        "//e.example/",
        "/\\e.example",
        "javascript:alert(1)",
        "/\t/e.example",
        "/\n//e.example",
    )
    for target in elsewhere:
        assert pages.post("/sign-in", data={"token": TOKEN, "next": target}).headers["location"] == "/", target
    assert pages.post("/sign-in", data={"token": "x" * (1 << 17)}).status_code == 400


def test_beyond_loopback_nothing_is_shown_without_the_token(store: Store, make: Make) -> None:
    model = make("sft")
    pages = browser(store, reads_need_token=True)
    for path in ("/artifacts", f"/artifacts/{model}", "/runs", "/labels", "/nights", "/compare"):
        answer = pages.get(path)
        assert answer.status_code == 403
        assert 'href="/artifacts/' not in answer.text
    assert pages.get("/static/style.css").status_code == 200
    assert pages.get(f"/artifacts?token={TOKEN}").status_code == 303
    assert pages.get("/artifacts").status_code == 200


@pytest.mark.parametrize("reads_need_token", [False, True])
def test_a_foreign_host_name_is_refused_before_anything_else(store: Store, reads_need_token: bool) -> None:
    pages = browser(store, reads_need_token, authorization=f"Bearer {TOKEN}")
    for host in ("evil.example", "evil.example:80", "", "127.0.0.1.evil.example", "[", "localhost:x"):
        assert pages.get("/artifacts", headers={"host": host}).status_code == 400, host
    for host in ("127.0.0.1:8000", "localhost", "[::1]:9"):
        assert pages.get("/artifacts", headers={"host": host}).status_code == 200, host
    address = pages.get("/artifacts", headers={"host": "192.0.2.7:80"}).status_code
    assert address == (200 if reads_need_token else 400), "no other site can have an address as its name"


def test_a_form_without_the_token_leads_back_to_its_page(store: Store) -> None:
    answer = browser(store, origin=ORIGIN, referer=f"{ORIGIN}/labels/x?y").post("/labels/x/answer")
    assert answer.status_code == 403
    assert 'name="next" value="/labels/x"' in answer.text


def test_pages_of_a_home_that_cannot_be_written_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGN_HOME", "/proc/no-home")
    assert token.token() != token.token(), "nobody knows it, so nothing is changed"


def test_the_token_is_of_this_user_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path / "home"))
    first = token.token()
    assert len(first) >= 16
    assert token.token() == first
    assert token.token_file().stat().st_mode & 0o77 == 0
    assert token.token_file().parent.stat().st_mode & 0o77 == 0


def test_a_taken_port_and_an_address_of_another_machine_are_named() -> None:
    with server.listening("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(EnvironmentFault, match=f"--port {port}: Address already in use"):
            server.listening("127.0.0.1", port)
    with pytest.raises(EnvironmentFault, match="--host 192"):
        server.listening("192.0.2.7", 0)
    loopback = {"127.0.0.1": True, "::1": True, "localhost": True, "127.1.2.3": True, "0.0.0.0": False, "a-host": False}
    assert {host: server.is_loopback(host) for host in loopback} == loopback
