"""Files that other programs change below `penstock serve --cold FOLDER`, also if they restore the times of the files."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import pathlib
import random
import shutil
import subprocess
import threading

import boto3
import botocore.config
import botocore.exceptions
import pytest
import servers
import urllib3.exceptions
from waiting import until

PART = 5 << 20
BODY = random.Random(3).randbytes(PART + 1000)


@pytest.fixture(scope="module", params=["", "cache"])
def served(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    server = servers.Penstock(folder, "", *(["--cache", f"{folder / 'cache'}:100MB"] if request.param else []))
    yield server
    server.stop()


def put(served, key, body, in_parts=False):
    """Put an object with metadata, and return its ETag and its file. Some time after that, so that a change does not seem to be the put."""
    client = served.client()
    if in_parts:
        upload = client.create_multipart_upload(Bucket="penstock", Key=key, Metadata={"of": "this test"})["UploadId"]
        parts = [
            {
                "PartNumber": i + 1,
                **pick(client.upload_part(Bucket="penstock", Key=key, UploadId=upload, PartNumber=i + 1, Body=piece), "ETag"),
            }
            for i, piece in enumerate([body[:PART], body[PART:]])
        ]
        client.complete_multipart_upload(Bucket="penstock", Key=key, UploadId=upload, MultipartUpload={"Parts": parts})
    else:
        client.put_object(Bucket="penstock", Key=key, Body=body, Metadata={"of": "this test"}, ChecksumAlgorithm="CRC32")
    path = served.folder / "data" / "penstock" / key
    until(lambda: clock_ns(path.parent) > path.stat().st_ctime_ns + 50_000_000, "a change would be seen")
    found = client.get_object(Bucket="penstock", Key=key)
    assert found["Body"].read() == body and found["Metadata"] == {"of": "this test"}
    return found["ETag"], path


def pick(answer, name):
    return {name: answer[name]}


def clock_ns(folder):
    """Return the time of the file system."""
    probe = folder / "%probe"
    probe.touch()
    now = probe.stat().st_ctime_ns
    probe.unlink()
    return now


def touched(path, change):
    """Change a file, and restore its times."""
    before = path.stat()
    change()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_rewrite_with_the_old_time_is_noticed(served, in_parts):
    etag, path = put(served, f"rewritten-{in_parts}", BODY, in_parts)
    other = BODY[:-7] + b"changed"
    touched(path, lambda: path.write_bytes(other))
    found = served.client().get_object(Bucket="penstock", Key=path.name)
    assert found["Body"].read() == other and found["ETag"] != etag and found["Metadata"] == {}
    # And again, now that the file is not the server's.
    until(lambda: clock_ns(path.parent) > path.stat().st_ctime_ns, "the clock goes on")
    touched(path, lambda: path.write_bytes(BODY))
    again = served.client().get_object(Bucket="penstock", Key=path.name)
    assert again["Body"].read() == BODY and again["ETag"] != found["ETag"]


def test_a_rewrite_is_noticed_before_a_conditional_put(served):
    etag, path = put(served, "conditional", BODY)
    touched(path, lambda: path.write_bytes(BODY[::-1]))
    with pytest.raises(Exception, match="PreconditionFailed"):
        served.client().put_object(Bucket="penstock", Key=path.name, Body=b"lost", IfMatch=etag)
    assert path.read_bytes() == BODY[::-1]


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("how", ["mode", "link", "name", "copy"])
def test_other_changes_keep_the_etag_and_the_metadata(served, how, in_parts):
    """A copy of the folder, a backup by links, or `chmod -R` changes every file, but none of its bytes."""
    etag, path = put(served, f"same-{how}-{in_parts}", BODY, in_parts)

    def change():
        if how == "mode":
            path.chmod(0o600)
        elif how == "link":
            os.link(path, path.parent / "%link")
            (path.parent / "%link").unlink()
        elif how == "name":
            path.rename(path.parent / "%name")
            (path.parent / "%name").rename(path)
        else:
            subprocess.run(["cp", "-a", path, path.parent / "%copy"], check=True)
            shutil.move(path.parent / "%copy", path)

    changed = path.stat().st_ctime_ns
    change()
    assert path.stat().st_ctime_ns > changed
    for _ in range(2):
        found = served.client().get_object(Bucket="penstock", Key=path.name)
        assert found["Body"].read() == BODY and (found["ETag"], found["Metadata"]) == (etag, {"of": "this test"})
    listed = served.client().list_objects_v2(Bucket="penstock", Prefix=path.name)["Contents"]
    assert [entry["ETag"] for entry in listed] == [etag]


def changed(served, path, how):
    """Change what a file has beside its bytes, some time ago."""
    if how == "mode":
        path.chmod(0o640)
    elif how == "link":
        os.link(path, path.parent / f"%{path.name}")
    else:
        served.client().put_object(Bucket="penstock", Key=f"{path.name}/below", Body=b"")
        path /= "%self"
    until(lambda: clock_ns(served.folder / "data" / "penstock") > path.stat().st_ctime_ns + 50_000_000, "a change would be seen")
    return path


@pytest.mark.parametrize("how", ["mode", "link", "folder"])
def test_a_rewrite_right_after_a_comparison_is_noticed(served, how):
    """Nothing of the file was changed by the comparison, so no rewrite seems to be the server's."""
    for turn in range(5):
        etag, path = put(served, f"compared-{how}-{turn}", BODY)
        key, path = path.name, changed(served, path, how)
        before = path.stat()
        assert served.client().get_object(Bucket="penstock", Key=key)["ETag"] == etag
        assert path.stat().st_ctime_ns == before.st_ctime_ns

        def rewrite(path=path):
            with path.open("r+b") as file:
                file.write(BODY[::-1])

        touched(path, rewrite)
        found = served.client().get_object(Bucket="penstock", Key=key)
        assert found["Body"].read() == BODY[::-1] and found["ETag"] != etag, turn


