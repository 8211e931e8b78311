"""Paths and file URIs: every place that takes one understands both, and a URI is not a path."""

import json
import pathlib
import urllib.parse

import commands
import penstock as ps
import pytest

ODD = ["new words", "50%", "café", "a%20b", "a#b", "a?b", "a+b"]
FORMS = ["file://{}", "file:{}", "file://localhost{}", "FILE://{}"]


def uris(path: pathlib.Path) -> list[str]:
    return [form.format(urllib.parse.quote(str(path))) for form in FORMS]


@pytest.mark.parametrize("name", ODD)
def test_a_path_and_its_file_uris_are_one_dataset(tmp_path, name):
    path = tmp_path / name
    ps.create(uris(path)[0], {"n": "int64"}).append({"n": [1]})
    assert [entry.name for entry in tmp_path.iterdir()] == [name]
    for uri in [path, str(path), *uris(path)]:
        ds = ps.open(uri)
        assert (ds["n"][:].tolist(), ds.uri) == ([1], str(path)), uri


@pytest.mark.long
def test_every_verb_takes_file_uris(tmp_path):
    photos, path = tmp_path / "my photos" / "cat", tmp_path / "the set"
    photos.mkdir(parents=True)
    (tmp_path / "my rows.csv").write_text("n,name\n1,a\n")
    for uri in uris(path):
        done = commands.penstock("import", uris(tmp_path / "my rows.csv")[FORMS.index("file://{}")], uri, "--mode", "append")
        assert done.returncode == 0, done.stderr
    for verb in ("info", "head", "log", "stats", "verify", "doctor"):
        assert commands.penstock(verb, uris(path)[1]).returncode == 0, verb
    assert len(ps.open(path)) == len(FORMS) and {entry.name for entry in tmp_path.iterdir()} == {"my photos", "my rows.csv", "the set"}


def test_failed_import_removes_the_folders_of_a_file_uri(tmp_path):
    """The folders that an import created for its destination are removed if it fails."""
    (tmp_path / "rows.csv").write_text("n\n1\nx\n")
    with pytest.raises(ps.Error):
        ps.importers.import_data(tmp_path / "rows.csv", uris(tmp_path / "new folder" / "set")[0], types={"n": "int64"})
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.csv"]


def test_tables_name_files_by_uri(tmp_path):
    (tmp_path / "a b.bin").write_bytes(b"body")
    rows = [{"file": uri} for uri in [*uris(tmp_path / "a b.bin"), str(tmp_path / "a b.bin"), "a b.bin"]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ps.importers.import_data(tmp_path / "rows.jsonl", tmp_path / "ds", types={"file": ps.Bytes()}, files=["file"])
    assert ps.open(tmp_path / "ds")["file"][:] == [b"body"] * len(rows)


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("file://server/share", "the host `server`"),
        ("file:relative", "an absolute path"),
        ("file:///a?b", "%3F"),
        ("file:///a#b", "%23"),
        ("file:///a%FF", "UTF-8"),
        ("file:///a%00", "null character"),
    ],
)
def test_invalid_file_uri_is_refused_everywhere(tmp_path, uri, why):
    for call in (lambda: ps.open(uri), lambda: ps.create(uri, {"n": "int64"}), lambda: ps.importers.import_data(uri, tmp_path / "ds")):
        with pytest.raises(ps.InvalidInputError, match=why) as caught:
            call()
        assert caught.value.code == "invalid-uri"
    assert list(tmp_path.iterdir()) == []
