"""Conditions of requests to `penstock serve`. Expected values come from RFC 9110, section 13.2.2, evaluated here for all combinations."""

from __future__ import annotations

import base64
import datetime
import email.utils
import hashlib
import http.client
import itertools
import re

import pytest
import servers

BODY = b"0123456789" * 1000
OTHER = '"00000000000000000000000000000000"'
# No header, a condition that holds, and one that does not.
STATES = (None, True, False)
SECOND = datetime.timedelta(seconds=1)


class Served:
    """A server that needs no signatures, and a connection to it."""

    def __init__(self, kind, folder, minio):
        cache = ("--cache", f"{folder / 'cache'}:50MB") if "cache" in kind else ()
        cold = "s3://" if "minio" in kind else ""
        self.node = servers.Penstock(folder, cold, "--anonymous", *cache, environment=minio and minio.environment)
        self.is_folder = not cold
        if self.is_folder:
            (folder / "data" / "penstock").mkdir()
        self.connection = http.client.HTTPConnection("127.0.0.1", self.node.port, timeout=300)

    def ask(self, method, path, headers=None, body=b""):
        """Return the status, the headers and the body of a response. A list gives a header several times."""
        self.connection.putrequest(method, f"/penstock/{path}", skip_accept_encoding=True)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            for one in value if isinstance(value, list) else [value]:
                self.connection.putheader(name, one)
        self.connection.endheaders(body)
        response = self.connection.getresponse()
        answer = response.status, response.headers, response.read()
        if response.status >= 500:
            self.connection.close()  # The server may not have read the body.
        return answer

    def put(self, key, body=BODY):
        """Put an object, of which the server then knows nothing, and return its ETag."""
        status, found, text = self.ask("PUT", key, body=body)
        assert status == 200, text
        return found["ETag"]

    def modified(self, prefix):
        """Return the second of the last change of objects. A listing is not cached."""
        text = self.ask("GET", f"?list-type=2&prefix={prefix}")[2].decode()
        found = re.findall(r"<Key>(.*?)</Key>.*?<LastModified>(.*?)</LastModified>", text)
        return {key: datetime.datetime.fromisoformat(date).replace(microsecond=0) for key, date in found}

    def stop(self):
        self.connection.close()
        self.node.stop()


@pytest.fixture(scope="module", params=["folder", "folder, cache", "minio, cache"])
def served(request, tmp_path_factory):
    minio = request.getfixturevalue("minio") if "minio" in request.param else None
    started = Served(request.param, tmp_path_factory.mktemp("served"), minio)
    yield started
    started.stop()


def date(moment):
    return email.utils.format_datetime(moment.astimezone(datetime.UTC), usegmt=True)


def forms(etag):
    """Return ways to write conditions on ETags that hold for an object and that do not: of If-Match, and of If-None-Match."""
    weak = f"W/{etag}"
    match = {True: [etag, etag.strip('"'), "*", f"{OTHER}, {etag}", f'{etag},{OTHER},"x"'], False: [OTHER, weak, f"{OTHER}, {weak}"]}
    none_match = {True: [OTHER, f"W/{OTHER}", f'{OTHER}, "x"'], False: [etag, "*", weak, f"{OTHER}, {etag}", f'{weak},{OTHER}, "x"']}
    return match, none_match


def dates(modified):
    """Return dates for which If-Modified-Since holds and does not hold. For If-Unmodified-Since it is the other way round."""
    day = 86400 * SECOND
    return {True: [modified - SECOND, modified - 365 * day], False: [modified, modified + SECOND, modified + 365 * day]}


def status_of(match, none_match, modified_since, unmodified_since):
    """Return the status of a GET or HEAD request with these conditions. Source: RFC 9110, section 13.2.2, steps 1 to 4 and 6."""
    first = match if match is not None else unmodified_since
    if first is False:
        return 412
    second = none_match if none_match is not None else modified_since
    return 304 if second is False else 200


def cases(etag, modified, prefix=""):
    """Yield headers for all combinations of conditions, in all their forms in turn, and the expected status."""
    (match, none_match), since = forms(etag), dates(modified)
    turns = {}

    def header(name, state, choices):
        turn = turns[name, state] = turns.get((name, state), -1) + 1
        return {} if state is None else {prefix + name: choices[state][turn % len(choices[state])]}

    written = {state: [date(moment) for moment in moments] for state, moments in since.items()}
    turned = {state: written[not state] for state in (True, False)}
    for a, b, c, d in itertools.product(STATES, repeat=4):
        headers = header("If-Match", a, match) | header("If-None-Match", b, none_match)
        headers |= header("If-Modified-Since", c, written) | header("If-Unmodified-Since", d, turned)
        yield headers, status_of(a, b, c, d)


