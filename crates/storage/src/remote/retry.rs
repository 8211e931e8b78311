//! Decides which failures are final, how long to wait before a retry, and when to stop. `ask` retries idempotent requests. Ranges
//! and creates have their own retry loops, which also call `again`. A create is retried here only if it was not sent.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use penstock_error::{Error, Result};
use tokio::time::Instant;

use super::concurrency::{ConcurrencyLimit, Permit};
use super::connect::service::{ENDING, Ending, Traffic, WEB_PAGE, chain};
use crate::counters::{Counters, add};

const FIRST_WAIT: Duration = Duration::from_millis(50);
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// Why a request failed, and whether to retry it.
pub enum Verdict {
    Final(Error),
    /// `sent`: the server may have carried out the request. `stranger`: the address of the store is probably wrong.
    Again {
        error: Error,
        throttled: bool,
        sent: bool,
        stranger: bool,
    },
}

/// The number of attempts since a request last made progress, when it began, and the error from the previous attempt.
pub struct Tries {
    pub count: u32,
    begun: Instant,
    before: Option<Error>,
}

impl Default for Tries {
    fn default() -> Tries {
        Tries { count: 0, begun: Instant::now(), before: None }
    }
}

/// For how long to try to reach a store that has never answered, or whose answers have never made sense. Its address is probably wrong.
const STRANGER: Duration = Duration::from_millis(2500);

const NO_STORE: &str = "the server's answers do not match this kind of store: check the endpoint (for MinIO, the API port, not the console port)";

/// State shared by all requests to one store.
#[derive(Debug)]
pub struct Retry {
    pub deadline: Duration,
    pub concurrency: ConcurrencyLimit,
    /// What to do without credentials.
    pub credentials_hint: &'static str,
    pub traffic: Arc<Traffic>,
}

/// Run one attempt. Returns the result and how the attempt's last request ended.
pub async fn attempt<T>(
    until: Instant,
    work: impl Future<Output = object_store::Result<T>>,
) -> (object_store::Result<T>, Ending) {
    ENDING
        .scope(Default::default(), async {
            let result = match tokio::time::timeout_at(until, work).await {
                Ok(result) => result,
                Err(elapsed) => Err(object_store::Error::Generic { store: "remote", source: Box::new(elapsed) }),
            };
            (result, ENDING.with(|ending| ending.take()))
        })
        .await
}

/// Return whether the server answered the current attempt's request with a success status.
pub fn ended_well() -> bool {
    ENDING.with(|ending| matches!(*ending.borrow(), Ending::Success))
}

impl Retry {
    /// Repeat `work` until it succeeds, fails permanently, or reaches the deadline. `work` is called for each attempt, and
    /// repeating it must be harmless.
    /// `what` appears in messages, for example "read `name`".
    pub async fn ask<T, W>(&self, counters: &Counters, what: &str, mut work: impl FnMut() -> W) -> Result<T>
    where
        W: Future<Output = object_store::Result<T>>,
    {
        let mut permit = self.concurrency.permit().await;
        let until = Instant::now() + self.deadline;
        let mut tries = Tries::default();
        loop {
            let (result, ending) = attempt(until, work()).await;
            let error = match result {
                Ok(answer) => {
                    self.traffic.note_understood();
                    return Ok(answer);
                }
                Err(error) => error,
            };
            permit = self.again(counters, self.verdict(what, &error, &ending), &mut tries, until, permit).await?;
        }
    }

    /// Derive a verdict from an error and from how its request ended.
    pub fn verdict(&self, what: &str, error: &object_store::Error, ending: &Ending) -> Verdict {
        match verdict(what, error, ending) {
            Verdict::Final(error) if error.code() == "credentials-missing" => {
                Verdict::Final(error.hint(self.credentials_hint))
            }
            Verdict::Again { error, .. } if *ending == Ending::Success && !self.traffic.understood() => {
                Verdict::Again { error: error.hint(NO_STORE), throttled: false, sent: true, stranger: true }
            }
            Verdict::Again { error, throttled, sent, .. }
                if matches!(ending, Ending::Unsent { .. }) && !self.traffic.answered() =>
            {
                Verdict::Again { error, throttled, sent, stranger: true }
            }
            other => other,
        }
    }

