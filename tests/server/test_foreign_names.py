"""Files of a served folder with names that other programs gave them: each is an object with its own name, or the server says why not."""

from __future__ import annotations

import os
import re
import urllib.request

import botocore.exceptions
import pytest
import servers

BUCKET = "penstock"
PLAIN = [
    "plain.jpg", "foo%20bar.jpg", "100%.csv", "100%25.csv", "a%2Fb", "gr%C3%BCn.txt", "%41", "%zz", "%", "%25", "n" * 198, "n" * 199, "n" * 255,
    "ü" * 127 + "x", "tab\there", "new\nline", "\x7f", "trail ", " ", "%x", "x%", "back\\slash", "q?&=#+.txt", ".hidden", "..x", "...", "%SELF",
    "%self.txt", "x%self", "%2e", "%2E.txt", "x%_", "%__", "x%~y", "sub%dir/file.txt", "d" * 220 + "/file", "%43/%42/c", "l\u2028x", "\ufeffx",
]  # fmt: skip
# Keys that look like what the server writes, and what it writes for them.
ODD = {
    "": "%_", "%_": "%25_", "%self": "%25self", "%2E": "%252E", "%2E%2E": "%252E%2E", "%252E": "%25252E",
    "%25self": "%2525self", "%~": "%25~", "x%~": "x%25~", "x%25~": "x%2525~", "%self%~": "%self%25~", "%~x": "%~x",
    "%%~": "%%25~", "." * 256: "." * 198 + "%~/" + "." * 58, "." * 199 + "x" * 99: "." * 198 + "%~/." + "x" * 99,
    "y" * 198 + "." + "": "y" * 198 + ".", "y" * 396 + ".": "y" * 198 + "%~/" + "y" * 198 + "%~/%2E",
    "y" * 396 + "%self": "y" * 198 + "%~/" + "y" * 198 + "%~/%25self", "%" * 255: "%" * 255, "x" * 252 + "%~": "x" * 198 + "%~/" + "x" * 54 + "%25~",
}  # fmt: skip


@pytest.fixture
def served(tmp_path):
    status = servers.free_port()
    server = servers.Penstock(tmp_path, "", "--status", f"127.0.0.1:{status}", "--lame-duck", "0")
    server.status = status
    yield server
    server.stop()


@pytest.fixture
def data(served):
    return served.folder / "data" / BUCKET


def listed(served, **asked):
    pages = served.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, **asked)
    return [entry["Key"] for page in pages for entry in page.get("Contents", [])]


def files(data):
    return sorted(str(path.relative_to(data)) for path in data.rglob("*") if path.is_file())


def test_files_are_served_under_their_own_names(served, data):
    for name in PLAIN:
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_text(name)
    client = served.client()
    assert listed(served) == sorted(PLAIN, key=str.encode) == listed(served, PaginationConfig={"PageSize": 3})
    for name in PLAIN:
        assert client.get_object(Bucket=BUCKET, Key=name)["Body"].read().decode() == name, name
        # A put replaces the file, so that there are never two.
        client.put_object(Bucket=BUCKET, Key=name, Body=name.encode() + b" again")
        assert (data / name).read_text() == name + " again", name
        client.copy_object(Bucket=BUCKET, Key=name + "/x", CopySource={"Bucket": BUCKET, "Key": name})
        assert (data / name / "%self").read_text() == name + " again", name
    assert listed(served) == sorted([*PLAIN, *(name + "/x" for name in PLAIN)], key=str.encode)
    for name in PLAIN:
        client.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": name + "/x"}, {"Key": name}]})
    assert files(data) == listed(served) == []
    assert left_out(served) == 0


def test_keys_that_look_like_what_the_server_writes_are_others(served, data):
    client = served.client()
    for prefix in ("", "a/"):
        for key, name in ODD.items():
            if prefix + key:
                client.put_object(Bucket=BUCKET, Key=prefix + key, Body=key.encode())
                assert (data / prefix / name).read_text() == key, name
        if prefix:
            client.put_object(Bucket=BUCKET, Key="a", Body=b"own")
    keys = sorted([*(key for key in ODD if key), *(f"a/{key}" for key in ODD), "a"], key=str.encode)
    assert listed(served) == keys
    for key in keys:
        body = client.get_object(Bucket=BUCKET, Key=key)["Body"].read().decode()
        assert body == ("own" if key == "a" else key.removeprefix("a/"))
    for key in keys:
        client.delete_object(Bucket=BUCKET, Key=key)
    assert files(data) == [] and left_out(served) == 0


def left_out(served):
    text = urllib.request.urlopen(f"http://127.0.0.1:{served.status}/metrics", timeout=300).read().decode()
    return int(re.search(r"^penstock_left_out_files (\d+)$", text, re.M)[1])


def test_what_is_left_out_is_named_once_and_counted(served, data):
    (data / "kept").write_text("kept")
    reserved = "has a name that this server reserves"
    names = {
        "link": ("/link` ", "is a link"),
        "pipe": ("/pipe` ", "is neither a file nor a folder"),
        "%self": ("penstock/%self` ", reserved),
        "x%~": ("/x%~` ", reserved),
        "b%~/short": ("/b%~/short` ", reserved),
        "c/%self/x": ("/c/%self` ", reserved),
        f"{'k' * 250}/" * 5 + "end": ("/" + "k" * 250 + "` ", "has a key of more than 1,024 bytes"),
    }
    for name in names:
        path = data / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name == "link":
            path.symlink_to("kept")
        elif name == "pipe":
            os.mkfifo(path)
        else:
            path.write_text("left out")
    (data / os.fsdecode(b"latin-\xe9")).write_text("left out")
    names["latin-"] = ("latin-", "has a name that is not UTF-8")
    before = (served.folder / "log").read_text()
    assert listed(served) == ["kept"] == listed(served, Prefix="k")
    assert left_out(served) == len(names)
    said = (served.folder / "log").read_text()[len(before) :]
    for shown, why in names.values():
        lines = [line for line in said.splitlines() if why in line and shown in line]
        assert len(lines) == 1 and ("rename it" in lines[0] or "put a copy of" in lines[0]), (shown, said)
    for key in ("x%~", "bshort", "link", "pipe", "%self"):
        with pytest.raises(botocore.exceptions.ClientError, match="NoSuchKey"):
            served.client().get_object(Bucket=BUCKET, Key=key)


def test_many_that_are_left_out_fill_no_log(served, data):
    for number in range(300):
        (data / f"link-{number:03}").symlink_to("nowhere")
    before = len((served.folder / "log").read_text().splitlines())
    for _ in range(2):
        assert listed(served) == []
    assert left_out(served) == 300
    said = (served.folder / "log").read_text().splitlines()[before:]
    assert len(said) == 101 and "more files are left out" in said[-1]