def check_read(answer, expected, etag, is_head, asked):
    status, headers, body = answer
    assert status == expected, asked
    if expected == 412:
        assert is_head or b"PreconditionFailed" in body, asked
    else:
        # A client refreshes what it has with these headers. Source: RFC 9110, section 15.4.5.
        assert headers["ETag"] == etag and headers["Last-Modified"], asked
        assert body == (BODY if expected == 200 and not is_head else b""), asked


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_every_combination_of_conditions_has_the_status_of_the_rfc(served, method):
    prefix = f"table-{method}"
    etag = served.put(f"{prefix}-known")
    # Objects of which the server knows nothing when it is asked.
    count = len(STATES) ** 4
    for number in range(count):
        served.put(f"{prefix}-{number:02d}")
    moments = served.modified(prefix)
    known = moments.pop(f"{prefix}-known")
    assert len(moments) == count
    for number in range(count):
        [headers, expected] = list(cases(etag, moments[f"{prefix}-{number:02d}"]))[number]
        check_read(served.ask(method, f"{prefix}-{number:02d}", headers), expected, etag, method == "HEAD", headers)
    for headers, expected in cases(etag, known):
        check_read(served.ask(method, f"{prefix}-known", headers), expected, etag, method == "HEAD", headers)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_every_form_of_one_condition_counts(served, method):
    etag = served.put("forms")
    (match, none_match), since = forms(etag), dates(served.modified("forms")["forms"])
    for state in (True, False):
        asked = [({"If-Match": form}, 200 if state else 412) for form in match[state]]
        asked += [({"If-None-Match": form}, 200 if state else 304) for form in none_match[state]]
        asked += [({"If-Modified-Since": date(moment)}, 200 if state else 304) for moment in since[state]]
        asked += [({"If-Unmodified-Since": date(moment)}, 412 if state else 200) for moment in since[state]]
        for headers, expected in asked:
            check_read(served.ask(method, "forms", headers), expected, etag, method == "HEAD", headers)


def test_dates_that_cannot_be_read_are_ignored_and_old_forms_are_read(served):
    """Source: RFC 9110, sections 13.1.3, 13.1.4 and 5.6.7."""
    etag = served.put("dates")
    modified = served.modified("dates")["dates"]
    for text in ("yesterday", "2026-11-29T12:00:00Z", "0", "Sun, 99 Nov 2026 12:00:00 GMT", "Sun, 29 Nov 2026 12:00:00", "\xff"):
        for name in ("If-Modified-Since", "If-Unmodified-Since"):
            check_read(served.ask("GET", "dates", {name: text}), 200, etag, False, (name, text))
    for moment in (modified - SECOND, modified):
        for form in ("%A, %d-%b-%y %H:%M:%S GMT", "%a %b %e %H:%M:%S %Y"):
            text = moment.strftime(form)
            is_newer = moment < modified
            check_read(served.ask("GET", "dates", {"If-Modified-Since": text}), 200 if is_newer else 304, etag, False, text)
            check_read(served.ask("GET", "dates", {"If-Unmodified-Since": text}), 412 if is_newer else 200, etag, False, text)


def test_conditions_come_before_ranges_and_missing_objects_before_conditions(served):
    etag = served.put("ranges")
    inside, behind = {"Range": "bytes=5-14"}, {"Range": f"bytes={len(BODY)}-"}
    for _ in range(2):  # The first time, the server does not know the object.
        served.put("ranges")
        for range_ in (inside, behind):
            assert served.ask("GET", "ranges", {**range_, "If-Match": OTHER})[0] == 412
            assert served.ask("GET", "ranges", {**range_, "If-None-Match": etag})[0] == 304
        status, headers, body = served.ask("GET", "ranges", {**inside, "If-Match": etag})
        assert (status, body, headers["Content-Range"]) == (206, BODY[5:15], f"bytes 5-14/{len(BODY)}")
        assert served.ask("GET", "ranges", {**behind, "If-Match": etag})[0] == 416
        assert served.ask("HEAD", "ranges", {**inside, "If-None-Match": OTHER})[0] == 206
    for headers in ({"If-Match": "*"}, {"If-Match": OTHER}, {"If-None-Match": "*"}, {"If-None-Match": OTHER}):
        for method in ("GET", "HEAD"):
            assert served.ask(method, "ranges-missing", headers)[0] == 404


