"""Test limits of every kind of name and text in bytes, with letters of 1 to 4 bytes: one at the limit is kept, and one byte more is refused."""

import json

import penstock as ps
import pytest

LETTERS = ["a", "ä", "语", "🦊"]  # 1, 2, 3 and 4 bytes in UTF-8.


def of_bytes(letter, count):
    """Return a text of so many bytes that consists of this letter, and of ASCII letters where it does not fit."""
    width = len(letter.encode())
    text = letter * (count // width) + "z" * (count % width)
    assert len(text.encode()) == count
    return text


@pytest.fixture
def ds(root):
    ds = ps.create(root, {"n": "int32", "image": ps.Image(), "boxes": ps.Boxes(of="image")})
    ds.append({"n": [1, 2]})
    return ds


def created(ds, name, letter):
    there = ps.create(f"{ds.uri}-{ord(letter)}", {name: "int32"})
    there.append({name: [7]})
    return ps.open(there.uri)[name][:].tolist() == [7]


def added(ds, name, _):
    with ds.transaction() as tx:
        tx.add_column(name, "int32", fill=3)
    return ps.open(ds.uri)[name][:].tolist() == [3, 3]


def renamed(ds, name, _):
    with ds.transaction() as tx:
        tx.rename_column("image", name)
    again = ps.open(ds.uri)
    return list(again.schema) == ["n", name, "boxes"] and again.schema["boxes"].of == name


def tagged(ds, name, _):
    ds.create_tag(name)
    return ps.open(ds.uri, tag=name).snapshot == ds.snapshot and name in ps.open(ds.uri).tags()


def branched(ds, name, _):
    branch = ds.create_branch(name)
    branch.append({"n": [3]})
    assert name in ps.open(ds.uri).branches()
    return len(ps.open(ds.uri, branch=name)) == 3


def written(ds, **texts):
    with ds.transaction(texts.pop("message", ""), **texts) as tx:
        tx.append({"n": [3]})
    return ps.open(ds.uri).log()[0]


def message(ds, text, _):
    return written(ds, message=text).message == text


def author(ds, text, _):
    return written(ds, author=text).author == text


LIMITS = {
    "a new dataset's column": (created, 255), "an added column": (added, 255), "a renamed column": (renamed, 255), "a tag": (tagged, 255),
    "a branch": (branched, 255), "a message": (message, 1024), "an author": (author, 256),
}  # fmt: skip


@pytest.mark.parametrize("letter", LETTERS)
@pytest.mark.parametrize("what", LIMITS)
def test_a_name_at_the_limit_is_kept_and_one_byte_more_is_refused(ds, what, letter):
    write, limit = LIMITS[what]
    before = (ds.snapshot, ds.tags(), ds.branches())
    with pytest.raises(ps.InvalidInputError) as caught:
        write(ds, of_bytes(letter, limit + 1), letter)
    assert (ps.open(ds.uri).snapshot, ds.tags(), ds.branches()) == before, "nothing was written"
    assert str(limit) in str(caught.value), caught.value
    assert write(ds, of_bytes(letter, limit), letter)
    assert not ps.open(ds.uri).verify()["problems"]


@pytest.mark.parametrize("letter", LETTERS)
def test_properties_are_limited_as_the_json_that_is_stored(ds, letter):
    """Letters other than ASCII are stored as escapes, of which the error counts the bytes."""
    escaped = len(json.dumps(letter)) - 2
    room = 1024 - len('{"k": ""}')
    text = letter * (room // escaped) + "z" * (room % escaped)
    assert written(ds, properties={"k": text}).properties == {"k": text}
    with pytest.raises(ps.InvalidInputError, match="properties has 1025 bytes, but at most 1024 are allowed"):
        written(ds, properties={"k": text + "z"})


@pytest.mark.parametrize("letter", LETTERS)
def test_classes_and_words_of_any_length_are_kept(root, letter):
    """Classes and words of categories have no limit of their own, so nothing happens at 255 bytes."""
    words = [of_bytes(letter, count) for count in (1 if letter == "a" else 4, 254, 255, 256, 257, 4096, 70_000)]
    ds = ps.create(root, {"label": ps.Label(words[:3]), "labels": ps.Labels(words[:2]), "word": ps.Category()})
    ds.append({"label": words[:3], "labels": [words[:2], [], None], "word": words[:3]})
    with ds.transaction() as tx:
        for column in ("label", "labels"):
            tx.add_classes(column, words)
        tx.append({"label": words, "labels": [[word, words[0]] for word in words], "word": words})
    with ds.transaction() as tx:
        tx.rename_class("label", words[0], words[0] + "-" + words[3])
    again = ps.open(root)
    assert again.schema["label"].names == (words[0] + "-" + words[3], *words[1:]) and again.schema["labels"].names == tuple(words)
    table = again.to_arrow()
    assert table["word"].to_pylist() == words[:3] + words
    assert table["labels"].to_pylist()[3:] == [[word, words[0]] for word in words] and not again.verify()["problems"]


def test_names_that_are_empty_or_hold_controls_are_refused_alike(ds):
    for name in ("", "a\nb", "\0", "\x7f", "\u0085"):
        for write in (added, renamed, tagged, branched):
            with pytest.raises(ps.InvalidInputError):
                write(ds, name, "a")
    assert list(ps.open(ds.uri).schema) == ["n", "image", "boxes"] and ds.tags() == {} and list(ds.branches()) == ["main"]
