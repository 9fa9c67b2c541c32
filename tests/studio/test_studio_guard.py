"""Tests of the studio's checks of HTTP requests: requests that a hostile web page or a broken client could send."""

import json
import socket
import subprocess
import sys

import pytest
from conftest_studio import Studio, running

from regard.studio.limits import Limits
from regard.studio.request_guard import hosts, is_loopback
from time_limits import HANG_SECONDS

EXAMPLE = {"query": [[10.0, 5.0, 10.0]], "key": [[5.0, 0.0, 1.0], [0.0, 1.0, 1.0], [1.0, 1.0, 0.0]]}


@pytest.fixture(scope="module")
def small():
    with running(limits=Limits(body=600, trace=2000, traces=2)) as found:
        yield found


def refused(answer, status: int, part: str) -> None:
    assert answer.status == status, answer.body
    assert list(answer.json) == ["error"]
    assert part in answer.json["error"]
    assert "Traceback" not in answer.json["error"]
    assert answer.headers["content-type"] == "application/json"
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_every_answer_has_the_policy(studio: Studio):
    for path in ("/", "/static/main.js", "/page/viewer.js", "/api/status", "/nothing"):
        headers = studio.get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "server" not in headers
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost.evil:{port}", ""]
)
def test_a_rebound_name_is_refused(studio: Studio, host):
    refused(studio.get("/api/status", Host=host.format(port=studio.port)), 421, "the Host must be one of 127.0.0.1:")


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "localhost:{port}", "LOCALHOST:{port}", "[::1]:{port}"])
def test_names_of_this_machine_are_served(studio: Studio, host):
    assert studio.get("/api/status", Host=host.format(port=studio.port)).status == 200


def test_two_hosts_are_refused(studio: Studio):
    request = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{studio.port}\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    assert raw(studio, request.encode()).split()[1] in (b"400", b"421")


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "https://127.0.0.1:{port}",
        "http://127.0.0.1:{port}.evil",
        "http://localhost:{port}",
    ],
)
def test_another_origin_is_refused(studio: Studio, origin):
    answer = studio.post("/api/playground", EXAMPLE, Origin=origin.format(port=studio.port))
    refused(answer, 403, f"the Origin must be http://127.0.0.1:{studio.port}, got")


def test_the_own_origin_is_served(studio: Studio):
    assert studio.post("/api/playground", EXAMPLE, Origin=studio.address).status == 200


def test_what_a_browser_calls_cross_site_is_refused(studio: Studio):
    refused(studio.get("/api/status", Sec_Fetch_Site="cross-site"), 403, "only pages of this studio may ask")
    refused(studio.get("/api/traces", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate"), 403, "only pages")
    # Other sites may link to the studio's front page, because it contains no data of earlier requests.
    assert studio.get("/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate").status == 200
    assert studio.get("/api/status", Sec_Fetch_Site="same-origin").status == 200


@pytest.mark.parametrize("method", ["PUT", "OPTIONS", "PATCH", "TRACE"])
def test_other_methods_are_refused(studio: Studio, method):
    refused(studio.ask(method, "/api/status"), 405, "the method must be GET, HEAD, POST or DELETE")


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py", "/static/..%2fapp.py", "/static/%2e%2e/app.py", "/static/....//app.py", "/page/../page.py",
        "/static//etc/passwd", "/static/%2fetc%2fpasswd", "/static/.hidden.js", "/static/main.js%00.css",
        "/static/main", "/static/..\\app.py", "/page/page_data.py", "/static/",
    ],
)  # fmt: skip
def test_no_path_leads_outside(studio: Studio, path):
    answer = studio.get(path)
    assert answer.status == 404
    assert list(answer.json) == ["error"]


@pytest.mark.parametrize("id", ["..", "%2e%2e", "a%2fb", "IMAGE", "image%00", "x" * 200, "trace-99", "/etc/passwd"])
def test_no_trace_id_is_a_path(studio: Studio, id):
    answer = studio.get(f"/api/traces/{id}/records")
    assert answer.status == 404
    assert list(answer.json) == ["error"]


def test_a_body_that_says_it_is_too_large(small: Studio):
    refused(small.post("/api/playground", " " * 601), 413, "the body must have at most 600 bytes, got 601")


