//! Create-only puts that are repeated until their outcome is certain.

use std::time::Duration;

use penstock_error::{Error, Result};

use crate::process;
use crate::store::{Created, Store};

/// `create_certainly` fails after this many attempts without a certain outcome.
pub const CERTAIN_TRIES: u32 = 20;

/// Create an object. If the reply is lost, repeat the put with the same body until the outcome is certain. An object that exists after a lost
/// reply was created by this call if it has this body. Bodies of different writers should therefore differ.
///
/// Fails with `commit-state-unknown` if the outcome stays uncertain or a repeated put fails: an earlier put may have succeeded.
pub fn create_certainly(store: &dyn Store, name: &str, body: &[u8]) -> Result<Created> {
    let began = std::time::Instant::now();
    let mut why = String::new();
    for tries in 0..CERTAIN_TRIES {
        match store.create(name, body) {
            Ok(Created::Unknown) => {}
            Ok(Created::Exists) if tries > 0 => match store.read(name) {
                Ok(found) if found[..] == *body => return Ok(Created::Created),
                Ok(_) => return Ok(Created::Exists),
                Err(error) => why = format!(": {}", error.message()),
            },
            Ok(certain) => return Ok(certain),
            Err(error) if tries == 0 => return Err(error),
            Err(error) => {
                why = format!(": {}", error.message());
                break;
            }
        }
        if began.elapsed() > store.features().deadline || process::interrupted() {
            break;
        }
        std::thread::sleep(Duration::from_millis(10)); // Give a transient fault time to clear.
    }
    let text = format!(
        "cannot determine whether `{}/{name}` was created: no definite reply in {:.1?}{why}",
        store.uri(),
        began.elapsed()
    );
    Err(Error::new("commit-state-unknown", text)
        .hint("check whether the object exists once the storage responds again"))
}
