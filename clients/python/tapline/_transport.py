"""How requests reach the daemon and what becomes of its answers. Nothing here knows an operation.

A change that got no answer is sent once more with the same Idempotency-Key: the daemon does it once.
"""

import http.client
import json
import socket
import ssl
import time
import urllib.parse
import uuid

#: Where the daemon of this host listens.
SOCKET = "/run/tapline/taplined.sock"

#: Stands for what is not given: None is a value.
UNSET = type("Unset", (), {"__repr__": lambda self: "UNSET", "__bool__": lambda self: False})()

#: Seconds that the daemon lets a client wait for a task in one request.
WAIT = 25

#: States of a task that is over.
OVER = ("done", "failed", "cancelled")


class Problem(Exception):
    """What the daemon has refused, or what has failed: RFC 9457."""

    def __init__(self, fields):
        self.fields = fields
        self.code = fields.get("code")
        self.status = fields.get("status")
        self.title = fields.get("title")
        self.detail = fields.get("detail")
        self.advice = fields.get("advice")
        self.field = fields.get("field")
        super().__init__(self.detail or self.title or self.code)


class Unreachable(Exception):
    """The daemon does not listen there, or has not answered."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path, timeout):
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Transport:
    """A daemon: at a Unix socket, or at https://HOST:PORT with a token."""

    def __init__(self, path=SOCKET, *, url=None, token=None, ca=None, timeout=60):
        if url is not None and not url.startswith("https://"):
            raise ValueError(f"{url!r}: the daemon is only reached over TLS, as https://HOST:PORT")
        self._path, self._url, self._token, self._timeout = path, url, token, timeout
        self._tls = ssl.create_default_context(cafile=ca) if url is not None else None

    def _connection(self, timeout):
        if self._url is None:
            return _UnixConnection(self._path, timeout)
        return http.client.HTTPSConnection(self._url[len("https://"):].rstrip("/"), context=self._tls, timeout=timeout)

    def _open(self, method, path, query, body, headers, timeout):
        given = {name: value for name, value in query.items() if value is not UNSET and value is not None}
        if given:
            words = {name: str(value).lower() if isinstance(value, bool) else value for name, value in given.items()}
            path += "?" + urllib.parse.urlencode(words, doseq=True)
        headers = {name: value for name, value in headers.items() if value is not None}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        text = None
        if isinstance(body, (bytes, bytearray, memoryview)):
            headers["Content-Type"] = "application/octet-stream"
            text = body
        elif body is not None:
            headers["Content-Type"] = "application/json"
            text = json.dumps(body)
        connection = self._connection(timeout)
        try:
            connection.request(method, path, body=text, headers=headers)
            return connection, connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            place = self._path if self._url is None else self._url
            raise Unreachable(f"cannot reach the daemon at {place}: {error}") from error

    def request(self, method, path, *, query=None, body=None, if_match=None):
        """Sends a request; returns the parsed answer, the text of one that is not JSON, or None."""
        changes = method != "GET"
        key = str(uuid.uuid4()) if changes and path != "/v1/tokens" else None
        headers = {"Idempotency-Key": key, "If-Match": if_match, "Accept": "application/json"}
        for attempt in (1, 2):
            try:
                connection, response = self._open(method, path, query or {}, body, headers, self._timeout)
                try:
                    return _answer(response.status, response.headers, response.read())
                except (OSError, http.client.HTTPException) as error:
                    raise Unreachable(f"the daemon's answer was cut short: {error}") from error
                finally:
                    connection.close()
            except Unreachable:
                # Without a key a change might be done twice.
                if attempt == 2 or changes and key is None:
                    raise
                time.sleep(0.2)

    def wait(self, task, timeout=None):
        """Waits until a task is over and returns its result; raises Problem if it failed or was cancelled."""
        end = None if timeout is None else time.monotonic() + timeout
        while task["state"] not in OVER:
            left = WAIT if end is None else min(WAIT, end - time.monotonic())
            if left <= 0:
                raise TimeoutError(f"the task {task['verb']} {task['uuid']} is not over after {timeout} s")
            task = self.request("GET", f"/v1/tasks/{task['uuid']}", query={"wait": max(1, int(left))})
        if task["state"] != "done":
            raise Problem(task.get("problem") or {"code": task["state"], "detail": f"{task['verb']}: {task['state']}"})
        return task.get("result")

    def pages(self, path, query):
        """All objects of a list, however many pages it takes."""
        while True:
            connection, response = self._open("GET", path, query, None, {"Accept": "application/json"}, self._timeout)
            with connection_closing(connection):
                objects = _answer(response.status, response.headers, response.read())
                link = response.headers.get("Link")
            yield from objects
            if not link:
                return
            path, query = link[link.index("<") + 1:link.index(">")], {}

    def events(self, path, query):
        """Yields changes of objects as they happen; ends when the daemon does."""
        accept = {"Accept": "text/event-stream"}
        connection, response = self._open("GET", path, query, None, accept, None)
        with connection_closing(connection):
            if response.status != 200:
                _answer(response.status, response.headers, response.read())
            kind, data = None, []
            for line in response:
                line = line.decode().rstrip("\n")
                if line.startswith("event:"):
                    kind = line[6:].strip()
                elif line.startswith("data:"):
                    data.append(line[5:].lstrip())
                elif not line and data:
                    # Events of another kind say that some were lost.
                    event = json.loads("\n".join(data)) if kind == "change" else {"change": kind}
                    kind, data = None, []
                    yield event


class connection_closing:
    def __init__(self, connection):
        self._connection = connection

    def __enter__(self):
        return self._connection

    def __exit__(self, *_):
        self._connection.close()


def _answer(status, headers, text):
    kind = headers.get_content_type()
    if status >= 400:
        fields = {"status": status, "detail": text.decode(errors="replace")}
        if kind.endswith("json"):
            fields = json.loads(text)
        raise Problem(fields)
    if not text:
        return None
    return json.loads(text) if kind.endswith("json") else text.decode()
