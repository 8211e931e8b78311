//! Which path an object has in a served folder.
//!
//! A key is a path, if file systems allow it: `a/b.jpg` is the file `b.jpg` in the folder `a`. What they do not allow is written with `%`: bytes as
//! `%2E`, an empty part as `%_`, and a part that is too long as folders that end with `%~`. An object whose key is also a folder is the file
//! `%self` in it.

/// An empty part of a key.
const EMPTY: &str = "%_";
/// The end of a folder's name if the part of the key continues in the folder.
const CONTINUED: &str = "%~";
/// The object whose key is this folder.
pub const SELF: &str = "%self";
/// The longest name, with its end. File systems allow 255 bytes.
const MOST_BYTES: usize = 200;

/// Return the path of a key, with `/` between names.
pub fn path_of(key: &str) -> String {
    let parts: Vec<String> = key.split('/').map(encoded).collect();
    parts.join("/")
}

fn encoded(part: &str) -> String {
    let is_dots = part == "." || part == "..";
    let (mut path, mut name, mut is_continued) = (String::new(), String::new(), false);
    for letter in part.chars() {
        let escaped = || format!("%{:02X}", letter as u32);
        let mut code = if letter == '%' || letter.is_ascii_control() || is_dots { escaped() } else { letter.to_string() };
        if name.len() + code.len() > MOST_BYTES - CONTINUED.len() {
            path.push_str(&name);
            path.push_str(CONTINUED);
            path.push('/');
            name.clear();
            is_continued = true;
        }
        // The rest of a part may be `.` or `..`.
        if letter == '.' && is_continued && name.is_empty() {
            code = escaped();
        }
        name.push_str(&code);
    }
    if part.is_empty() { EMPTY.to_owned() } else { path + &name }
}

/// What a name in a folder is of a key.
#[derive(Debug, PartialEq, Eq)]
pub enum Part {
    /// A whole part.
    Whole(String),
    /// The beginning of a part, which continues in this folder.
    Begin(String),
    /// The object whose key is the folder.
    Own,
}

/// Return what a name is, or None if no key has this name. In a folder that ends with `%~`, it is the rest of a part.
pub fn part_of(name: &str, is_rest: bool) -> Option<Part> {
    if name == SELF {
        return Some(Part::Own);
    }
    if name == EMPTY {
        return Some(Part::Whole(String::new()));
    }
    if let Some(begin) = name.strip_suffix(CONTINUED) {
        return decoded(begin).map(Part::Begin);
    }
    let part = decoded(name)?;
    // Only one name is the right one of a part.
    let expected = if is_rest && part.starts_with('.') { format!("%2E{}", encoded_rest(&part[1..])) } else { encoded(&part) };
    (expected == name).then_some(Part::Whole(part))
}

/// Encode what follows the first letter of a part.
fn encoded_rest(rest: &str) -> String {
    if rest.is_empty() { String::new() } else { encoded(&format!("-{rest}"))[1..].to_owned() }
}

fn decoded(name: &str) -> Option<String> {
    let mut part = String::new();
    let mut pieces = name.split('%');
    part.push_str(pieces.next()?);
    for piece in pieces {
        let code = u8::from_str_radix(piece.get(..2)?, 16).ok().filter(u8::is_ascii)?;
        part.push(char::from(code));
        part.push_str(&piece[2..]);
    }
    Some(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_safe_and_differ() {
        let long = "ü%".repeat(256);
        let keys = [
            "a", "a/b.jpg", "", "a/", "/a", "a//b", ".", "..", "../x", "a/../b", "%", "%2E", "%self", "%_", "x%~", "a\u{0}b", "...", &long,
        ];
        let mut paths: Vec<String> = keys.iter().map(|key| path_of(key)).collect();
        for path in &paths {
            assert!(!path.starts_with('/') && path.split('/').all(|name| !matches!(name, "" | "." | "..") && name.len() <= 255), "{path}");
        }
        paths.sort_unstable();
        paths.dedup();
        assert_eq!(paths.len(), keys.len());
        assert_eq!(path_of("a/b.jpg"), "a/b.jpg");
    }

    #[test]
    fn names_are_read_back() {
        for part in ["a", "", ".", "..", "%", "%self", "ü", ".hidden", "a\nb"] {
            assert_eq!(part_of(&encoded(part), false), Some(Part::Whole(part.to_owned())));
        }
        for name in ["100%", "%zz", "%41", "%e4"] {
            assert_eq!(part_of(name, false), None, "{name}");
        }
        assert_eq!(part_of(SELF, false), Some(Part::Own));
        assert_eq!(part_of("abc%~", false), Some(Part::Begin("abc".into())));
        for rest in [".", "..", ".a", "..a%", "...", "a."] {
            let path = encoded(&format!("{}{rest}", "x".repeat(198)));
            let (begin, end) = path.split_once('/').unwrap_or_default();
            assert_eq!(part_of(begin, false), Some(Part::Begin("x".repeat(198))));
            assert!(!matches!(end, "" | "." | ".."));
            assert_eq!(part_of(end, true), Some(Part::Whole(rest.to_owned())), "{path}");
        }
    }
}