def test_a_body_that_does_not_say(small: Studio):
    chunk = b"1f4\r\n" + b"[" * 500 + b"\r\n"
    head = f"POST /api/playground HTTP/1.1\r\nHost: 127.0.0.1:{small.port}\r\nContent-Type: application/json\r\n"
    answer = raw(small, head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 3 + b"0\r\n\r\n")
    assert answer.split()[1] == b"413"
    assert b"the body must have at most 600 bytes" in answer


def test_a_body_that_never_comes():
    with running(limits=Limits(receive_seconds=0.4)) as studio:
        head = f"POST /api/playground HTTP/1.1\r\nHost: 127.0.0.1:{studio.port}\r\nContent-Type: application/json\r\n"
        answer = raw(studio, head.encode() + b"Content-Length: 500\r\n\r\n[[")
    assert answer.split()[1] == b"408"
    assert b"the body must arrive within 0.4 seconds, got 2 bytes" in answer


@pytest.mark.parametrize("length", ["-1", "1e3", "9" * 40, "0x10"])
def test_a_length_that_is_no_number(studio: Studio, length):
    head = f"POST /api/playground HTTP/1.1\r\nHost: 127.0.0.1:{studio.port}\r\nConnection: close\r\n"
    assert raw(studio, f"{head}Content-Length: {length}\r\n\r\n".encode()).split()[1] in (b"400", b"413")


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("{", "Invalid JSON"),
        ("[" * 5000, "Invalid JSON"),
        ("", "Invalid JSON"),
        (b"\xff\xfe", "Invalid JSON"),
        ({}, "query: Field required"),
        ({**EXAMPLE, "extra": 1}, "extra: Extra inputs are not permitted"),
        ({**EXAMPLE, "query": [["a"]]}, "query.0.0: Input should be a valid number"),
        ({**EXAMPLE, "query": [[]]}, "query.0: List should have at least 1 item"),
        ({**EXAMPLE, "query": [[1.0, 2.0]]}, "key[0] must have 2 numbers like the others, got 3"),
        ({**EXAMPLE, "key": [[1.0] * 3] * 33}, "key: List should have at most 32 items"),
        ({**EXAMPLE, "query": [[1e300, 0, 0]]}, "less than or equal to 10000"),
        ({**EXAMPLE, "value": [[1.0]]}, "value must have one vector for each of the 3 keys, got 1"),
        ({**EXAMPLE, "heads": 2}, "heads must divide the size of a query, 3, got 2"),
        ({**EXAMPLE, "score": "dot product"}, "score: Input should be 'dot'"),
        ({**EXAMPLE, "temperature": 0}, "temperature: Input should be greater than or equal to 0.01"),
        ('{"query": [[NaN]], "key": [[1.0]]}', "query.0.0"),
        ('{"query": [[Infinity]], "key": [[1.0]]}', "query.0.0"),
    ],
)
def test_a_wrong_question_is_told_what_is_wrong(studio: Studio, body, part):
    refused(studio.post("/api/playground", body), 400, part)


def test_a_form_of_another_site_is_no_json(studio: Studio):
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        refused(studio.post("/api/playground", EXAMPLE, content_type=kind), 415, "application/json")
    refused(studio.ask("POST", "/api/traces", b"abc", content_type="text/plain"), 415, "application/octet-stream")


@pytest.mark.parametrize(
    ("path", "part"),
    [
        # The record has heads 0 and 1, and index 2 for the mean of both heads.
        ("map?record=0&head=3", "head must be from 0 to 2, got 3"),
        ("map?record=1", "record must be from 0 to 0, got 1"),
        ("map?record=-1", "record must be a whole number"),
        ("map?record=0x1", "record must be a whole number"),
        ("map?record=" + "9" * 30, "record must be a whole number of at most 9 digits"),
        ("map?record=%D9%A1", "record must be a whole number"),
        ("tile?row=10&rows=1&columns=1", "row must be from 0 to 9, got 10"),
        ("tile?rows=0&columns=5", "rows must be from 1"),
        ("rows?row=999999999", "row must be from 0 to 9"),
        ("map?batch=1", "batch must be from 0 to 0, got 1"),
        ("faithfulness?row=77", "row must be from 0 to 9"),
    ],
)
def test_parts_outside_a_map_are_refused(studio: Studio, path, part):
    refused(studio.get(f"/api/traces/image/{path}"), 400, part)


