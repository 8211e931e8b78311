"""A small S3 server that misbehaves on purpose, in ways that each test chooses.

It can ignore `If-None-Match`, check and then write without a lock, list names out of order, return damaged or truncated bytes, or refuse
requests. Objects are kept in memory. The server supports only the requests that Penstock makes: put, multipart put, get, ranged get,
head, delete and list.
"""

from __future__ import annotations

import contextlib
import http.server
import random
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from xml.sax.saxutils import escape

import servers

# How the server handles create-only puts, and the order in which it lists names.
SAFE, IGNORED, UNSAFE = "safe", "ignored", "unsafe"
ORDERED, SHUFFLED, REVERSED = "ordered", "shuffled", "reversed"
# What is wrong with a ranged reply. HALF, BROKEN and CHUNKED return half of the range. HALF sends headers that match the half, BROKEN
# then breaks the connection, and CHUNKED sends valid chunks. LONGER returns the whole range with a much larger Content-Length.
HALF, BROKEN, CHUNKED, LONGER = "half", "broken", "chunked", "longer"


class State:
    def __init__(self, creates: str, listing: str) -> None:
        self.creates, self.listing = creates, listing
        self.objects: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.overwritten: list[str] = []
        # Names of deleted objects, and the names among them whose removal left the dataset's folder empty.
        self.deleted: list[str] = []
        self.last_of_folder: list[str] = []
        # How many data-file ranges to return with a flipped bit, how many to shorten, and how many to return intact before the first flip.
        self.spoil = self.shorten = self.good_before_spoil = 0
        # The number of whole objects returned so far, and the 1-based index of the one to return with a flipped bit.
        self.whole, self.spoilt_whole = 0, 0
        self.delay_seconds = 0.0  # The delay before each ranged reply.
        self.ranged = 0  # The number of ranges requested so far.
        # What was asked for of objects: the method, the name, and the first and last byte (None: the whole object).
        self.asked: list[tuple[str, str, tuple[int, int] | None]] = []
        # More headers of each object.
        self.headers: dict[str, str] = {}
        # If set, the next ranged reply waits for it. The reply has what the object was when it was asked for.
        self.hold: threading.Event | None = None
        # If set, the next reply waits for it between its headers and its body.
        self.hold_body: threading.Event | None = None
        self.how = HALF
        # Called with the object name before a create-only put. Returns a (status, code) to reply with instead, or None. Puts that arrive
        # during the call do not trigger another call.
        self.on_create: Callable[[str], tuple[int, str] | None] | None = None
        # Multipart uploads that are neither completed nor aborted, and whether the server refuses to complete uploads.
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.refuse_complete = False
        # If a name contains this text, create-only puts and upload completions succeed but get no reply.
        self.unanswered: str | None = None
        # Create-only puts of new log records are stored, but the reply is this (status, code). Then so many reads of records are refused.
        self.refused_but_stored: tuple[int, str] | None = None
        self.refused_reads = self.reads_to_refuse = 0


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    state: State

    def log_message(self, *_: object) -> None:
        pass

    @property
    def name(self) -> str:
        return urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).lstrip("/")

    @property
    def query(self) -> dict[str, str]:
        asked = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query, keep_blank_values=True)
        return {name: values[0] for name, values in asked.items()}

    def reply(self, status: int, body: bytes = b"", head: bool = False, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        hold, self.state.hold_body = self.state.hold_body, None
        if hold:
            hold.wait(300)
        if not head:
            self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.reply(status, f"<Error><Code>{code}</Code></Error>".encode())

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        state, create = self.state, self.headers.get("If-None-Match") == "*"
        if "partNumber" in self.query:
            state.uploads[self.query["uploadId"]][int(self.query["partNumber"])] = body
            return self.reply(200, ETag=f'"{hash(body):x}"')
        if create and (ask := state.on_create):
            state.on_create = None
            answer = ask(self.name)
            state.on_create = ask
            if answer:
                return self.refuse(*answer)
        if create and state.creates == UNSAFE:
            if self.name in state.objects:
                return self.refuse(412, "PreconditionFailed")
            time.sleep(0.01)  # A deliberate race: 10 ms between the check and the write.
        if create and state.unanswered and state.unanswered in self.name:
            state.objects.setdefault(self.name, body)
            self.close_connection = True
            return None
        if create and state.refused_but_stored and "/log/" in self.name and self.name not in state.objects:
            state.objects[self.name] = body
            state.reads_to_refuse = state.refused_reads
            return self.refuse(*state.refused_but_stored)
        with state.lock:
            if create and state.creates == SAFE and self.name in state.objects:
                return self.refuse(412, "PreconditionFailed")
            if create and self.name in state.objects:
                state.overwritten.append(self.name)
            state.objects[self.name] = body
        return self.reply(200, ETag=f'"{hash(body):x}"')

    def do_GET(self, head: bool = False) -> None:
        if "list-type" in self.query:
            return self.list(self.query)
        body = self.state.objects.get(self.name)
        if body is None:
            return self.reply(404, head=True) if head else self.refuse(404, "NoSuchKey")
        common = {"Last_Modified": "Mon, 01 Jan 2024 00:00:00 GMT", "ETag": f'"{hash(body):x}"', **self.state.headers}
        wanted = self.headers.get("Range")
        if wanted is None and not head and "/log/" in self.name and self.state.reads_to_refuse > 0:
            self.state.reads_to_refuse -= 1
            return self.refuse(403, "AccessDenied")
        if wanted is None:
            self.state.asked.append((self.command, self.name, None))
            self.state.whole += not head
            spoilt = not head and self.state.whole == self.state.spoilt_whole
            return self.reply(200, body[:-1] + bytes([body[-1] ^ 1]) if spoilt else body, head, **common)
        self.state.ranged += 1
        time.sleep(self.state.delay_seconds)  # Simulates a slow store.
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        begin, end = int(first), min(int(last or len(body) - 1), len(body) - 1)
        hold, self.state.hold = self.state.hold, None
        self.state.asked.append((self.command, self.name, (begin, end)))
        if hold:
            hold.wait(300)
        common["Content_Range"] = f"bytes {begin}-{end}/{len(body)}"
        part = body[begin : end + 1]
        if "/d/" in self.name and self.state.shorten > 0 and len(part) > 10:
            self.state.shorten -= 1
            half = part[: len(part) // 2]
            if self.state.how == CHUNKED:
                return self.in_chunks(half, common)
            if self.state.how == HALF:
                return self.reply(206, half, head, **{**common, "Content_Range": f"bytes {begin}-{begin + len(half) - 1}/{len(body)}"})
            self.send_response(206)
            longer = self.state.how == LONGER
            for name, value in {**common, "Content-Length": str(2**62 if longer else len(part))}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(part if longer else half)
            self.close_connection = True
            return None
        if "/d/" in self.name and self.state.spoil > 0:
            self.state.good_before_spoil -= 1
            if self.state.good_before_spoil < 0:
                self.state.spoil -= 1
                part = bytes([part[0] ^ 1]) + part[1:]
        return self.reply(206, part, head, **common)

    def in_chunks(self, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(206)
        self.send_header("Transfer-Encoding", "chunked")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n")

    def do_HEAD(self) -> None:
        self.do_GET(head=True)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        state, query = self.state, self.query
        if "uploads" in query:
            name = f"upload-{time.monotonic_ns()}"
            state.uploads[name] = {}
            body = f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>"
            return self.reply(200, body.encode())
        if state.refuse_complete:
            return self.refuse(403, "AccessDenied")
        parts = state.uploads.pop(query["uploadId"], None)
        if parts is None:
            return self.refuse(404, "NoSuchUpload")
        state.objects[self.name] = b"".join(parts[number] for number in sorted(parts))
        if state.unanswered and state.unanswered in self.name:
            self.close_connection = True
            return None
        return self.reply(200, b'<CompleteMultipartUploadResult><ETag>"x"</ETag></CompleteMultipartUploadResult>')

    def do_DELETE(self) -> None:
        if "uploadId" in self.query:
            self.state.uploads.pop(self.query["uploadId"], None)
            return self.reply(204)
        with self.state.lock:
            self.state.objects.pop(self.name, None)
            self.state.deleted.append(self.name)
            folder = "/".join(self.name.split("/")[:2]) + "/"
            if not any(name.startswith(folder) for name in self.state.objects):
                self.state.last_of_folder.append(self.name)
        return self.reply(204)

    def list(self, query: dict[str, str]) -> None:
        bucket = f"{self.name.rstrip('/')}/"
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        with self.state.lock:
            keys = sorted(name.removeprefix(bucket) for name in self.state.objects if name.startswith(bucket + prefix))
        if delimiter:
            keys = [key for key in keys if delimiter not in key[len(prefix) :]]
        if self.state.listing == SHUFFLED:
            random.shuffle(keys)
        elif self.state.listing == REVERSED:
            keys.reverse()
        begin, most = int(query.get("continuation-token", 0)), int(query.get("max-keys", 1000))
        page, more = keys[begin : begin + most], begin + most < len(keys)
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.state.objects.get(bucket + key, b''))}</Size>"
            "<LastModified>2024-01-01T00:00:00.000Z</LastModified><ETag>x</ETag></Contents>"
            for key in page
        )
        token = f"<NextContinuationToken>{begin + most}</NextContinuationToken>" if more else ""
        body = f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{entries}</ListBucketResult>"
        self.reply(200, body.encode())


@contextlib.contextmanager
def serving(creates: str = SAFE, listing: str = ORDERED) -> Iterator[tuple[State, dict[str, str]]]:
    """Run the server, and yield its state and the storage options to reach it."""
    state = State(creates, listing)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", servers.free_port()), type("Bound", (Handler,), {"state": state}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield (
            state,
            {"endpoint_url": f"http://127.0.0.1:{server.server_port}", "access_key_id": "x", "secret_access_key": "y", "region": "r"},
        )
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