def test_a_rewrite_right_after_a_change_of_mode_is_noticed(served):
    """The clock of a file system has steps: a rewrite within the one of the change before it has the same time."""
    for turn in range(5):
        etag, path = put(served, f"quick-{turn}", b"A" * 1000)
        path.chmod(0o640)
        assert served.client().head_object(Bucket="penstock", Key=path.name)["ETag"] == etag

        def rewrite(path=path):
            with path.open("r+b") as file:
                file.write(b"B" * 1000)

        touched(path, rewrite)
        found = served.client().get_object(Bucket="penstock", Key=path.name)
        assert found["Body"].read() == b"B" * 1000 and found["ETag"] != etag, turn


def read_bytes(served):
    """Return the bytes that the server has read of files and sockets."""
    return int(pathlib.Path(f"/proc/{served.process.pid}/io").read_text().split()[1])


def test_many_readers_at_once_after_a_change_agree_and_read_the_file_once(served):
    """Also copies have the metadata then."""
    for turn, how in enumerate(["mode", "link", "folder", "mode"]):
        etag, path = put(served, f"agreed-{turn}", LONG[: 20 << 20])
        key = path.name
        changed(served, path, how)
        found, clients, before = [], [served.client() for _ in range(8)], read_bytes(served)

        def one(number, key=key, found=found, clients=clients):
            if number % 2:
                clients[number].copy_object(Bucket="penstock", Key=f"{key}-{number}", CopySource={"Bucket": "penstock", "Key": key})
                key += f"-{number}"
            head = clients[number].head_object(Bucket="penstock", Key=key)
            found.append((head["ETag"], head["Metadata"], head["ContentType"]))

        threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert found == [(etag, {"of": "this test"}, "binary/octet-stream")] * 8
        # Four copies, which the kernel may make itself, and one comparison.
        assert read_bytes(served) - before < (5 * 20 << 20) + (1 << 20)
        before = read_bytes(served)
        assert served.client().head_object(Bucket="penstock", Key=key)["ETag"] == etag
        assert read_bytes(served) - before < 1 << 20


def test_copies_of_what_is_replaced_meanwhile_are_of_one_version(served):
    """Nobody but the server touches the files, so no copy fails."""
    bodies = [bytes([65 + number]) * 300_000 for number in range(4)]
    writer, reader, ends = served.client(), once(served), threading.Event()
    writer.put_object(Bucket="penstock", Key="replaced", Body=bodies[0])

    def write():
        for number in itertools.takewhile(lambda _: not ends.is_set(), itertools.count()):
            writer.put_object(Bucket="penstock", Key="replaced", Body=bodies[number % 4])

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(100):
            reader.copy_object(Bucket="penstock", Key="the copy", CopySource={"Bucket": "penstock", "Key": "replaced"})
            body = reader.get_object(Bucket="penstock", Key="the copy")["Body"].read()
            assert body in bodies
    finally:
        ends.set()
        thread.join()


def once(served):
    """Return a client that sends each request once."""
    config = botocore.config.Config(retries={"total_max_attempts": 1})
    return boto3.client(
        "s3", endpoint_url=served.endpoint, aws_access_key_id=servers.KEY, aws_secret_access_key=servers.SECRET,
        region_name="us-east-1", config=config,
    )  # fmt: skip


def test_a_key_that_becomes_a_folder_keeps_its_etag(served):
    etag, path = put(served, "both", b"body")
    served.client().put_object(Bucket="penstock", Key="both/below", Body=b"")
    assert path.is_dir()
    found = served.client().get_object(Bucket="penstock", Key="both")
    assert (found["ETag"], found["Body"].read()) == (etag, b"body") and etag == f'"{hashlib.md5(b"body").hexdigest()}"'


LONG = random.Random(4).randbytes(1 << 20) * 60


def begun(served, key):
    """Put a long object, and begin to read it. The server has read little of it yet."""
    etag, path = put(served, key, LONG)
    return path, served.client().get_object(Bucket="penstock", Key=key, IfMatch=etag)["Body"]