def test_a_range_with_if_range_is_the_part_of_this_version_or_the_whole_object(served):
    etag = served.put("if-range")
    modified = served.modified("if-range")["if-range"]
    for text, may_match in ((etag, True), (date(modified), True), (OTHER, False), (f"W/{etag}", False), (date(modified - SECOND), False),
                            ("yesterday", False)):  # fmt: skip
        for _ in range(2):
            status, headers, body = served.ask("GET", "if-range", {"Range": "bytes=5-14", "If-Range": text})
            assert headers["ETag"] == etag
            if status == 206:
                assert may_match and body == BODY[5:15], text
            else:
                assert status == 200 and body == BODY and headers["Content-Range"] is None, text
        # A range that cannot be satisfied is ignored as well, not answered with 416, if it is of another version.
        status, _, body = served.ask("GET", "if-range", {"Range": f"bytes={len(BODY)}-", "If-Range": text})
        assert (status, body) == (200, BODY) or (status == 416 and may_match), text


def complete(served, key, headers):
    text = served.ask("POST", f"{key}?uploads=")[2].decode()
    upload = re.search(r"<UploadId>(.*?)</UploadId>", text)[1]
    etag = served.ask("PUT", f"{key}?partNumber=1&uploadId={upload}", body=b"new")[1]["ETag"]
    part = f"<Part><PartNumber>1</PartNumber><ETag>{etag}</ETag></Part>"
    body = f"<CompleteMultipartUpload>{part}</CompleteMultipartUpload>".encode()
    answer = served.ask("POST", f"{key}?uploadId={upload}", headers, body)
    served.ask("DELETE", f"{key}?uploadId={upload}")
    return answer


