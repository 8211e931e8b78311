//! Many ranges in one request, if the server offers it, as `penstock serve` does (docs/design/0021-server.md).
//!
//! A batch only saves requests. Whatever it does not answer is read by requests of its own, which also report errors.

use std::time::Duration;

use bytes::{Buf as _, BytesMut};
use futures::StreamExt as _;
use object_store::client::HttpRequest;
use object_store::path::Path;
use object_store::signer::SignedUrlOptions;

use super::connect::Batches;
use super::ranges::Filling;
use crate::ranges::RangeRequest;

/// Fewer ranges are read by requests of their own.
pub const LEAST_RANGES: usize = 16;
/// Limits of one batch. A store gets several at once.
const MOST_RANGES: usize = 128;
const MOST_BYTES: u64 = 4 << 20;
/// A longer range is read by a request of its own.
const MOST_RANGE_BYTES: u64 = 1 << 20;
/// How long the signature of a batch is valid.
const VALID: Duration = Duration::from_secs(60);
/// Before each answer: its status, the length of the object, and that of the answer.
const HEAD_BYTES: usize = 20;

/// A range of a batch, with its number in the read.
pub struct Member {
    pub index: usize,
    pub path: Path,
    pub what: String,
    pub range: RangeRequest,
}

/// Divide ranges into batches, and those that are too long.
pub fn divide(members: Vec<Member>) -> (Vec<Vec<Member>>, Vec<Member>) {
    let (mut batches, mut alone, mut bytes) = (Vec::<Vec<Member>>::new(), Vec::new(), u64::MAX);
    for member in members {
        let own = member.range.end() - member.range.begin;
        if own > MOST_RANGE_BYTES || own == 0 {
            alone.push(member);
            continue;
        }
        if bytes.saturating_add(own) > MOST_BYTES || batches.last().is_some_and(|last| last.len() == MOST_RANGES) {
            batches.push(Vec::new());
            bytes = 0;
        }
        bytes += own;

        if let Some(last) = batches.last_mut() {
            last.push(member);
        }
    }
    (batches, alone)
}

/// Return the body of a batch: its list in JSON.
fn list_of(members: &[(Path, u64, u64)]) -> String {
    let mut list = String::from("{\"ranges\":[");
    for (number, (path, begin, end)) in members.iter().enumerate() {
        let key: String = path.as_ref().chars().map(escaped).collect();
        let comma = if number == 0 { "" } else { "," };
        list.push_str(&format!("{comma}{{\"key\":\"{key}\",\"begin\":{begin},\"end\":{end}}}"));
    }
    list + "]}"
}

fn escaped(letter: char) -> String {
    match letter {
        '"' | '\\' => format!("\\{letter}"),
        letter if letter.is_control() => format!("\\u{:04x}", letter as u32),
        letter => letter.to_string(),
    }
}

impl Batches {
    /// Send a batch, and fill its ranges as far as the server answers them. Returns None if it broke off.
    pub async fn send(
        &self,
        ranges: &[(Path, u64, u64)],
        objects: &[Option<u64>],
        fillings: &mut [Filling<'_>],
    ) -> Option<()> {
        let options = SignedUrlOptions::default().with_query([("batch", "")]);
        let url = self.signer.signed_url_opts("POST".parse().ok()?, &self.path, VALID, &options).await.ok()?;
        let mut request = HttpRequest::new(list_of(ranges).into());
        *request.method_mut() = "POST".parse().ok()?;
        *request.uri_mut() = url.as_str().parse().ok()?;
        let response = self.http.execute(request).await.ok().filter(|response| response.status().is_success())?;
        let mut parts = response.into_body().bytes_stream();
        let (mut head, mut left) = (BytesMut::new(), 0);
        let mut answers = objects.iter().zip(fillings.iter_mut());
        let mut current: Option<&mut Filling<'_>> = None;
        while let Some(part) = parts.next().await {
            let mut part = part.ok()?;
            while !part.is_empty() {
                if left > 0 {
                    let bytes = part.split_to((part.len() as u64).min(left) as usize);
                    left -= bytes.len() as u64;
                    current.iter_mut().for_each(|filling| filling.take(bytes.clone()));
                    continue;
                }
                head.extend_from_slice(&part.split_to(part.len().min(HEAD_BYTES - head.len())));
                if head.len() == HEAD_BYTES {
                    let (status, object_bytes) = (head.get_u32_le(), head.get_u64_le());
                    left = head.get_u64_le();
                    let (expected, filling) = answers.next()?;
                    // An object of another length is read again, which reports it.
                    let is_good = status == 200
                        && expected.is_none_or(|expected| expected == object_bytes)
                        && left == filling.missing();
                    current = is_good.then_some(filling);
                }
            }
        }
        (left == 0 && head.is_empty() && answers.next().is_none()).then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_divided_by_number_and_bytes() {
        let member = |index, bytes| Member {
            index,
            path: Path::from("a"),
            what: String::new(),
            range: RangeRequest::plain("a", 0, bytes, None),
        };
        let small = (0..300).map(|index| member(index, 100)).collect();
        let (batches, alone) = divide(small);
        assert_eq!((batches.iter().map(Vec::len).collect::<Vec<_>>(), alone.len()), (vec![128, 128, 44], 0));
        let large = (0..10).map(|index| member(index, 1 << 20)).chain([member(10, 2 << 20), member(11, 0)]).collect();
        let (batches, alone) = divide(large);
        assert_eq!((batches.iter().map(Vec::len).collect::<Vec<_>>(), alone.len()), (vec![4, 4, 2], 2));
    }

    #[test]
    fn keys_are_safe_in_json() {
        let text: String = "a\"b\\c\n".chars().map(escaped).collect();
        assert_eq!(text, "a\\\"b\\\\c\\u000a");
        let list = list_of(&[(Path::from("a"), 1, 2), (Path::from("c"), 3, 4)]);
        assert_eq!(list, "{\"ranges\":[{\"key\":\"a\",\"begin\":1,\"end\":2},{\"key\":\"c\",\"begin\":3,\"end\":4}]}");
    }
}
