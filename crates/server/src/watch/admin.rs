//! The page for people, the counts for Prometheus, and the purge of cached objects, at an address of their own. They show names of folders but no
//! objects. With a token, all except `/health` need it.

use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue, WWW_AUTHENTICATE};
use hyper::{Method, Request, Response, StatusCode};
use prometheus_client::encoding::text::encode;

use crate::authentication::parameter;
use crate::metrics::Metrics;
use crate::read::cached_objects::CachedObjects;
use crate::watch::sampler::Sampler;

const PAGE: &str = include_str!("status.html");

/// What the address of the status page shows and does.
pub struct Admin {
    pub metrics: Arc<Metrics>,
    pub sampler: Arc<Sampler>,
    pub cached_objects: Option<Arc<CachedObjects>>,
    pub token: Option<String>,
}

/// Answer a request to the address of the status page.
pub async fn answer(admin: Arc<Admin>, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let Admin { metrics, sampler, .. } = &*admin;
    let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
    let (status, kind, text) = match request.uri().path() {
        path if path != "/health" && !admin.allows(&request) => {
            (StatusCode::UNAUTHORIZED, "text/plain", "the token is missing\n".to_owned())
        }
        "/purge" => admin.purge(&request).await,
        _ if !is_read => (StatusCode::METHOD_NOT_ALLOWED, "text/plain", "only GET is supported\n".to_owned()),
        "/" => (StatusCode::OK, "text/html; charset=utf-8", PAGE.to_owned()),
        "/status.json" => (
            StatusCode::OK,
            "application/json",
            serde_json::to_string(&sampler.sample()).unwrap_or_else(|error| error.to_string()),
        ),
        "/metrics" => {
            let mut text = String::new();
            match encode(&mut text, &metrics.registry) {
                Ok(()) => (StatusCode::OK, "application/openmetrics-text; version=1.0.0; charset=utf-8", text),
                Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, "text/plain", error.to_string()),
            }
        }
        "/health" if metrics.draining.get() == 0 => (StatusCode::OK, "text/plain", "ok\n".to_owned()),
        "/health" => (StatusCode::SERVICE_UNAVAILABLE, "text/plain", "draining\n".to_owned()),
        _ => (
            StatusCode::NOT_FOUND,
            "text/plain",
            "see /, /metrics, /status.json, /health and POST /purge?prefix=bucket/key\n".to_owned(),
        ),
    };
    let mut response = Response::new(Full::from(Bytes::from(text)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    if status == StatusCode::UNAUTHORIZED {
        response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Basic realm=\"penstock\""));
    }
    Ok(response)
}

impl Admin {
    /// Return whether a request has the token, as `Bearer` or as the password of a browser, if one is needed.
    fn allows(&self, request: &Request<Incoming>) -> bool {
        let Some(token) = &self.token else { return true };
        let given = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let password = |text: &str| {
            Some(String::from_utf8(base64_simd::STANDARD.decode_to_vec(text).ok()?).ok()?.split_once(':')?.1.to_owned())
        };
        let given = match given.split_once(' ') {
            Some(("Bearer", text)) => text.to_owned(),
            Some(("Basic", text)) => password(text).unwrap_or_default(),
            _ => return false,
        };
        // The time must not show how many characters are right.
        given.len() == token.len()
            && given.bytes().zip(token.bytes()).fold(0, |found, (one, other)| found | (one ^ other)) == 0
    }

    /// Forget the cached objects whose `bucket/key` begins with a prefix.
    async fn purge(&self, request: &Request<Incoming>) -> (StatusCode, &'static str, String) {
        let answer = |status, text: &str| (status, "text/plain", format!("{text}\n"));
        if *request.method() != Method::POST {
            return answer(StatusCode::METHOD_NOT_ALLOWED, "only POST is supported");
        }
        if self.token.is_none() {
            return answer(StatusCode::FORBIDDEN, "start the server with --status-token to purge objects");
        }
        let Some(cached_objects) = &self.cached_objects else {
            return answer(StatusCode::CONFLICT, "this server has no cache");
        };
        let Some(prefix) = parameter(request.uri(), "prefix").filter(|prefix| prefix.contains('/')) else {
            return answer(StatusCode::BAD_REQUEST, "specify what to purge: /purge?prefix=bucket/key");
        };
        let (cached_objects, prefix) = (cached_objects.clone(), prefix.to_string());
        match tokio::task::spawn_blocking(move || cached_objects.purge(&prefix)).await {
            Ok(Ok(freed)) => (StatusCode::OK, "application/json", format!("{{\"freed_bytes\": {freed}}}\n")),
            Ok(Err(error)) if error.kind() == std::io::ErrorKind::WouldBlock => {
                answer(StatusCode::SERVICE_UNAVAILABLE, "some objects are being written to the cache now; purge again")
            }
            Ok(Err(error)) => answer(StatusCode::INTERNAL_SERVER_ERROR, &format!("a drive failed: {error}")),
            Err(error) => answer(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
        }
    }
}
