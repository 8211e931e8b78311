//! Sends what is in the folder to the cold store.

use std::sync::Arc;
use std::time::Duration;

use s3s::dto::*;
use s3s::{S3, S3ErrorCode, S3Result};

use super::WriteBack;
use super::pending::md5_of;
use crate::cold::request;
use crate::meta::{Object, copied};
use crate::upload::base64;

/// Pauses after an object could not be sent: the first one, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(30));

impl WriteBack {
    /// Send objects to the cold store, one after the other, and remove them from the folder.
    pub(super) async fn send_each(self: Arc<WriteBack>) {
        let mut pause = PAUSES.0;
        loop {
            let (object, version, is_sent) = self.pending.next().await;
            let sent = if is_sent { Ok(()) } else { self.send(&object).await };
            let done = match sent {
                Ok(()) if self.pending.sent(&object, version) => self.remove(&object).await,
                other => other,
            };
            self.count();
            let Err(error) = done else {
                pause = PAUSES.0;
                continue;
            };
            self.metrics.send_failures.inc();
            if self.pending.failed(&object, &error) == 1 {
                let why = error.message().unwrap_or(error.code().as_str());
                (self.note)(&format!(
                    "`{}/{}` was acknowledged, but is not in the cold store: {why}",
                    object.bucket, object.key
                ));
            }
            let (back, wait) = (self.clone(), pause);
            tokio::spawn(async move {
                tokio::time::sleep(wait).await;
                back.pending.again(&object);
            });
            pause = (2 * pause).min(PAUSES.1);
        }
    }

    async fn send(&self, object: &Object) -> S3Result<()> {
        let input = GetObjectInput {
            bucket: object.bucket.clone(),
            key: object.key.clone(),
            checksum_mode: Some(ChecksumMode::from_static(ChecksumMode::ENABLED)),
            ..GetObjectInput::default()
        };
        let output = match S3::get_object(&self.folder, request(input)).await {
            Err(error) if *error.code() == S3ErrorCode::NoSuchKey => {
                (self.note)(&format!(
                    "`{}/{}` was acknowledged, but its file has been removed",
                    object.bucket, object.key
                ));
                return Ok(());
            }
            other => other?.output,
        };
        let md5 = md5_of(output.e_tag.as_ref())?;
        let same = copied!(output => PutObjectInput; cache_control checksum_crc32 checksum_crc32c checksum_crc64nvme checksum_sha1 checksum_sha256
            content_disposition content_encoding content_language content_length content_type expires metadata website_redirect_location);
        let (bucket, key) = (object.bucket.clone(), object.key.clone());
        let input = PutObjectInput { bucket, key, body: output.body, content_md5: Some(base64(&md5)), ..same };
        self.cold.put_object(request(input)).await?;
        self.metrics.sent_back.inc();
        Ok(())
    }

    /// Remove an object that was sent from the folder.
    pub(super) async fn remove(&self, object: &Object) -> S3Result<()> {
        let input = DeleteObjectInput {
            bucket: object.bucket.clone(),
            key: object.key.clone(),
            ..DeleteObjectInput::default()
        };
        S3::delete_object(&self.folder, request(input)).await?;
        self.pending.removed(object);
        Ok(())
    }
}
