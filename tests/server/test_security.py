"""Who may call: the key, the Host header, pages of other origins, the size of bodies."""

import base64

import pytest

from soloist.errors import UsageError
from soloist.llm import LLM
from soloist.server.settings import ServerSettings
from tests.server.client import make_tokenizer, scripted_llm

ASK = {"messages": [{"role": "user", "content": "hi"}]}


def test_the_network_is_not_served_without_a_key():
    # Field report 139.
    assert ServerSettings().host == "127.0.0.1"
    for host in ("0.0.0.0", "::", "192.168.1.5"):
        with pytest.raises(UsageError, match="reachable from the network, and there is no key"):
            ServerSettings(host=host)
        ServerSettings(host=host, api_key="k")
        ServerSettings(host=host, is_open=True)
    with pytest.raises(UsageError, match="empty or holds characters"):
        ServerSettings(api_key="schlüssel")


@pytest.mark.parametrize("origin", ["*", "my.app", "https://", "https://my.app/", "https://My.app", "https://my.app/x"])
def test_an_origin_that_no_browser_sends_is_refused(origin: str):
    ServerSettings(cors_origins=("https://my.app", "http://10.0.0.5:3000", "vscode-webview://abc"))
    with pytest.raises(UsageError, match="is none that a browser sends"):
        ServerSettings(cors_origins=(origin,))


def test_the_key_covers_every_route_but_health(say):
    client = say("a", api_key="secret")
    paths = [(method, path) for path, methods in client.app.api.openapi()["paths"].items() for method in methods]
    assert len(paths) > 12
    for method, path in [*paths, ("get", "/"), ("get", "/app.js"), ("get", "/openapi.json"), ("get", "/nothing")]:
        response = client.get(path) if method == "get" else client.post(path, ASK)
        assert (response.status == 401) == (path not in ("/health", "/ready")), path
    assert client.get("/").headers["www-authenticate"].startswith("Basic")
    anthropic = client.post("/v1/messages", ASK).json
    assert anthropic["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer secret"},
        {"authorization": "bearer secret"},
        {"x_api_key": "secret"},
        {"authorization": "Basic " + base64.b64encode(b"me:secret").decode()},
    ],
)
def test_the_key_is_taken_in_every_usual_form(say, headers: dict):
    client = say("a", api_key="secret")
    assert client.get("/v1/models", **headers).status == 200
    wrong = {name: value.replace("secret", "secre").replace("c2VjcmV0", "c2VjcmV1") for name, value in headers.items()}
    wrong = {name: value[:-2] + "xx" if value == headers[name] else value for name, value in wrong.items()}
    assert client.get("/v1/models", **wrong).status == 401
    assert client.get("/v1/models", authorization="Basic %%%").status == 401
    assert client.get("/v1/models", authorization="Bearer sécret").status == 401


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1:8000", "[::1]:8000", "localhost", "box.lan:80"])
def test_names_of_this_machine_are_known(say, host: str):
    assert say("a", allowed_hosts=("box.lan",)).get("/v1/models", host=host).status == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example:8000", "", "127.0.0.1.nip.io"])
def test_a_name_that_points_here_is_refused(say, host: str):
    assert say("a").get("/v1/models", host=host).status == 403


@pytest.mark.parametrize(
    "origin", ["http://localhost:3000", "http://127.0.0.1:8000", "http://[::1]:1", "https://my.app"]
)
def test_pages_of_this_machine_may_call_with_any_header(say, origin: str):
    # Field report 136.
    client = say("a", cors_origins=("https://my.app",), api_key="k")
    asked = "authorization,x-stainless-os,dangerously-allow-browser"
    headers = {"origin": origin, "access-control-request-method": "POST", "access-control-request-headers": asked}
    response = client.run(client.call("OPTIONS", "/v1/chat/completions", headers=headers))
    assert response.status == 204
    assert response.headers["access-control-allow-origin"] == origin
    assert response.headers["access-control-allow-headers"] == asked
    answer = client.post("/v1/chat/completions", ASK, origin=origin, authorization="Bearer k")
    assert answer.status == 200 and answer.headers["access-control-allow-origin"] == origin


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost.evil.example", "file://"])
def test_other_pages_may_not_call(say, origin: str):
    client = say("a")
    response = client.post("/v1/chat/completions", ASK, origin=origin)
    assert response.status == 403 and "access-control-allow-origin" not in response.headers
    assert not client.service.receipts


def test_the_page_may_call_the_server_it_came_from(say):
    client = say("a", allowed_hosts=("box.lan",))
    assert client.post("/v1/chat/completions", ASK, host="box.lan:8000", origin="http://box.lan:8000").status == 200


def test_a_long_body_is_refused_before_it_is_read(say):
    client = say("a", max_body_bytes=1000)
    assert client.post("/v1/chat/completions", b"x" * 1001).status == 413
    # A body that does not say how long it is.
    response = client.post("/v1/chat/completions", b"x" * 1001, content_length="5")
    assert response.status == 413 and response.json["error"]["code"] == "body_too_large"
    assert client.post("/v1/messages", b"x" * 1001, content_length="5").json["error"]["type"] == "request_too_large"


def test_no_answer_tells_a_path_of_this_machine(serve, tiny_folder, say):
    client = serve(LLM(tiny_folder, dtype="float32", num_threads=1), model_name="tiny")
    responses = [client.get(path) for path in ("/v1/models", "/props", "/tokenizer_info", "/health", "/metrics")]
    responses += [
        client.post("/v1/chat/completions", ASK | {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        client.post("/infill", {"input_prefix": "a"}),
        client.post("/v1/completions", {"prompt": "a", "suffix": "b"}),
    ]
    for response in responses:
        assert str(tiny_folder) not in response.body.decode() and "tokenizer.json" not in response.body.decode()


def test_a_template_cannot_leave_its_sandbox(serve, tmp_path):
    tokenizer = make_tokenizer(tmp_path, "{{ messages.__class__.__mro__ }}{{ messages[0].content }}")
    response = serve(scripted_llm(tokenizer, ["a"])).post("/v1/chat/completions", ASK)
    assert response.status == 400 and "unsafe" in response.json["error"]["message"]


def test_the_page_brings_everything_itself(say):
    client = say("a")
    page = client.get("/")
    assert page.status == 200 and "default-src 'none'" in page.headers["content-security-policy"]
    for name in ("index.html", "style.css", "app.js"):
        text = client.get(f"/{name}").body.decode()
        assert "http://" not in text and "https://" not in text