WRITES = {
    "put": lambda served, key, headers: served.ask("PUT", key, headers, b"new"),
    "complete": complete,
    "delete": lambda served, key, headers: served.ask("DELETE", key, headers),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_whose_condition_fails_changes_nothing(served, write):
    """Source: RFC 9110, sections 13.1.1 and 13.1.2; for missing objects, S3's reference of PutObject."""
    key = f"write-{write}"
    etag = served.put(key)
    asked = [({"If-Match": OTHER}, 412), ({"If-Match": etag}, 200)]
    if write != "delete":
        asked = [({"If-None-Match": "*"}, 412), *asked]
    if served.is_folder:
        weak, several = {"If-Match": f"W/{etag}"}, {"If-Match": f"{OTHER}, {etag}"}
        asked = [(weak, 412), *asked, (several, 200), ({"If-Match": "*"}, 200)]
        if write != "delete":
            asked += [({"If-None-Match": etag}, 412), ({"If-None-Match": f'"x", W/{etag}'}, 412), ({"If-None-Match": OTHER}, 200)]
    elif write == "delete":
        return  # Those are refused before a store that may not check them: `test_conditions_that_some_stores_ignore_are_refused_or_checked`.
    for headers, expected in asked:
        served.put(key)
        assert served.ask("GET", key)[2] == BODY
        status, _, text = WRITES[write](served, key, headers)
        # A completed upload may fail in the body of a response that has begun.
        assert (412 if b"PreconditionFailed" in text else 200 if status == 204 else status) == expected, (headers, text)
        after = {200: b"new", 404: None}.get(200 if write != "delete" else 404) if expected == 200 else BODY
        status, _, body = served.ask("GET", key)
        assert (status, body) == (200, after) if after is not None else status == 404, headers


@pytest.mark.parametrize("write", ["put", "complete"])
def test_a_write_to_a_missing_object_meets_no_if_match(served, write):
    for number, etag in enumerate(["*", OTHER] if served.is_folder else [OTHER]):
        key = f"missing-{write}-{number}"
        status, _, text = WRITES[write](served, key, {"If-Match": etag})
        assert status == 404 or b"NoSuchKey" in text, text
        assert served.ask("HEAD", key)[0] == 404
        status, _, text = WRITES[write](served, key, {"If-None-Match": "*"})
        assert status == 200 and b"<Error>" not in text
        assert served.ask("GET", key)[2] == b"new"


def minio_reads_as_text(etag):
    """Return forms of ETags that MinIO compares as plain texts."""
    return {form for forms_ in forms(etag) for state in STATES[1:] for form in forms_[state] if form not in (etag, etag.strip('"'), OTHER)}


@pytest.mark.parametrize("into", ["object", "part"])
def test_every_combination_of_conditions_on_the_source_of_a_copy(served, into):
    """A source that does not meet them is answered with 412, where a read may be answered with 304."""
    etag = served.put("source")
    key, query = "copy", ""
    if into == "part":
        text = served.ask("POST", "copy-parts?uploads=")[2].decode()
        key, query = "copy-parts", "?partNumber=1&uploadId=" + re.search(r"<UploadId>(.*?)</UploadId>", text)[1]
    for headers, expected in cases(etag, served.modified("source")["source"], "x-amz-copy-source-"):
        if not served.is_folder and (len(headers) > 1 or not {*headers.values()}.isdisjoint(minio_reads_as_text(etag))):
            continue  # MinIO has an order of its own.
        status, _, text = served.ask("PUT", key + query, {"x-amz-copy-source": "penstock/source", **headers})
        assert status == (200 if expected == 200 else 412), (headers, text)


@pytest.mark.parametrize("name", ["If-Match", "If-None-Match", "If-Modified-Since", "If-Unmodified-Since"])
def test_a_write_with_a_condition_that_is_not_checked_is_refused(served, name):
    """Otherwise, a copy with `If-None-Match: *` would replace an object that its client wants to keep."""
    etag = served.put("target")
    served.put("origin", b"another")
    value = {"If-Match": etag, "If-None-Match": "*"}.get(name, date(datetime.datetime.now(datetime.UTC)))
    asked = [("PUT", "target", {"x-amz-copy-source": "penstock/origin"}, b"")]
    if name != "If-Match" or not served.is_folder:
        asked += [("DELETE", "target", {}, b"")]
    if "-Since" in name:
        asked += [("PUT", "target", {}, b"new")]
    for method, key, headers, body in asked:
        status, _, text = served.ask(method, key, {**headers, name: value}, body)
        assert (status, name.lower().encode() in text.lower()) == (501, True), text
        assert served.ask("GET", key)[2] == BODY


def deletes(fields):
    """Return a request that deletes an object by a list, with more fields of it."""
    body = f"<Delete><Object><Key>ignored</Key>{fields}</Object></Delete>".encode()
    return "POST", "?delete=", {"Content-MD5": base64.b64encode(hashlib.md5(body).digest()).decode()}, body


LATER = "Mon, 01 Jan 2001 00:00:00 GMT"
IGNORED = [
    ("DELETE", "ignored", {"x-amz-if-match-size": "1"}, b""),
    ("DELETE", "ignored", {"x-amz-if-match-last-modified-time": LATER}, b""),
    ("PUT", "ignored", {"x-amz-write-offset-bytes": "3"}, b"new"),
    ("PUT", "ignored", {"x-amz-copy-source-if-match": OTHER}, b"new"),
    deletes(f"<ETag>{OTHER}</ETag>"),
    deletes("<Size>1</Size>"),
    deletes(f"<LastModifiedTime>{LATER}</LastModifiedTime>"),
]


@pytest.mark.parametrize("asked", IGNORED, ids=[str(number) for number in range(len(IGNORED))])
def test_conditions_that_some_stores_ignore_are_refused_or_checked(served, asked):
    """MinIO deletes and replaces objects whatever these say."""
    served.put("ignored")
    method, path, headers, body = asked
    status, _, text = served.ask(method, path, headers, body)
    is_checked = served.is_folder and (method == "DELETE" or "delete" in path)
    if is_checked:
        assert (status == 200 and b"<Code>PreconditionFailed</Code>" in text) if "delete" in path else status == 412, text
    else:
        assert status == 501 and b"condition" in text, text
    assert served.ask("GET", "ignored")[2] == BODY


def test_the_size_of_a_completed_upload_is_checked(served):
    served.put("sized")
    for size, expected in ((77, 400), (4, 400), (3, 200)):
        status, _, text = complete(served, "sized", {"x-amz-mp-object-size": str(size)})
        assert (400 if b"InvalidRequest" in text else status) == expected, text
        assert served.ask("GET", "sized")[2] == (b"new" if expected == 200 else BODY)


@pytest.mark.parametrize("served", ["folder", "folder, cache"], indirect=True)
def test_a_served_folder_has_one_owner(served):
    """An account checks its owner itself, or does not."""
    served.put("owned")
    for name, value in itertools.product(
        ["x-amz-expected-bucket-owner", "x-amz-source-expected-bucket-owner"], ["111111111111", "penstock"]
    ):
        source = {"x-amz-copy-source": "penstock/owned"} if "source" in name else {}
        for method, key, body in (
            ("PUT", "copy-of-owned", b"" if source else b"new"),
            ("GET", "owned", b""),
            ("DELETE", "copy-of-owned", b""),
        ):
            status, _, text = served.ask(method, key, {name: value, **(source if method == "PUT" else {})}, body)
            assert status == 403 if value != "penstock" else status in (200, 204), text