    /// Handle a failed attempt. Returns the error if it is final; otherwise waits and returns a new permit.
    pub async fn again<'a>(
        &'a self,
        counters: &Counters,
        verdict: Verdict,
        tries: &mut Tries,
        until: Instant,
        mut permit: Permit<'a>,
    ) -> Result<Permit<'a>> {
        let (error, throttled, stranger) = match verdict {
            Verdict::Final(error) => return Err(error),
            Verdict::Again { error, throttled, stranger, .. } => (error, throttled, stranger),
        };
        tries.count += 1;
        let wait = wait(tries.count, throttled);
        let until = if stranger { until.min(tries.begun + STRANGER) } else { until };
        if Instant::now() + wait >= until {
            // If the deadline cut the last attempt short, only the attempt before it can explain why requests fail.
            let cut = Instant::now() >= until;
            let (reason, other, when) = match tries.before.take() {
                Some(before) if cut => (before, Some(error), "last attempt"),
                before => (error, before, "previous attempt"),
            };
            let other = other.filter(|other| other.message() != reason.message());
            let other = other.map(|other| format!("; {when}: {}", other.message())).unwrap_or_default();
            let spent = tries.begun.elapsed();
            let text =
                format!("{} ({} attempts in {:.1} s{other})", reason.message(), tries.count, spent.as_secs_f64());
            let hint =
                reason.hint_text().unwrap_or("run `penstock doctor` to check whether the store responds").to_owned();
            return Err(Error::new(reason.code(), text).hint(hint));
        }
        tries.before = Some(error.clone());
        add(&counters.retries, 1);
        permit.throttled = throttled;
        drop(permit); // Other requests run while this one waits.
        tokio::time::sleep(wait).await;
        // If other requests hold all permits until the deadline, report the last known error.
        tokio::time::timeout_at(until, self.concurrency.permit()).await.map_err(|_| error)
    }
}

/// Return the wait before a retry: exponential back-off, of which at most half is jitter. Unless the server throttles, the first
/// retry is almost immediate, because the server may have closed a pooled connection.
pub fn wait(tries: u32, throttled: bool) -> Duration {
    let base = match (tries, throttled) {
        (1, false) => return Duration::from_millis(1),
        (_, false) => FIRST_WAIT,
        (_, true) => FIRST_WAIT * 4,
    };
    let longest = (base * 2u32.saturating_pow(tries.saturating_sub(1).min(16))).min(LONGEST_WAIT);
    let mut random = [0u8; 2];
    let _ = getrandom::fill(&mut random); // Without random bytes, the wait has no jitter.
    longest.mul_f64(0.5 + f64::from(u16::from_le_bytes(random)) / f64::from(u16::MAX) / 2.0)
}

fn verdict(what: &str, error: &object_store::Error, ending: &Ending) -> Verdict {
    let make = |code: &'static str, why: String| Error::new(code, format!("cannot {what}: {why}"));
    let unsent = |error: Error| Verdict::Again { error, throttled: false, sent: false, stranger: false };
    let sent = |error: Error| Verdict::Again { error, throttled: false, sent: true, stranger: false };
    match ending {
        Ending::Refused { status, code } => refused(what, *status, code),
        Ending::Unsent { host, why } => {
            let text = format!("cannot reach {host}: {why}");
            let lower = why.to_lowercase();
            let tls = ["certificate", "tls", "ssl", "handshake", "invalidcontenttype"]
                .iter()
                .any(|word| lower.contains(word));
            let dns = ["dns", "lookup", "resolve"].iter().any(|word| lower.contains(word));
            if tls {
                return Verdict::Final(make("storage-unreachable", text).hint(
                    "the server's certificate is not trusted: specify its CA in storage_options={\"ca_bundle\": …} or AWS_CA_BUNDLE, and check whether the endpoint uses http:// or https://",
                ));
            }
            let hint = if dns {
                "no such host: check the endpoint"
            } else {
                "check that the endpoint is correct and responds"
            };
            unsent(make("storage-unreachable", text).hint(hint))
        }
        Ending::Lost(why) => sent(make("storage-failed", why.clone())),
        Ending::Success => match error {
            // The server answered with success, so the failure is in the body.
            object_store::Error::NotSupported { .. } | object_store::Error::NotImplemented { .. } => Verdict::Final(
                make("unsupported-storage", chain(error))
                    .hint("the server does not support range requests; choose another server, or copy the dataset"),
            ),
            _ => sent(make("storage-failed", format!("the response was cut short: {}", chain(error)))),
        },
        Ending::None => match error {
            object_store::Error::NotFound { .. } => Verdict::Final(make("object-not-found", "no such object".into())),
            object_store::Error::InvalidPath { .. } => Verdict::Final(make("invalid-uri", chain(error))),
            object_store::Error::Generic { source, .. } if source.is::<tokio::time::error::Elapsed>() => {
                sent(make("storage-failed", "no response before the deadline".into()))
            }
            // No request was sent: object_store could not get credentials.
            _ => Verdict::Final(make("credentials-missing", format!("no credentials were found ({})", chain(error)))),
        },
    }
}

