"""An independent reader of Penstock datasets, based only on spec/format-v1.md. It is strict and simple, not fast."""

import itertools
import json
import math
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
from google_crc32c import value as crc32c

UNIT, PROVISIONAL, TILED_FEATURE, OVERLAYS_FEATURE, MERGES_FEATURE, FIXED, PACKED, SINGLE, TILED = 65_536, 1 << 63, 1, 2, 32, 0, 1, 2, 3
WIDENED_FEATURE, CLASSES_FEATURE, INLINE_FEATURE, INLINE_BYTES, DATA_OFFSET = (
    128,
    256,
    16,
    2048,
    75,
)  # data files in records: the feature, the limit, and where they begin
STATISTICS_FEATURE, ATTACHMENTS_FEATURE = 512, 1024
GONE = 1 << 48  # the only column of an overlay of gone samples
CREATE, DATA, LAYOUT, SCHEMA, MERGE, FENCE, RESET, BRANCH, CLOSE = range(9)  # kinds of records
DTYPES = ["bytes", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16"]
DTYPES += ["float32", "float64", "complex64", "complex128", "timestamp", "duration", "time"]
NUMPY = {"bytes": "u1", "bfloat16": "u2", "timestamp": "M8[us]", "duration": "m8[us]", "time": "m8[us]"}  # dtypes whose NumPy names differ
CHOICES = {"zero": 1, "flag": 2, "delta_kind": 6, "file_kind": 3, "change_kind": 8, "record_kind": 9, "dtype": 19, "layout": 4, "codec": 3}
FORMS = {  # the spec's layouts, field by field: `*` marks a list, and `zero` marks a byte that must be 0 for this reader
    "object": "id:id length:varint crc:u32",
    "run": "first:u64 count:varint",
    "file": "kind:file_kind id:id length:varint tail_length:varint tail_crc:u32 columns:varint*",
    "place": "branch:varint number:varint offset:varint",
    "fragment": "samples:varint stage:flag runs:runs files:file*",
    "page": "object:object base:varint fragments:varint samples:varint least:u64 span:varint statistics:optional",
    "overlay": "columns:varint* rows:row_set files:file* id:overlay_id",
    "row_ids_word": "object:object base:varint ids:varint least:u64 span:varint",
    "segment": "column:varint first_code:varint count:varint object:object",
    "parent": "branch:u64 number:u64 uuid:id crc:u32",
    "transaction": "uuid:id message:string author:string form:zero properties:string first_counter:varint assigned:varint added:varint"
    " deleted:varint",
    "change": "kind:change_kind columns:varint* rows:row_set",
    "attachment": "kind:string object:object columns:varint* covers:row_set changed:row_set* parameters:string",
    "detached": "detached:id",
    "forwarding": "before:id id:id length:varint tail_length:varint tail_crc:u32",
    "record": "kind:record_kind dataset:id branch:u64 number:u64 read:u64 write:u64 unused:u64 time:i64 data:data"
    " gc_epoch:varint"
    " landmark:varint parents:parent* transactions:transaction* lineage:varint next_counter:varint physical:varint live:varint schema:zero"
    " root:object deltas:delta* changes:change* change_set:zero",
    "root": "dataset:id branch:u64 number:u64 schema:string pages:page* segments:segment* overlays:overlay* stages:object* attachments:attachment*",
    "words": "column:varint words:string*",
    "staged": "file:id runs:runs",
    "names": "number:u64 time:i64 before:object* operations:operation* own:varint",
    "operation": "remove:flag kind:u8 name:string branch:u64 number:u64 uuid:id",
}


def fill_file(column):
    """Section 8: return the fields of a reference to the data file with a column's fill value."""
    fill = column["fill"]
    return {
        "id": fill["id"], "length": fill["file_bytes"], "tail_length": fill["tail_bytes"], "tail_crc": fill["tail_crc"],
        "columns": [column["id"]],
    }  # fmt: skip


def need(condition, what):
    """Raise ValueError unless the condition holds."""
    if not condition:
        raise ValueError(what)


class Cursor:
    """Reads values in sequence and raises an error instead of reading past the end."""

    def __init__(self, data, name):
        self.data, self.at, self.name = data, 0, name

    def take(self, count):
        """Return the next `count` bytes."""
        need(count <= len(self.data) - self.at, f"{self.name}: truncated")
        self.at += count
        return self.data[self.at - count : self.at]

    def read(self, form):
        """Read a value, a list of values, or a form from the table above."""
        if form[1:].isdigit():
            return int.from_bytes(self.take(int(form[1:]) // 8), "little", signed=form[0] == "i")
        if form in CHOICES:
            value = self.read("u8")
            need(value < CHOICES[form], f"{self.name}: unknown {form} {value}")
            return value
        simple = {"varint": self.varint, "id": lambda: self.take(16).hex(), "string": lambda: self.take(self.varint()).decode("utf-8")}
        if form in simple:
            return simple[form]()
        if form == "optional":
            return self.read("object") if self.read("flag") else None
        if form == "delta":
            return self.read(("fragment", "page", "segment", "overlay", "attachment", "detached")[self.read("delta_kind")])
        if form == "statistics":
            return self.statistics()
        if form == "content":
            return self.take(len(self.data) - self.at)
        if form == "runs":
            return self.runs()
        if form == "row_set":
            return self.read("row_ids_word" if self.read("flag") else "run*")
        if form == "bitmap":
            return [high << 32 | low for _ in range(self.read("u64")) for high in [self.read("u32")] for low in self.bitmap()]
        if form.endswith("*"):
            count = self.varint()
            need(count <= len(self.data) - self.at, f"{self.name}: a list of {count} items in {len(self.data) - self.at} bytes")
            return [self.read(form[:-1]) for _ in range(count)]
        if form == "data":
            return self.take(self.read("u16"))
        if form == "file":
            file = self.fields(form)
            file.inside = (lambda: None, lambda: self.take(self.varint()), lambda: self.read("place"))[file.kind]()
            need(not file.kind or file.length <= INLINE_BYTES, f"{self.name}: a data file of {file.length} bytes in another object")
            return file
        return self.fields(form)

    def fields(self, form):
        """Read a form from the table above."""
        found = SimpleNamespace()
        for name, kind in (field.split(":") for field in FORMS[form].split()):
            if kind != "overlay_id":
                value = self.read(kind)
            elif found.files:
                value = found.files[0].id
            else:  # Only an overlay with values has an id.
                value = self.read("id") if found.columns and not {0, GONE} & set(found.columns) else None
            setattr(found, name, value)
        return found

    def varint(self):
        """Read an unsigned LEB128 integer of at most 10 bytes and 64 bits."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self.read("u8")
            value |= (byte & 127) << shift
            if byte < 128 and value < 1 << 64:
                return value
        raise ValueError(f"{self.name}: a varint does not fit in 64 bits")

    def runs(self):
        """Section 5: read runs of row ids, each of which begins relative to the end of the one before."""
        runs = []
        for _ in range(self.varint()):
            if runs:
                value = self.varint()
                gap = value >> 1 ^ -(value & 1)
                need(gap, f"{self.name}: runs that touch")
                first = runs[-1].first + runs[-1].count + gap
            else:
                first = self.read("u64")
            runs.append(SimpleNamespace(first=first, count=self.varint()))
            need(runs[-1].count and first >= 0, f"{self.name}: an empty run, or one before row id 0")
        return runs

    def bounds(self, kind):
        """Section 6: return whether there is a NaN, and None or the minimum and the maximum. A maximum that is not known is None."""
        flags = self.read("u8")
        need(flags < 16 and (flags & 2 or flags < 2) and flags & 12 != 12, f"{self.name}: flags {flags} of bounds")
        if not flags & 2:
            return bool(flags & 1), None
        bound = {"i64": lambda: self.read("i64"), "u64": lambda: self.read("u64"), "f64": lambda: struct.unpack("<d", self.take(8))[0]}
        bound = bound.get(kind, lambda: self.take(self.varint()))
        low = bound()
        high = None if flags & 8 else low if flags & 4 else bound()
        need(high is None or low <= high, f"{self.name}: a minimum above the maximum")
        need(kind != "text" or max(len(low), len(high or b"")) <= 16, f"{self.name}: long bounds of text")
        return bool(flags & 1), (low, high)

    def statistics(self):
        """Section 7: return the page, its number of fragments, and (nulls, words, bounds) by column and fragment."""
        page, fragments, known = self.read("id"), self.varint(), {}
        for _ in range(self.varint()):
            column = self.varint()
            for _ in range(self.varint()):
                place, kind = self.varint(), self.read("u8")
                need(max(known, default=(0, -1)) < (column, place), f"{self.name}: not in order")
                need(place < fragments and kind < 5, f"{self.name}: fragment {place} of {fragments}, class {kind}")
                nulls, words = self.varint(), self.varint()
                known[column, place] = nulls, words, self.bounds(("", "i64", "u64", "f64", "text")[kind]) if kind else None
        return SimpleNamespace(page=page, fragments=fragments, known=known)

    def integers(self, width, count):
        """Read integers of the same width and return them as uint64."""
        need(width in (1, 2, 4, 8), f"{self.name}: unsupported integer width of {width} bytes")
        return np.frombuffer(self.take(width * count), f"<u{width}").astype(np.uint64)

    def bitmap(self):
        """Read a 32-bit Roaring bitmap in the portable format (RoaringFormatSpec) and return its numbers."""
        cookie = self.read("u32")
        need(cookie & 0xFFFF in (12_346, 12_347), f"{self.name}: a bitmap with the cookie {cookie}")
        with_runs = cookie & 0xFFFF == 12_347
        count = (cookie >> 16) + 1 if with_runs else self.read("u32")
        flags = self.take(-(-count // 8)) if with_runs else bytes(-(-count // 8))
        heads = [(self.read("u16"), self.read("u16") + 1) for _ in range(count)]
        self.take(4 * count if not with_runs or count >= 4 else 0)  # Offsets of the containers, which follow each other anyway.
        numbers = []
        for index, (high, size) in enumerate(heads):
            if flags[index // 8] >> index % 8 & 1:
                runs = [(self.read("u16"), self.read("u16")) for _ in range(self.read("u16"))]
                lows = [low for first, more in runs for low in range(first, first + more + 1)]
            elif size <= 4096:
                lows = self.integers(2, size).tolist()
            else:
                lows = np.flatnonzero(np.unpackbits(np.frombuffer(self.take(8192), "u1"), bitorder="little")).tolist()
            need(len(lows) == size, f"{self.name}: a container of {len(lows)} numbers, not {size}")
            numbers += [high << 16 | low for low in lows]
        need(numbers and numbers == sorted(set(numbers)), f"{self.name}: an empty bitmap, or one that is not in order")
        return numbers

    def int_array(self, count):
        """Read an int array and return it as a list."""
        width, base = self.read("u8"), np.uint64(self.varint())
        rest = self.integers(width, count) if width else np.arange(count, dtype=np.uint64) * np.uint64(self.varint())
        return (base + rest).tolist()


def envelope(data, magic, form, name, word=None):
    """Check the magic, version, zeros, CRC and any parent reference. Then parse the body as `form` and return the result."""
    crc, cursor = int.from_bytes(data[-4:], "little"), Cursor(data[8:-4], name)
    need(data[:8] == magic + b"\2\0\0\0" and crc == crc32c(data[:-4]), f"{name}: wrong header or checksum")
    need(word is None or (word.length, word.crc) == (len(data), crc), f"{name}: length or CRC differs from the parent's reference")
    result = cursor.read(form)
    need(cursor.at == len(cursor.data), f"{name}: {len(cursor.data) - cursor.at} trailing bytes")
    return result


def record(data, branch, number):
    """Section 3: check a commit record."""
    name = f"record {number}"
    r = envelope(data, b"PNSL", "record", name)
    need((r.branch, r.number) == (branch, number), f"{name}: claims to be record {r.number} of branch {r.branch}")
    known = TILED_FEATURE | OVERLAYS_FEATURE | INLINE_FEATURE | MERGES_FEATURE | WIDENED_FEATURE | CLASSES_FEATURE
    known |= STATISTICS_FEATURE | ATTACHMENTS_FEATURE
    need(not r.read & ~known, f"{name}: unknown features among {r.read:#x}")
    need(r.kind == (DATA if number else BRANCH if branch else CREATE) or (number and r.kind not in (CREATE, BRANCH)), f"{name}: wrong kind")
    parents = [(parent.branch, parent.number) for parent in r.parents]
    need(parents[:1] == [(branch, number - 1)] if number else not parents or parents[0][0] != branch, f"{name}: wrong parents")
    need(len(parents) == {CREATE: 0, MERGE: 2, RESET: 2}.get(r.kind, 1), f"{name}: {len(parents)} parents")
    need(r.kind != MERGE or r.read & MERGES_FEATURE, f"{name}: a merge without its feature bit")
    need(r.landmark < max(number, 1), f"{name}: landmark {r.landmark}")
    good = r.transactions and len(r.deltas) <= 64 and len(data) <= 4096
    need(good, f"{name}: {len(r.transactions)} transactions, {len(r.deltas)} deltas, {len(data)} bytes")
    for transaction in r.transactions:
        need(len(transaction.properties.encode()) <= 1024, f"{name}: properties exceed 1 KiB")
        transaction.properties = json.loads(transaction.properties)
    r.crc = int.from_bytes(data[-4:], "little")
    return r


def root(r, now):
    """Section 4: check the root of a record."""
    need(
        r.dataset == now.dataset and (r.branch != now.branch or r.number <= now.number), "the root belongs to another dataset, or is newer"
    )
    hidden = [overlay.columns for overlay in r.overlays]
    good = all(hidden.count(columns) <= 1 for columns in ([], [0], [GONE]))
    need(good, "the root has several deletions, absences or lists of gone samples")
    r.schema = schema(json.loads(r.schema))
    return r


def page(fragments, word):
    """Section 4: check the fragments of a page, and replace provisional row ids with final ones."""
    counts = len(fragments), sum(f.samples for f in fragments)
    small = len(fragments) == 1 or (len(fragments) <= 512 and word.object.length <= 65_536)
    good = counts == (word.fragments, word.samples) and small
    need(good, f"p/{word.object.id}: {counts} exceeds a limit or differs from the parent's reference")
    runs = [run for f in fragments for run in f.runs]
    need(len({run.first & PROVISIONAL for run in runs}) == 1, f"p/{word.object.id}: final and provisional row ids")
    for run in runs:
        run.first = final(run.first, word.base)
        inside = word.least <= run.first and run.first + run.count <= word.least + word.span
        need(inside, f"p/{word.object.id}: row ids outside the range of its parent")
    return fragments


def final(row_id, base):
    """Section 4: replace a provisional row id with the final one."""
    return base + (row_id & ~PROVISIONAL) if row_id & PROVISIONAL else row_id


def fragment(f):
    """Section 5: check a fragment."""
    need(f.runs, "a fragment without row ids")
    need(sum(run.count for run in f.runs) == f.samples, "a fragment whose counts of row ids and samples differ")
    distinct_columns(f)
    return f


def distinct_columns(part):
    """Check that the files of a fragment or an overlay list no column twice. Return the columns."""
    columns = {column for file in part.files for column in file.columns}
    need(len(columns) == sum(len(file.columns) for file in part.files), "a fragment or overlay that lists a column twice")
    return columns


def schema(value):
    """Section 8: check a schema, and set each column's `stored` to the dtype and shape of its chunks."""
    columns = value["columns"]
    need(len({c["id"] for c in columns}) == len({c["name"] for c in columns}) == len(columns), "schema: duplicate column")
    good = all(1 <= column["id"] < value["next_column"] or 1 << 47 <= column["id"] < 1 << 48 for column in columns)
    need(good, "schema: column id out of range")
    need(sum(column["type"] == "category" for column in columns) <= 32, "schema: more than 32 category columns")
    for column in columns:
        names, codes = column.get("names", []), column.setdefault("codes", list(range(len(column.get("names", [])))))
        good = all(code == place or 1 << 47 <= code < 1 << 48 for place, code in enumerate(codes))
        need(good and len(set(codes)) == len(set(names)) == len(codes) == len(names), f"schema: classes of {column['name']}")
        small = next(dtype for dtype in ("uint8", "uint16", "uint32") if len(names) <= np.iinfo(dtype).max + 1)
        codes = small if codes == list(range(len(codes))) else "uint64"
        forms = {
            "scalar": [column.get("dtype"), []], "tensor": [column.get("dtype"), column.get("shape")], "label": [codes, []],
            "category": ["uint32", []], "labels": ["int64", [None]], "boxes": ["float32", [None, 4]],
            "keypoints": ["float32", [None, column.get("points"), column.get("dimensions")]],
        } | {key: ["bytes", [None]] for key in ("text", "bytes", "json", "image", "mask")}  # fmt: skip
        column["stored"] = forms.get(column["type"], [None, []])
        need(column["stored"][0] in DTYPES and 0 not in column["stored"][1], f"schema: type, dtype or shape of {column['name']}")
    return value


def widened(value, earlier, wider):
    """Section 8: convert an array of an earlier dtype."""
    if earlier == "bfloat16":
        value = (value.astype("<u4") << 16).view("<f4")
    exact = np.can_cast(value.dtype, wider, "safe") and not (value.dtype.kind in "iu" and value.itemsize == 8)
    need(exact, f"dtype {earlier} does not become {wider}")
    return value.astype(wider.newbyteorder("<"))


class Chunk:
    """One column in one data file (section 6), parsed from its entry in the tail."""

    def __init__(self, c, samples):
        self.column, self.dtype, self.samples = c.varint(), DTYPES[c.read("dtype")], samples
        self.name, self.item = f"{c.name}, column {self.column}", np.dtype(NUMPY.get(self.dtype, self.dtype)).newbyteorder("<")
        self.layout, self.codec = c.read("layout"), (None, "lz4_raw", "zstd")[c.read("codec")]
        self.shape = [size - 1 if size else None for size in c.read("varint*")]
        free, rows, self.blocks = self.shape.count(None), c.varint(), c.varint()
        good = free if self.layout == PACKED or self.dtype == "bytes" else not free or self.layout >= SINGLE
        need(good and (self.dtype, self.layout) != ("bytes", TILED), f"{self.name}: shape {self.shape} in layout {self.layout}")
        need(max(self.blocks, samples * (self.layout >= SINGLE)) <= 1 << 22, f"{self.name}: too many blocks or samples")
        starts = list(range(0, self.blocks * rows, rows)) if rows else c.int_array(self.blocks)
        ordinal, self.offset, self.stored = (c.int_array(self.blocks) for _ in range(3))
        need(not any(ordinal), f"{self.name}: blocks in other files are unsupported")
        self.raw = c.int_array(self.blocks) if self.codec else self.stored
        self.first_unit = [0, *itertools.accumulate(-(-size // UNIT) for size in self.stored)]
        self.crc = c.int_array(self.first_unit[-1])
        if self.layout >= SINGLE:
            given = self.shape if self.dtype != "bytes" else []
            sizes = [c.int_array(samples) if size is None else [size] * samples for size in given]
            self.shapes = list(zip(*sizes, strict=True)) or [()] * samples
        if self.layout == TILED:
            self.tile, self.first_tile = c.read("varint*"), c.int_array(samples + 1)
            need(rows == 1 and len(self.tile) == len(self.shape) and 0 not in self.tile, f"{self.name}: wrong rows_per_block or tile")
            ends = self.first_tile[0], self.first_tile[-1]
            need(self.first_tile == sorted(self.first_tile) and ends == (0, self.blocks), f"{self.name}: first_tile")
        else:
            self.rows = [range(*pair) for pair in itertools.pairwise([*starts, samples])]
            need(starts[:1] == [0] * (samples > 0) and all(self.rows), f"{self.name}: the blocks do not cover the samples")
            count = samples if self.layout == SINGLE else -(-samples // rows) if rows else self.blocks
            need(self.blocks == count, f"{self.name}: {self.blocks} blocks, not {count}")
        packed = np.frombuffer(c.take(-(-samples // 8)), "u1") if c.read("flag") else np.packbits(np.ones(samples, bool), bitorder="little")
        bits = np.unpackbits(packed, bitorder="little").astype(bool)
        need(not bits[samples:].any(), f"{self.name}: validity bits set past the last sample")
        self.valid, self.dictionary = bits[:samples], c.read("string*") if c.read("flag") else []
        kinds = {"i": "i64", "M": "i64", "m": "i64", "u": "u64", "b": "u64", "f": "f64"}
        kind = {"bytes": "text", "bfloat16": "f64"}.get(self.dtype, kinds.get(self.item.kind))
        self.bounds = c.bounds(kind) if c.read("flag") else None
        need(not self.bounds or (kind and (not self.shape or kind == "text")), f"{self.name}: bounds of values without an order")

    def check_bounds(self, values, statistics):
        """Sections 6 and 7: compare the bounds with all values, and the statistics of the page with the tail."""
        there, nan, ends = [value for value in values if value is not None], False, None
        if self.bounds and self.dtype == "bytes":
            texts = [bytes(value) for value in there]
            ends = (Chunk._cut(min(texts), False), Chunk._cut(max(texts), True)) if there else None
        elif self.bounds:
            numbers = np.array(there).reshape(-1)
            if self.dtype == "bfloat16":
                numbers = (numbers.astype("<u4") << 16).view("<f4")
            numbers = numbers.astype(numbers.dtype if numbers.dtype.kind == "f" else "i8" if numbers.dtype.kind in "iMm" else "u8")
            nan = bool(np.isnan(numbers).any()) if numbers.dtype.kind == "f" else False
            numbers = numbers[~np.isnan(numbers)] if nan else numbers
            ends = (numbers.min().item(), numbers.max().item()) if len(numbers) else None
        need(not self.bounds or self.bounds == (nan, ends), f"{self.name}: bounds {self.bounds}, but the values have {nan, ends}")
        if statistics:
            words = sorted(word.encode() for word in self.dictionary)
            of_words = False, (Chunk._cut(words[0], False), Chunk._cut(words[-1], True)) if words else None
            nulls = sum(value is None for value in values)
            bounds = of_words if words else (False, None) if nulls == self.samples else self.bounds
            expected = nulls, len(words) + 1 if words else 0, bounds
            need(statistics == expected, f"{self.name}: the page says {statistics}, the tail {expected}")

    @staticmethod
    def _cut(text, above):
        """Section 6: return a bound of a text."""
        if len(text) <= 16 or not above:
            return text[:16]
        text = text[:16].rstrip(b"\xff")
        return text[:-1] + bytes([text[-1] + 1]) if text else None

    def block(self, data, index):
        """Verify a block's checksum units and return the decoded block."""
        stored = data[self.offset[index] : self.offset[index] + self.stored[index]]
        for unit, crc in enumerate(self.crc[self.first_unit[index] : self.first_unit[index + 1]]):
            need(crc32c(stored[unit * UNIT :][:UNIT]) == crc, f"{self.name}, block {index}: wrong checksum for unit {unit}")
        if self.codec is None or (not stored and not self.raw[index]):
            return stored
        try:
            raw = pa.Codec(self.codec).decompress(stored, self.raw[index], asbytes=True)
        except OSError as error:
            raise ValueError(f"{self.name}, block {index}: {error}") from error
        need(len(raw) == self.raw[index], f"{self.name}, block {index}: {len(raw)} bytes, not {self.raw[index]}")
        return raw

    def value(self, raw, shape):
        """Return the bytes unchanged if the dtype is `bytes`. Otherwise, return an array with the given shape."""
        if self.dtype == "bytes":
            return raw
        need(len(raw) == math.prod(shape) * self.item.itemsize, f"{self.name}: {len(raw)} bytes for shape {shape}")
        need(self.dtype != "bool" or not raw.strip(b"\0\1"), f"{self.name}: a bool that is neither 0 nor 1")
        return np.frombuffer(raw, self.item).reshape(shape)

    def values(self, data):
        """Decode all samples from the bytes of the data file. Nulls become None."""
        blocks = [self.block(data, index) for index in range(self.blocks)]
        if self.layout == TILED:
            return [self.tiled(blocks, row) for row in range(self.samples)]
        decode = (self.fixed, self.packed, self.single)[self.layout]
        return [value for raw, rows in zip(blocks, self.rows, strict=True) for value in decode(raw, rows)]

    def fixed(self, raw, rows):
        """Decode a block of layout 0."""
        values, valid = self.value(raw, [len(rows), *self.shape]), self.valid[rows.start : rows.stop]
        need(not values[~valid].tobytes().strip(b"\0"), f"{self.name}: a null whose bytes are not zero")
        return [values[place, ...] if valid[place] else None for place in range(len(rows))]

    def packed(self, raw, rows):
        """Decode a block of layout 1."""
        c, result = Cursor(raw, f"{self.name}, block of sample {rows[0]}"), []
        width, all_sizes, zero = c.read("u8"), c.read("flag"), c.read("u16")
        sizes = [c.integers(c.read("u8"), len(rows)).tolist() for _ in range(self.shape.count(None) - 1 + all_sizes)]
        ends = [0, *c.integers(width, len(rows)).tolist()]
        good = not zero and not any(c.take(-c.at % self.item.itemsize)) and ends == sorted(ends) and ends[-1] == len(raw) - c.at
        need(good, f"{c.name}: wrong padding or ends")
        for place, row in enumerate(rows):
            part, known = c.take(ends[place + 1] - ends[place]), iter([size[place] for size in sizes])
            shape = [next(known, None) if size is None else size for size in self.shape]
            if None in shape:
                others = self.item.itemsize * math.prod(size for size in shape if size is not None)
                need(self.dtype == "bytes" or not self.valid[row] or others, f"{c.name}: a zero size without flag 0")
                shape[shape.index(None)] = len(part) // max(others, 1)
            need(self.valid[row] or not part, f"{c.name}: a null that is not empty")
            result.append(self.value(part, shape) if self.valid[row] else None)
        return result

    def single(self, raw, rows):
        """Decode a block of layout 2."""
        need(self.valid[rows[0]] or not raw, f"{self.name}: a null that is not empty")
        return [self.value(raw, self.shapes[rows[0]]) if self.valid[rows[0]] else None]

    def tiled(self, blocks, row):
        """Assemble a sample of layout 3 from its tiles."""
        blocks = blocks[self.first_tile[row] : self.first_tile[row + 1]]
        shape = self.shapes[row] if self.valid[row] else [0] * len(self.tile)
        grid = [range(0, size, side) for size, side in zip(shape, self.tile, strict=True)]
        count, result = math.prod(map(len, grid)), np.empty(shape, self.item)
        need(len(blocks) == count * self.valid[row], f"{self.name}: sample {row} has {len(blocks)} tiles, not {count}")
        for raw, corner in zip(blocks, itertools.product(*grid), strict=True):
            part = tuple(slice(at, at + side) for at, side in zip(corner, self.tile, strict=True))
            result[part] = self.value(raw, result[part].shape)
        return result if self.valid[row] else None


def tail(c, samples):
    """Section 6: parse the tail of a data file, and return its chunks by column."""
    need(c.varint() == samples and c.varint() == 0, f"{c.name}: not {samples} samples, or foreign objects, which are unsupported")
    count = c.varint()
    chunks = {chunk.column: chunk for chunk in (Chunk(c, samples) for _ in range(count))}
    need(c.at == len(c.data) and len(chunks) == count, f"{c.name}: trailing bytes in the tail, or two chunks for one column")
    return chunks


def data_file(data, file, samples):
    """Section 6: check everything in a data file except the blocks, and return its chunks by column."""
    name, end, at = f"data file {file.id}", len(data) - 32 - file.tail_length, 24
    need(len(data) == file.length and end >= at, f"{name}: {len(data)} bytes, not {file.length}")
    footer = struct.pack("<QIIQHH4s", end, file.tail_length, file.tail_crc, len(data), 1, 0, b"PNSD")
    need(data[:at] == b"PNSTKD1\n" + bytes.fromhex(file.id) and data[-32:] == footer, f"{name}: wrong header or footer")
    need(crc32c(data[end:-32]) == file.tail_crc, f"{name}: wrong tail checksum")
    chunks = tail(Cursor(data[end:-32], name), samples)
    need(set(file.columns) <= set(chunks), f"{name}: lacks columns that the fragment lists")
    spans = ((*span, chunk.layout) for chunk in chunks.values() for span in zip(chunk.offset, chunk.stored, strict=True))
    for offset, stored, layout in [*sorted(spans), (end, 0, None)]:
        good = at <= offset <= offset + stored <= end and offset % {TILED: 64, None: 1}.get(layout, 8) == 0
        need(good, f"{name}: misplaced block of {stored} bytes at {offset}")
        need(not data[at:offset].strip(b"\0"), f"{name}: the padding before {offset} is not zero")
        at = offset + stored
    return chunks


class Dataset:
    """A dataset in a local folder, at the newest or a given snapshot. All data is checked when it is read."""

    def __init__(self, path, snapshot=None):
        self.path, (branch, number, _) = Path(path), (snapshot or "0--").split("-")
        self.branch, self.log = int(branch, 16), f"log/{int(branch, 16):016x}"
        self.record = now = self._record(int(number) if snapshot else self._newest(self.log))
        self.snapshot = f"{now.branch:x}-{now.number}-{now.transactions[0].uuid}"
        need(snapshot in (None, self.snapshot), f"found snapshot {self.snapshot}, not {snapshot}")
        self.root = root(self._object("r", now.root, b"PNSR", "root"), now)
        self.schema, self.fragments, self.words, self.overlays = self.root.schema, [], {}, []
        self.statistics, self.attachments = {}, []
        for part in [*self.root.pages, *self.root.segments, *self.root.overlays, *self.root.attachments, *now.deltas]:
            if hasattr(part, "rows"):
                self.overlays.append(part)
                part.ids = self._row_set(part.rows)
                good = distinct_columns(part) <= set(part.columns) and len(set(part.columns)) == len(part.columns)
                good = good and (not {0, GONE} & set(part.columns) or (len(part.columns) == 1 and not part.files))
                need(good and now.read & OVERLAYS_FEATURE, "an overlay with other columns, or feature 1 is not set")
            elif hasattr(part, "base"):
                if part.statistics:
                    found = self._object("s", part.statistics, b"PNSS", "statistics")
                    need((found.page, found.fragments) == (part.object.id, part.fragments), f"s/{part.statistics.id}: of another page")
                    known = {(column, len(self.fragments) + place): word for (column, place), word in found.known.items()}
                    self.statistics.update(known)
                self.fragments += map(fragment, page(self._object("p", part.object, b"PNSP", "fragment*"), part))
            elif hasattr(part, "first_code"):
                words, known = self._object("w", part.object, b"PNSW", "words"), self.words.setdefault(part.column, [])
                need((words.column, len(words.words)) == (part.column, part.count), f"w/{part.object.id}: differs from the reference")
                need(part.first_code == len(known), f"words of column {part.column} start at {part.first_code}, not {len(known)}")
                known += words.words
            elif hasattr(part, "covers"):
                part.covered = set(self._row_set(part.covers) if part.covers else []).difference(*map(self._row_set, part.changed))
                exists = {column["id"] for column in self.schema["columns"]}.issuperset(part.columns)
                ascend = part.columns == sorted(set(part.columns))
                small = 0 < len(part.kind) <= 64 and len(part.parameters.encode()) <= 1024
                need(exists and ascend and small and isinstance(json.loads(part.parameters), dict), "an attachment that is not allowed")
                need(now.read & ATTACHMENTS_FEATURE, "an attachment although feature 10 is not set")
                need(part.object.id not in [other.object.id for other in self.attachments], "an object that is attached twice")
                part.content = self._object("a", part.object, b"PNSA", "content")
                self.attachments.append(part)
            elif hasattr(part, "detached"):
                self.attachments = [other for other in self.attachments if other.object.id != part.detached]
            else:
                self.fragments.append(fragment(part))
            if hasattr(part, "rows") and not {0, GONE} & set(part.columns):
                for attachment in self.attachments:
                    attachment.covered -= set(part.ids if set(part.columns) & set(attachment.columns) and part in now.deltas else [])
        named = [overlay.id for overlay in self.overlays if overlay.id]
        need(len(named) == len(set(named)), "an overlay that is listed twice")
        ids = self._physical()
        # Deleted samples, and absent ones, which never lived on the branch.
        self.deleted = [id for overlay in self.overlays for id in overlay.ids if overlay.columns in ([], [0])]
        hidden, known = set(self.deleted), set(ids)
        need(len(known) == len(ids) == now.physical, f"{len(ids)} row ids, expected {now.physical} distinct ones")
        count = now.physical - now.live
        need(len(hidden) == len(self.deleted) == count, f"{len(hidden)} deleted samples, expected {count}")
        need(max(ids, default=0) < PROVISIONAL, "a provisional row id outside a page")
        # Deleted samples that no fragment has any more. Older values of them may remain.
        gone = {id for overlay in self.overlays for id in overlay.ids if overlay.columns == [GONE]}
        need(not gone & known, "gone samples that a fragment has")
        owners = [(known if overlay.columns in ([], [0]) else known | gone, overlay.ids) for overlay in self.overlays]
        good = all(owner.issuperset(rows) for owner, rows in owners)
        need(good, "an overlay with the row id of no sample")
        for word in self.root.stages:
            stages = self._object("g", word, b"PNST", "staged*")
            need([stage.file for stage in stages] == sorted({stage.file for stage in stages}), "stages that are not in order")

    def __len__(self):
        return self.record.live

    def row_ids(self):
        """Return the row ids of all samples that are not deleted."""
        deleted = set(self.deleted)
        return [id for id in self._physical() if id not in deleted]

    def _physical(self):
        return [id for part in self.fragments for run in part.runs for id in range(run.first, run.first + run.count)]

    def _row_set(self, rows):
        """Section 7: return the row ids of a row set in ascending order."""
        if isinstance(rows, list):
            ids = [id for run in rows for id in range(run.first, run.first + run.count)]
            apart = all(one.first + one.count < other.first for one, other in itertools.pairwise(rows))
            need(len(rows) <= 16 and apart and all(run.count for run in rows), "the runs of a row set are too many, or not in order")
        else:
            ids = [final(id, rows.base) for id in self._object("o", rows.object, b"PNSO", "bitmap")]
            need(len(ids) == rows.ids and rows.least <= ids[0] <= ids[-1] < rows.least + rows.span, "row ids differ from their parent")
        need(ids == sorted(set(ids)) and ids[-1:] < [PROVISIONAL], "an empty row set, or row ids that are not in order")
        return ids

    def commits(self):
        """Return the commits up to this snapshot, newest first. Each commit must match the reference in its child."""
        records, seen = [self.record], set()
        for child in records:
            for word in child.parents:
                parent = record(self._get(self._place(f"log/{word.branch:016x}", word.number)), word.branch, word.number)
                same = (parent.transactions[0].uuid, parent.crc, parent.dataset) == (word.uuid, word.crc, child.dataset)
                need(same and parent.time < child.time, f"record {word.number}: differs from the child's reference")
                if (parent.branch, parent.number) == (child.branch, child.number - 1):
                    landmark = parent.landmark if parent.kind in (DATA, LAYOUT) else parent.number
                    need((child.landmark, child.lineage) == (landmark, parent.lineage), f"record {child.number}: wrong landmark or lineage")
                    need(child.transactions[0].first_counter >= parent.next_counter, f"record {child.number}: assigns row ids again")
                if (word.branch, word.number) not in seen:
                    records.append(parent)
                seen.add((word.branch, word.number))
        records.sort(key=lambda r: (r.time, r.branch, r.number), reverse=True)
        return [{"number": r.number, "time": r.time} | vars(t) for r in records for t in reversed(r.transactions)]

    def column(self, name):
        """Return all samples of a column. Each sample is None, bytes, a category's word, or an array with the sample's shape."""
        column = {column["name"]: column for column in self.schema["columns"]}[name]
        cells = {}
        for place, part in enumerate(self.fragments):
            ids = [id for run in part.runs for id in range(run.first, run.first + run.count)]
            listed = any(column["id"] in file.columns for file in part.files)
            if "fill" in column and not listed:
                fill = SimpleNamespace(kind=0, **fill_file(column))
                cells.update(dict.fromkeys(ids, self._values([fill], 1, column)[0]))
                continue
            cells.update(zip(ids, self._values(part.files, part.samples, column, self.statistics.get((column["id"], place))), strict=True))
        for overlay in self.overlays:
            if column["id"] in overlay.columns:
                cells.update(zip(overlay.ids, self._values(overlay.files, len(overlay.ids), column), strict=True))
        return [cells[id] for id in self.row_ids()]

    def _values(self, files, samples, column, statistics=None):
        """Return the values of a column in a fragment or an overlay. A page may have said what its statistics are."""
        need(not statistics or any(column["id"] in file.columns for file in files), f"statistics of {column['name']}, which is not there")
        known, values = set(self.words.get(column["id"], ())), [None] * samples
        for file in (file for file in files if column["id"] in file.columns):
            data = self._data(file)
            chunk = data_file(data, file, samples)[column["id"]]
            dtype, shape = column["stored"]
            feature = CLASSES_FEATURE if column["type"] == "label" else WIDENED_FEATURE
            earlier = chunk.dtype != dtype and chunk.dtype in column.get("was", ()) and self.record.read & feature
            need(
                (chunk.dtype == dtype or earlier) and chunk.shape == shape,
                f"{chunk.name}: {chunk.dtype} {chunk.shape}, not {column['stored']}",
            )
            need(chunk.layout != TILED or self.record.read & TILED_FEATURE, f"{chunk.name}: tiled although feature 0 is not set")
            values = chunk.values(data)
            need(not chunk.bounds or self.record.read & STATISTICS_FEATURE, f"{chunk.name}: bounds although feature 9 is not set")
            chunk.check_bounds(values, statistics)
            if earlier:
                wider = np.dtype(NUMPY.get(dtype, dtype))
                values = [value if value is None else widened(value, chunk.dtype, wider) for value in values]
            if column["type"] in ("category", "label", "labels"):
                words = chunk.dictionary if column["type"] == "category" else column["names"]
                places = {code: place for place, code in enumerate(range(len(words)) if column["type"] == "category" else column["codes"])}
                good = all(int(code) in places for codes in values if codes is not None for code in np.ravel(codes))
                need(good and known.issuperset(chunk.dictionary), f"{chunk.name}: an unknown code or word")
                if column["type"] == "category":
                    values = [code if code is None else words[code] for code in values]
                else:
                    values = [codes if codes is None else np.vectorize(places.get, otypes=["i8"])(codes) for codes in values]
        return values

    def _data(self, file):
        """Section 5: return the bytes of a data file, wherever they are."""
        need(not file.kind or self.record.read & INLINE_FEATURE, f"data file {file.id}: in another object although feature 4 is not set")
        if file.kind == 0:
            for _ in range(9):
                if found := self._get(f"d/{file.id}", must=False):
                    break
                following = envelope(self._get(f"f/{file.id}"), b"PNSF", "forwarding", f"f/{file.id}")
                need(following.before == file.id, f"f/{file.id}: it is of another data file")
                vars(file).update({name: value for name, value in vars(following).items() if name != "before"})
            need(found, f"d/{file.id}: too many forwarding objects")
            return found
        if file.kind == 1:
            return file.inside
        place = file.inside
        need(place.branch != self.branch or place.number <= self.record.number, f"data file {file.id}: in a later record")
        holder = record(self._get(self._place(f"log/{place.branch:016x}", place.number)), place.branch, place.number)
        begin = place.offset - DATA_OFFSET
        need(holder.dataset == self.record.dataset and begin >= 0, f"data file {file.id}: outside the data of record {place.number}")
        return holder.data[begin : begin + file.length]

    def names(self):
        """Section 9: return a dict that maps (kind, name) to the branch, number and uuid of a snapshot."""
        if not self._get("refs/hint", must=False) and not self._get(self._place("refs", 0), must=False):
            return {}
        number = self._newest("refs")
        names = envelope(self._get(self._place("refs", number)), b"PNSN", "names", f"names {number}")
        need(names.number == number, f"names {number}: claims to be names record {names.number}")
        need(1 <= names.own <= len(names.operations), f"names {number}: adds {names.own} of {len(names.operations)} operations")
        operations = []
        for place, word in enumerate(names.before):
            before = self._object("n", word, b"PNSN", "operation*")
            keys = [(o.kind, o.name) for o in before]
            need(keys == sorted(set(keys)), f"names {number}: an object is not in order")
            need(place or not any(o.remove for o in before), f"names {number}: its first object has a removal")
            operations += before
        operations += names.operations
        result = {(o.kind, o.name): None if o.remove else (o.branch, o.number, o.uuid) for o in operations}
        return {key: target for key, target in result.items() if target}

    def _newest(self, folder):
        """Section 2: find the newest number by counting up from the hint."""
        hint, number = self._get(f"{folder}/hint", must=False) or b"", 0
        if len(hint) == 24 and hint[:4] == b"PNSH" and crc32c(hint[:20]) == int.from_bytes(hint[20:], "little"):
            number = int.from_bytes(hint[4:12], "little")
        number = number if self._get(self._place(folder, number), must=False) else 0
        while self._get(self._place(folder, number + 1), must=False):
            number += 1
        return number

    def _place(self, folder, number):
        return f"{folder}/{(1 << 64) - 1 - number:020d}"

    def _record(self, number):
        return record(self._get(self._place(self.log, number)), self.branch, number)

    def _object(self, folder, word, magic, form):
        return envelope(self._get(f"{folder}/{word.id}"), magic, form, f"{folder}/{word.id}", word)

    def _get(self, name, must=True):
        need(not must or (self.path / name).exists(), f"{name}: missing")
        return (self.path / name).read_bytes() if (self.path / name).exists() else None
