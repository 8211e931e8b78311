//! Cold stores: an account of S3, or a local folder. Both are `s3s::S3`, so that the rest of the server does not know which one it has.

pub mod outage;
pub mod remote;
pub mod source;
mod taking;

use std::io;

use hyper::StatusCode;
use s3s::dto::ETag;
use s3s::{S3Error, S3Request, S3Result, s3_error};

/// The owner of everything in a served folder.
pub const OWNER: &str = "penstock";

/// Build a request to a cold store.
pub fn request<T>(input: T) -> S3Request<T> {
    S3Request {
        input,
        method: hyper::Method::GET,
        uri: hyper::Uri::default(),
        headers: hyper::HeaderMap::new(),
        extensions: hyper::http::Extensions::new(),
        credentials: None,
        region: None,
        service: None,
        trailing_headers: None,
    }
}

/// Return whether a write that failed may have succeeded nevertheless, or may do so later, because only its response was lost.
pub fn may_be_there(error: &S3Error) -> bool {
    let status = error.status_code().unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    status.is_server_error() && !matches!(status, StatusCode::NOT_IMPLEMENTED | StatusCode::INSUFFICIENT_STORAGE)
}

/// Return whether an error says nothing about an object: the cold store cannot be reached, or fails. A folder works while a file of it is being written or
/// compared, which is an error of the input or output, too.
pub fn is_failure(error: &S3Error) -> bool {
    let source = error.source().and_then(|source| source.downcast_ref::<io::Error>());
    let is_busy =
        source.is_some_and(|error| matches!(error.kind(), io::ErrorKind::ResourceBusy | io::ErrorKind::WouldBlock));
    let status = error.status_code().or_else(|| error.code().status_code());
    !is_busy && status.is_none_or(|status| status.is_server_error() && status != StatusCode::NOT_IMPLEMENTED)
}

/// Fail if a response has no object: a portal or a proxy in between may answer everything with 200 and a page of its own.
pub fn check_is_object(etag: Option<&ETag>, content_type: Option<&String>) -> S3Result<()> {
    let is_page = etag.is_none()
        && content_type.is_some_and(|kind| kind.trim_start().to_ascii_lowercase().starts_with("text/html"));
    if is_page {
        Err(s3_error!(ServiceUnavailable, "the cold store sent a web page without an ETag instead of the object"))
    } else {
        Ok(())
    }
}
