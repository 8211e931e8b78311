//! The local paths that URIs name. Everything that takes a path or a URI from a user asks here.

use std::path::PathBuf;

use penstock_error::{Error, Result};
use url::Url;

/// Return the local path that a path or a URI with the scheme `file` names, or None for other schemes. Source: RFC 8089.
///
/// In a URI, `%20` means a space; in a path, it means itself. The host is empty or `localhost`.
///
/// # Errors
/// `invalid-uri`: the path is empty or has a null character; the URI is relative, names another host, or has a query or a fragment.
pub fn local_path(text: &str) -> Result<Option<PathBuf>> {
    let invalid = |what: &str| Error::new("invalid-uri", format!("cannot open `{text}`: {what}"));
    let is_file = text.get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case("file:"));
    if !is_file && text.contains("://") {
        return Ok(None);
    }
    let path = if is_file {
        of_file_uri(text).map_err(|what| invalid(&what).hint("write file:///folder, or a path"))?
    } else {
        text.into()
    };
    if path.as_os_str().is_empty() || path.as_os_str().as_encoded_bytes().contains(&0) {
        return Err(invalid("the path is empty or contains a null character"));
    }
    if path.to_str().is_none() {
        return Err(invalid("the path is not UTF-8"));
    }
    Ok(Some(path))
}

fn of_file_uri(text: &str) -> std::result::Result<PathBuf, String> {
    let rest = &text[5..];
    let path = rest.strip_prefix("//").map_or(rest, |rest| rest.find('/').map_or("", |slash| &rest[slash..]));
    if !path.starts_with('/') {
        return Err("a file URI names an absolute path".to_owned());
    }
    let uri = Url::parse(text).map_err(|error| error.to_string())?;
    if let Some(host) = uri.host_str().filter(|host| *host != "localhost") {
        return Err(format!("it names the host `{host}`, expected none"));
    }
    for (part, mark, escape) in [(uri.query(), '?', "%3F"), (uri.fragment(), '#', "%23")] {
        if part.is_some() {
            return Err(format!("`{mark}` begins another part of a URI; in a name, it is written {escape}"));
        }
    }
    uri.to_file_path().map_err(|()| "it does not name a path".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_uris_name_paths_and_paths_name_themselves() -> Result<()> {
        let path = |text: &str| Ok::<_, Error>(local_path(text)?.map(|path| path.display().to_string()));
        for (text, wanted) in [
            ("file:///a/new%20words", "/a/new words"),
            ("file://localhost/a", "/a"),
            ("file:/a/b", "/a/b"),
            ("FILE:///a%25b", "/a%b"),
            ("file:///%C3%A9t%C3%A9", "/été"),
            ("file:///café", "/café"),
            ("/a/new%20words", "/a/new%20words"),
            ("a?b#c", "a?b#c"),
            ("./file:x", "./file:x"),
            ("a:b", "a:b"),
        ] {
            assert_eq!(path(text)?.as_deref(), Some(wanted), "{text}");
        }
        for other in ["s3://bucket/a%20b", "memory://a", "ftp://x"] {
            assert_eq!(path(other)?, None);
        }
        for (text, why) in [
            ("", "empty"),
            ("file://", "absolute"),
            ("file://localhost", "absolute"),
            ("file:a", "absolute"),
            ("file://server/share", "the host `server`"),
            ("file:///a?b", "%3F"),
            ("file:///a#b", "%23"),
            ("file:///a%00b", "null"),
            ("file:///a%FF", "UTF-8"),
        ] {
            let message = local_path(text).map(drop).unwrap_err().to_string();
            assert!(message.contains(why), "{text}: {message}");
        }
        Ok(())
    }
}
