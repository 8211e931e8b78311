//! Cold stores: an account of S3, or a local folder. Both are `s3s::S3`, so that the rest of the server does not know which one it has.

pub mod remote;
pub mod source;

use s3s::S3Request;

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
