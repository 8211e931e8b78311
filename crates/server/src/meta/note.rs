//! A state as a text that is kept beside the pages of its version.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use s3s::dto::{HeadObjectOutput, Timestamp, TimestampFormat};
use serde::{Deserialize, Serialize};

use super::{Meta, since_1970};

/// Notes of other versions are ignored. Their objects are asked for again.
const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
struct Note {
    version: u32,
    /// When the cold store was asked, in seconds since 1970.
    seen: u64,
    sums: bool,
    #[serde(default)]
    immutable: bool,
    etag: String,
    bytes: u64,
    /// Fields that are texts, by their names.
    texts: HashMap<String, String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    metadata: Vec<(String, String)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    missing_meta: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    parts_count: Option<i32>,
}

/// Pass the names of fields that are texts, of fields that are one of some words, and of times to a macro.
macro_rules! each_text {
    ($then:ident, $head:expr, $texts:expr) => {
        $then!($head, $texts;
            accept_ranges cache_control checksum_crc32 checksum_crc32c checksum_crc64nvme checksum_sha1 checksum_sha256 content_disposition
            content_encoding content_language content_type restore ssekms_key_id version_id website_redirect_location;
            checksum_type server_side_encryption storage_class;
            expires last_modified)
    };
}

macro_rules! texts_of {
    ($head:expr, $texts:expr; $($text:ident)*; $($word:ident)*; $($time:ident)*) => {{
        $($head.$text.iter().for_each(|text| drop($texts.insert(stringify!($text).to_owned(), text.clone())));)*
        $($head.$word.iter().for_each(|word| drop($texts.insert(stringify!($word).to_owned(), word.as_str().to_owned())));)*
        $($head.$time.iter().filter_map(date).for_each(|date| drop($texts.insert(stringify!($time).to_owned(), date)));)*
    }};
}

macro_rules! take_texts {
    ($head:expr, $texts:expr; $($text:ident)*; $($word:ident)*; $($time:ident)*) => {{
        $($head.$text = $texts.remove(stringify!($text));)*
        $($head.$word = $texts.remove(stringify!($word)).map(Into::into);)*
        $($head.$time = $texts.remove(stringify!($time)).and_then(|date| Timestamp::parse(TimestampFormat::DateTime, &date).ok());)*
    }};
}

fn date(time: &Timestamp) -> Option<String> {
    let mut date = Vec::new();
    time.format(TimestampFormat::DateTime, &mut date).ok()?;
    String::from_utf8(date).ok()
}

impl Meta {
    /// Return the state as a text.
    pub fn note(&self) -> Vec<u8> {
        let mut texts = HashMap::new();
        each_text!(texts_of, self.head, texts);
        let note = Note {
            version: VERSION,
            seen: since_1970().as_secs().saturating_sub(self.age().unwrap_or_default().as_secs()),
            sums: self.knows_sums,
            immutable: self.is_proven(),
            etag: self.etag.value().to_owned(),
            bytes: self.bytes,
            texts,
            metadata: self.head.metadata.clone().into_iter().flatten().collect(),
            missing_meta: self.head.missing_meta,
            parts_count: self.head.parts_count,
        };
        serde_json::to_vec(&note).unwrap_or_default()
    }

    /// Read a state. Returns None for one of another version, or a damaged one.
    pub fn of_note(note: &[u8], is_believed: bool) -> Option<Meta> {
        let mut note: Note = serde_json::from_slice(note).ok().filter(|note: &Note| note.version == VERSION)?;
        let mut head = HeadObjectOutput {
            content_length: i64::try_from(note.bytes).ok(),
            e_tag: Some(s3s::dto::ETag::Strong(note.etag)),
            metadata: (!note.metadata.is_empty()).then(|| note.metadata.into_iter().collect()),
            missing_meta: note.missing_meta,
            parts_count: note.parts_count,
            ..HeadObjectOutput::default()
        };
        each_text!(take_texts, head, note.texts);
        // A clock that was set back makes the time unknown.
        let age = since_1970().as_secs().checked_sub(note.seen).map(Duration::from_secs);
        let is_believed = is_believed && age.is_some();
        let seen = age.and_then(|age| Instant::now().checked_sub(age));
        // One that is not believed is written again.
        let noted = if is_believed { note.seen } else { 0 };
        Meta::of_head(head).map(|meta| Meta {
            seen,
            is_believed,
            was_on_drive: true,
            noted: noted.into(),
            proven: note.immutable.into(),
            knows_sums: note.sums,
            ..meta
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meta() -> Meta {
        let time = Timestamp::parse(TimestampFormat::DateTime, "2026-11-29T12:00:01.250Z").ok();
        Meta::of_head(HeadObjectOutput {
            content_length: Some(17),
            content_type: Some("text/plain".into()),
            checksum_crc32: Some("AAAAAA==".into()),
            checksum_type: Some("FULL_OBJECT".to_owned().into()),
            storage_class: Some("GLACIER_IR".to_owned().into()),
            e_tag: Some(s3s::dto::ETag::Strong("a\"b-1".into())),
            last_modified: time.clone(),
            expires: time,
            metadata: Some([("owner".to_owned(), "ü\n".to_owned())].into_iter().collect()),
            missing_meta: Some(2),
            ..HeadObjectOutput::default()
        })
        .unwrap()
    }

    #[test]
    fn a_state_is_read_as_it_was_written() {
        let meta = meta();
        let mut note = meta.note();
        note.extend_from_slice(b"   ");
        let again = Meta::of_note(&note, true).unwrap();
        assert!(
            again.head == meta.head
                && again.etag == meta.etag
                && again.bytes == 17
                && again.knows_sums
                && again.is_believed
        );
        assert!(again.age().unwrap() < Duration::from_secs(5) && !again.needs_note());
        let other = Meta::of_note(&note, false).unwrap();
        assert!(!other.is_believed && other.needs_note());
    }

    #[test]
    fn other_texts_are_no_states() {
        let note = String::from_utf8(meta().note()).unwrap();
        assert!(Meta::of_note(b" ", true).is_none() && Meta::of_note(&note.as_bytes()[1..], true).is_none());
        assert!(Meta::of_note(note.replace("\"version\":1", "\"version\":2").as_bytes(), true).is_none());
        let future = note.replace("\"seen\":", "\"seen\":9");
        let of_future = Meta::of_note(future.as_bytes(), true).unwrap();
        assert!(!of_future.is_believed && of_future.age().is_none());
    }
}