def test_texts_are_bounded(studio: Studio):
    refused(studio.post("/api/translate", {"text": "x" * 2001}), 400, "text: String should have at most 2000")
    refused(studio.post("/api/translate", {"text": "a", "beams": 17}), 400, "beams: Input should be less")
    refused(studio.post("/api/translate", {"text": "a", "forced": ["x"] * 257}), 400, "forced: List should have")
    refused(studio.post("/api/translate", {"text": "a", "run": 9}), 404, "run must be from 0 to 1, got 9")
    refused(studio.post("/api/translate", {"text": "a " * 41}), 400, "the toy translates from 1 to 40 words, got 41")
    refused(studio.post("/api/sentence", {"text": "a " * 33}), 400, "text must have from 1 to 32 words, got 33")


def test_websockets_are_refused(studio: Studio):
    head = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{studio.port}\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n"
    answer = raw(
        studio, head.encode() + b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    assert answer.split()[1] != b"101"


def test_a_mistake_of_the_studio_shows_no_traceback(caplog):
    class Broken:
        name = "broken"

        def translate(self, text, *, beams, forced=()):
            raise RuntimeError("secret path /home/someone")

    with running([Broken()]) as found:
        answer = found.post("/api/translate", {"text": "a"})
    refused(answer, 500, "the studio made a mistake; its log says which")
    assert b"secret" not in answer.body
    assert "secret path" in caplog.text  # the server's log contains the error message that the response omits


def test_who_is_loopback():
    assert [is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "192.168.0.7", "example.org", "")] == [False] * 5


def test_hosts_of_a_server_that_others_can_reach():
    assert hosts("192.168.0.7", 80) == {"192.168.0.7"}
    assert hosts("fd00::7", 99) == {"[fd00::7]:99"}
    with running(host="0.0.0.0") as found:
        # An IP address is accepted as Host. A DNS name is refused, because DNS rebinding could change its address.
        assert found.get("/api/status", Host=f"10.1.2.3:{found.port}").status == 200
        assert found.get("/api/status", Host=f"evil.example:{found.port}").status == 421
        assert found.get("/api/status", Host="10.1.2.3:1").status == 421


@pytest.mark.process
def test_the_server_starts_without_torch_and_stops_on_interrupt():
    code = (
        "import sys, threading, urllib.request, signal, os\n"
        "from regard.studio import server as s\n"
        "s._warm = lambda: None\n"
        "def stop(address):\n"
        "    urllib.request.urlopen(address).read()\n"  # this request waits until the server answers
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "def say(text):\n"
        "    print(text, 'torch' in sys.modules, flush=True)\n"
        "    if 'http' in text: threading.Thread(target=stop, args=(text.split()[2],)).start()\n"
        "s.serve(port=0, say=say)\n"
        "print('end', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_SECONDS)
    first, *rest = done.stdout.splitlines()
    assert first.startswith("regard studio: http://127.0.0.1:")
    assert first.endswith("(Ctrl-C stops it) False")
    assert rest == ["regard studio: stopped False", "end"]
    assert done.stderr == ""
    assert done.returncode == 0


def test_a_port_that_is_taken(studio: Studio):
    from regard.studio.server import serve

    with pytest.raises(OSError, match=rf"127.0.0.1:{studio.port} cannot be used .*--port chooses another"):
        serve(port=studio.port)


def test_paths_that_are_no_traces(tmp_path):
    from regard.studio.server import serve

    with pytest.raises(ValueError, match=r"nowhere does not exist: expected a trace file or the directory of a run"):
        serve([tmp_path / "nowhere"], port=0)
    with pytest.raises(ValueError, match=r"neither a trace nor a run: a run is a directory with a config.json"):
        serve([tmp_path], port=0)


def raw(studio: Studio, request: bytes) -> bytes:
    """Send raw bytes; return the received bytes when the server closes the connection or a JSON error is complete."""
    with socket.create_connection(("127.0.0.1", studio.port), timeout=HANG_SECONDS) as connection:
        connection.sendall(request)
        found = b""
        while part := connection.recv(65536):
            found += part
            head, _, body = found.partition(b"\r\n\r\n")
            if b"content-length" in head.lower() and body.endswith(b"}"):
                assert json.loads(body)["error"]
                break
    return found