@pytest.mark.parametrize("moved", ["file", "folder"])
def test_what_another_program_moves_to_a_key_that_becomes_a_folder_is_not_lost(served, moved, tmp_path):
    """The server makes a folder of the file `k` for `k/x`. Meanwhile, another program may replace `k`."""
    client, folder = served.client(), pathlib.Path(served.folder) / "data" / "penstock"
    for turn in range(60):
        key = f"{moved}-{turn}"
        (folder / key).write_bytes(b"old")
        stop, newest = threading.Event(), [b"old"]

        def replace(path=folder / key, stop=stop, newest=newest):
            for number in itertools.count():
                body, new = b"new %d" % number, tmp_path / f"{number}"
                if moved == "file":
                    new.write_bytes(body)
                else:
                    new.mkdir()
                    (new / "inside").write_bytes(body)
                try:
                    if moved == "folder":
                        path.unlink()
                    new.replace(path)
                except OSError:
                    return
                newest[0] = body
                if moved == "folder" or stop.is_set():
                    return

        thread = threading.Thread(target=replace)
        thread.start()
        with contextlib.suppress(botocore.exceptions.ClientError):
            client.put_object(Bucket="penstock", Key=f"{key}/x", Body=b"below")
        stop.set()
        thread.join()
        if newest[0] != b"old":
            read = key if moved == "file" else f"{key}/inside"
            assert client.get_object(Bucket="penstock", Key=read)["Body"].read() == newest[0], turn
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
    assert not list((folder.parent / ".penstock-serve" / "temporary").iterdir())


def test_a_read_of_a_file_that_is_rewritten_meanwhile_breaks_off(served):
    path, body = begun(served, "rewritten meanwhile")

    def rewrite():
        with path.open("r+b") as file:
            file.write(LONG[::-1])

    touched(path, rewrite)
    if served.options:
        # All of it was in the cache.
        assert body.read() == LONG
    else:
        with pytest.raises(Exception, match=r"IncompleteRead|Connection"):
            body.read()
    found = served.client().get_object(Bucket="penstock", Key=path.name)
    assert found["Body"].read() == LONG[::-1]
    # What the cache has of the first content is not part of the second one.
    touched(path, lambda: path.write_bytes(LONG))
    for _ in range(2):
        assert served.client().get_object(Bucket="penstock", Key=path.name)["Body"].read() == LONG


@pytest.mark.parametrize("how", ["mode", "put", "delete", "removed", "replaced"])
def test_a_read_outlives_what_leaves_the_bytes_as_they_are(served, how):
    path, body = begun(served, f"kept meanwhile {how}")
    if how == "mode":
        path.chmod(0o600)
    elif how == "put":
        served.client().put_object(Bucket="penstock", Key=path.name, Body=b"new")
    elif how == "delete":
        served.client().delete_object(Bucket="penstock", Key=path.name)
    elif how == "removed":
        path.unlink()
    else:
        (path.parent / "%other").write_bytes(LONG[::-1])
        (path.parent / "%other").rename(path)
    try:
        assert body.read() == LONG
    except (urllib3.exceptions.HTTPError, botocore.exceptions.HTTPClientError):
        # Parts that are not cached yet are asked for by their version, which is not there any more.
        assert served.options and how != "mode"


@pytest.mark.parametrize("into", ["object", "part"])
def test_a_copy_of_a_file_that_is_rewritten_meanwhile_fails_though_its_time_is_restored(served, into):
    etag, path = put(served, f"source of {into}", LONG)
    client, stop, refused = served.client(), threading.Event(), 0
    source = {"Bucket": "penstock", "Key": path.name}
    upload = client.create_multipart_upload(Bucket="penstock", Key="copied")["UploadId"]
    before, bodies = path.stat(), [LONG[::-1], LONG]

    def rewrite():
        with path.open("r+b") as file:
            while not stop.is_set():
                file.seek(0)
                file.write(bodies[0][:100])
                file.flush()
                os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
                bodies.reverse()

    thread = threading.Thread(target=rewrite)
    thread.start()
    try:
        for _ in range(5):
            try:
                if into == "object":
                    client.copy_object(Bucket="penstock", Key="copied", CopySource=source)
                else:
                    client.upload_part_copy(Bucket="penstock", Key="copied", UploadId=upload, PartNumber=1, CopySource=source)
            except botocore.exceptions.ClientError as error:
                assert error.response["Error"]["Code"] == "ServiceUnavailable"
                refused += 1
            else:
                # The drive held up the other program that long. The copy is of one moment, and has its ETag.
                found = client.get_object(Bucket="penstock", Key="copied") if into == "object" else None
                body = found and found["Body"].read()
                assert not found or (body[100:] == LONG[100:] and body[:100] in (LONG[:100], LONG[::-1][:100]))
                assert not found or body == LONG or found["ETag"] != etag
    finally:
        stop.set()
        thread.join()
    assert refused > 0
