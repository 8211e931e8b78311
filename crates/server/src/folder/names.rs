//! Which path an object has in a served folder.
//!
//! A key is a path: `a/b.jpg` is the file `b.jpg` in the folder `a`. So each file is an object, also if another program made it. Only what file systems do
//! not allow is written with `%`. An empty part of a key is `%_`, `.` is `%2E`, and `..` is `%2E%2E`. A part that is too long is several folders that end with
//! `%~`. An object whose key is also a folder is the file `%self` in it. A part that looks like one of these gets a `25` behind this `%`, also if it has some
//! already. So each key has one path, and no two keys have the same.

/// An empty part of a key.
const EMPTY: &str = "%_";
const DOT: &str = "%2E";
const DOTS: &str = "%2E%2E";
/// The end of a folder's name if the part of the key continues in the folder.
const CONTINUED: &str = "%~";
/// The object whose key is this folder.
pub const SELF: &str = "%self";
/// The longest name, as file systems have it.
const MOST_BYTES: usize = 255;
/// What is in one folder of a part that is too long.
const PIECE_BYTES: usize = 198;

/// Return the path of a key, with `/` between names.
pub fn path_of(key: &str) -> String {
    let parts: Vec<String> = key.split('/').map(encoded).collect();
    parts.join("/")
}

/// Return the path of a part of a key, which is a name, or several if it is too long.
pub fn encoded(part: &str) -> String {
    let whole = name_of(part);
    if whole.len() <= MOST_BYTES {
        return whole;
    }
    let (mut path, mut rest) = (String::new(), part);
    while rest.len() > PIECE_BYTES {
        let (piece, after) = rest.split_at(rest.floor_char_boundary(PIECE_BYTES));
        path.extend([piece, CONTINUED, "/"]);
        rest = after;
    }
    path + &name_of(rest)
}

/// Return the name of a part that is not too long.
fn name_of(part: &str) -> String {
    match part {
        "" => EMPTY.to_owned(),
        "." => DOT.to_owned(),
        ".." => DOTS.to_owned(),
        _ => mark(part).map_or_else(|| part.to_owned(), |at| format!("{}25{}", &part[..at], &part[at..])),
    }
}

/// Return the place behind the `%` of a name that this server writes, or of a part that looks like one. Between both, there may be any number of `25`.
fn mark(name: &str) -> Option<usize> {
    let is_mark = |at: usize, ends: &[&str]| ends.contains(&name[at..].trim_start_matches("25"));
    let at = name.rfind('%')? + 1;
    if is_mark(at, &[&CONTINUED[1..]]) {
        return Some(at);
    }
    (name.starts_with('%') && is_mark(1, &[&EMPTY[1..], &DOT[1..], &DOTS[1..], &SELF[1..]])).then_some(1)
}

/// What a name in a folder is of a key.
#[derive(Debug, PartialEq, Eq)]
pub enum Part {
    /// A whole part, or the rest of one.
    Whole(String),
    /// The beginning of a part, which continues in this folder.
    Begin(String),
    /// The object whose key is the folder.
    Own,
}

/// Return what a name is.
pub fn part_of(name: &str) -> Part {
    match name {
        SELF => return Part::Own,
        EMPTY => return Part::Whole(String::new()),
        DOT => return Part::Whole(".".into()),
        DOTS => return Part::Whole("..".into()),
        _ => {}
    }
    match mark(name) {
        None => Part::Whole(name.to_owned()),
        // It looks like such a name, and has a `25` too much.
        Some(at) if name[at..].starts_with("25") => Part::Whole(format!("{}{}", &name[..at], &name[at + 2..])),
        Some(at) => Part::Begin(name[..at - 1].to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parts of keys, and the only path of each.
    const PATHS: [(&str, &str); 24] = [
        ("a", "a"),
        ("", "%_"),
        (".", "%2E"),
        ("..", "%2E%2E"),
        ("...", "..."),
        ("a\nb", "a\nb"),
        ("100%.csv", "100%.csv"),
        ("%41", "%41"),
        ("%", "%"),
        ("%25", "%25"),
        ("%_", "%25_"),
        ("%25_", "%2525_"),
        ("%self", "%25self"),
        ("%25self", "%2525self"),
        ("%selfish", "%selfish"),
        ("%2E", "%252E"),
        ("%2E%2E", "%252E%2E"),
        ("%252E", "%25252E"),
        ("%2E.", "%2E."),
        ("x%_", "x%_"),
        ("x%~", "x%25~"),
        ("x%25~", "x%2525~"),
        ("%self%~", "%self%25~"),
        ("%~x", "%~x"),
    ];

    #[test]
    fn each_part_has_a_name_of_its_own_that_is_read_back() {
        for (part, name) in PATHS {
            assert_eq!(encoded(part), name);
            assert_eq!(part_of(name), Part::Whole(part.to_owned()), "{name}");
        }
        assert_eq!(part_of(SELF), Part::Own);
        assert_eq!(part_of("abc%~"), Part::Begin("abc".into()));
        assert_eq!(part_of("x%25%~"), Part::Begin("x%25".into()));
        assert_eq!(path_of("a/../%self//b"), "a/%2E%2E/%25self/%_/b");
    }

    #[test]
    fn every_name_is_that_of_one_part() {
        // All short texts of the letters that names with a meaning have.
        let mut texts = vec![String::new()];
        for at in 0..6_usize {
            let longer: Vec<String> = texts.iter().filter(|text| text.chars().count() == at).cloned().collect();
            texts.extend(
                longer
                    .iter()
                    .flat_map(|text| ["%", "25", "2E", ".", "_", "~", "self"].map(|end| format!("{text}{end}"))),
            );
        }
        for name in texts.iter().filter(|name| !matches!(&***name, "" | "." | "..")) {
            if let Part::Whole(part) = part_of(name) {
                assert_eq!(encoded(&part), *name);
            } else {
                assert!(name == SELF || name.ends_with(CONTINUED));
            }
        }
        for part in &texts {
            assert_eq!(part_of(&encoded(part)), Part::Whole(part.clone()));
        }
    }

    #[test]
    fn long_parts_are_several_folders() {
        for rest in [".", "..", ".a", "%self", "%~", "x%~", "%_", "...", "a."] {
            for (begin, count) in
                [("x".repeat(198), 2), ("ü".repeat(99), 2), ("%".repeat(198), 2), (".".repeat(198), 2)]
            {
                let path = encoded(&format!("{}{rest}", begin.repeat(count)));
                let names: Vec<&str> = path.split('/').collect();
                assert_eq!(names.len(), count + 1);
                assert!(
                    names.iter().all(|name| name.len() <= MOST_BYTES && !matches!(*name, "" | "." | "..")),
                    "{path}"
                );
                assert_eq!(part_of(names[0]), Part::Begin(begin.clone()));
                assert_eq!(part_of(names[count]), Part::Whole(rest.to_owned()), "{path}");
            }
        }
        assert_eq!(encoded(&"n".repeat(255)), "n".repeat(255));
        assert_eq!(encoded(&"n".repeat(256)), format!("{}%~/{}", "n".repeat(198), "n".repeat(58)));
    }
}