/// Convert an error response from S3 or a similar service into a verdict.
fn refused(what: &str, status: u16, code: &str) -> Verdict {
    let answer = match code {
        WEB_PAGE => format!("the server answered with {WEB_PAGE}"),
        _ => format!("the server answered {status} {code}").trim_end().to_owned(),
    };
    let make = |ours: &'static str| Error::new(ours, format!("cannot {what}: {answer}"));
    let again =
        |throttled: bool| Verdict::Again { error: make("storage-failed"), throttled, sent: true, stranger: false };
    match (status, code) {
        (_, WEB_PAGE) => Verdict::Final(make("storage-unreachable").hint(NO_STORE)),
        (_, "NoSuchBucket" | "ContainerNotFound") => Verdict::Final(
            make("bucket-not-found").hint("check the name of the bucket or container, the account or region, and the endpoint"),
        ),
        (_, "AuthenticationFailed" | "InvalidAuthenticationInfo" | "NoAuthenticationInformation") => Verdict::Final(
            make("credentials-refused").hint("the server does not accept these credentials: check the account, its key or the SAS token"),
        ),
        (_, "InvalidAccessKeyId" | "InvalidTokenId" | "InvalidToken") => Verdict::Final(
            make("credentials-refused").hint("the server does not recognise this access key: check AWS_ACCESS_KEY_ID or the profile"),
        ),
        (_, "SignatureDoesNotMatch") => Verdict::Final(
            make("credentials-refused").hint("the secret does not match the access key: check AWS_SECRET_ACCESS_KEY or the profile"),
        ),
        (_, "ExpiredToken" | "ExpiredTokenException" | "TokenRefreshRequired") => {
            Verdict::Final(make("credentials-refused").hint("the session token has expired: log in again"))
        }
        (_, "RequestTimeTooSkewed") => {
            Verdict::Final(make("credentials-refused").hint("this machine's clock is wrong: synchronise it with NTP"))
        }
        (_, "AuthorizationHeaderMalformed" | "PermanentRedirect") | (301 | 307, _) => Verdict::Final(
            make("storage-failed").hint("the bucket is in another region: set AWS_REGION or storage_options={\"region\": …}"),
        ),
        (_, "XMinioStorageFull" | "QuotaExceeded" | "InsufficientStorage") | (507, _) => {
            Verdict::Final(make("no-space").hint("free space in the store and try again; nothing was committed"))
        }
        (404, _) => Verdict::Final(make("object-not-found").hint(
            "check the bucket or container, and the endpoint; if the dataset was there, `penstock verify` lists all missing objects",
        )),
        (401 | 403, _) => Verdict::Final(
            make("permission-denied").hint("these credentials lack a permission: `penstock doctor` shows which ones are missing"),
        ),
        (416, _) => Verdict::Final(make("object-truncated").hint("run `penstock verify`; restore the object from a copy")),
        (501, _) => Verdict::Final(make("unsupported-storage").hint("the server does not support this operation; choose another store")),
        (429 | 503, _) | (_, "SlowDown" | "RequestLimitExceeded" | "Throttling") => again(true),
        (408 | 409 | 425 | 500..=599, _) | (_, "RequestTimeout") => again(false),
        _ => Verdict::Final(make("storage-failed")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Return the error from a request whose first two attempts end with `ending` and whose third gets no reply.
    fn silent_after(ending: &Ending) -> Error {
        let traffic = Arc::new(Traffic::new());
        let retry = Retry {
            deadline: Duration::from_millis(800),
            concurrency: ConcurrencyLimit::new(),
            credentials_hint: "",
            traffic,
        };
        let (counters, mut tried) = (Counters::default(), 0);
        let work = || {
            tried += 1;
            let silent = tried > 2;
            async move {
                ENDING.with(|last| {
                    last.replace(if silent { Ending::Lost("the request was aborted".into()) } else { ending.clone() })
                });
                if silent {
                    std::future::pending::<()>().await;
                }
                Err::<(), _>(object_store::Error::Generic { store: "remote", source: "no".into() })
            }
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(retry.ask(&counters, "read `x`", work)).unwrap_err()
    }

    #[test]
    fn what_the_deadline_cuts_short_hides_no_reason() {
        let error = silent_after(&Ending::Unsent { host: "bucket".into(), why: "dns error".into() });
        assert_eq!(error.code(), "storage-unreachable", "{error}");
        assert!(
            error
                .message()
                .contains("dns error (3 attempts in 0.8 s; last attempt: cannot read `x`: the request was aborted)"),
            "{error}"
        );
        let error = silent_after(&Ending::Refused { status: 503, code: "SlowDown".into() });
        assert!(error.message().contains("503 SlowDown (3 attempts"), "{error}");
    }
}
