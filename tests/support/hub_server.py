"""The few routes of the Hugging Face hub that an upload uses, on 127.0.0.1: make a repository, take files, commit them.

The user `reader` may write into the namespace `mine` with the token `hf_good`; the repository `mine/public` is there, and public.
"""

import base64
import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@dataclass
class Hub:
    url: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"mine/public": {}})
    private: set[str] = field(default_factory=set)
    fails_at: str = ""
    """Part of the path of a request that is answered by an error of the server."""

    def answer(self, method: str, path: str, body: bytes, token: str) -> tuple:
        parts = path.partition("?")[0].strip("/").split("/")
        if self.fails_at and self.fails_at in path:
            return 500, {"error": "the disk of the hub is full"}
        if token != "Bearer hf_good":
            return 401, {"error": "Invalid credentials in Authorization header"}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        if name not in self.repositories:
            return 404, {"error": "Repository not found"}
        if "preupload" in parts:
            names = [file["path"] for file in json.loads(body)["files"]]
            return 200, {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
        if "commit" in parts:
            values = [line["value"] for line in map(json.loads, body.splitlines()) if line["key"] != "header"]
            self.repositories[name] |= {value["path"]: base64.b64decode(value["content"]) for value in values}
            return 200, {"commitUrl": f"{self.url}/{name}/commit/{'1' * 40}", "commitOid": "1" * 40}
        return 200, {"id": name, "private": name in self.private, "sha": "0" * 40, "siblings": [], "tags": []}

    def _create(self, wanted: dict) -> tuple:
        name = f"{wanted['organization']}/{wanted['name']}"
        if wanted["organization"] != "mine":
            return 403, {"error": f'You don\'t have the rights to create a model under the namespace "{wanted["organization"]}"'}
        if name in self.repositories:
            return 409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"}
        self.repositories[name] = {}
        self.private |= {name} if wanted.get("visibility") == "private" else set()
        return 200, {"url": f"{self.url}/{name}"}


@contextlib.contextmanager
def hub_server() -> Iterator[Hub]:
    """Context in which the hub answers at `Hub.url`."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, found = hub.answer(self.command, self.path, body, self.headers.get("Authorization", ""))
            text = json.dumps(found).encode()
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", "Content-Length": str(len(text))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = answer

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
