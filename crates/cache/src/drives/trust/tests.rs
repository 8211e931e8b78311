//! Tests of trust: which notes the next server believes, after what can happen to drives, marks and servers.

use super::*;
use crate::drives::Drives;
use crate::spec::Spec;

struct Set(tempfile::TempDir);

impl Set {
    fn new() -> io::Result<Set> {
        tempfile::tempdir().map(Set)
    }

    fn drives(&self, spec: &str) -> Drives {
        let named =
            spec.split(',').map(|drive| format!("{}/{drive}", self.0.path().display())).collect::<Vec<String>>();
        Drives::open(&Spec::parse(&named.join(",")).unwrap()).unwrap()
    }

    fn open(&self, spec: &str) -> Trust {
        self.open_for(spec, "one")
    }

    /// Other tests have other stores.
    fn open_for(&self, spec: &str, store: &str) -> Trust {
        let drives = self.drives(spec);
        Trust::open(&drives.drives, drives.failed.is_empty(), &self.store(store)).unwrap()
    }

    fn store(&self, name: &str) -> String {
        format!("{} {name}", self.0.path().display())
    }
}

fn is_believed(trust: &Trust, note: &[u8]) -> bool {
    trust.check(0, note).is_some_and(|(_, is_believed)| is_believed)
}

#[test]
fn the_next_server_believes_what_the_last_one_wrote() -> io::Result<()> {
    let set = Set::new()?;
    let note = set.open("a:1GB").sign(b"note");
    let next = set.open("a:2GB");
    assert_eq!(next.check(0, &note), Some((&b"note"[..], true)));
    assert!(next.check(0, b"short").is_none() && !is_believed(&next, &[b'0'; 40]));
    drop(next);
    assert!(!is_believed(&set.open_for("a:1GB", "other"), &note));
    assert!(is_believed(&set.open("a:1GB"), &note));
    assert!(!is_believed(&set.open("b:1GB"), &note) && !is_believed(&set.open("a:1GB"), &note));
    Ok(())
}

#[test]
fn servers_that_share_a_drive_do_not_believe_each_other() -> io::Result<()> {
    let set = Set::new()?;
    let one = set.open("a:1GB");
    let two = set.open("a:1GB");
    let notes = (one.sign(b"one"), two.sign(b"two"));
    assert!(is_believed(&one, &notes.0) && !is_believed(&one, &notes.1));
    assert!(is_believed(&two, &notes.1) && !is_believed(&two, &notes.0));
    // The one that follows while the other runs, and the one after both.
    drop(one);
    let three = set.open("a:1GB");
    assert!(!is_believed(&three, &notes.0) && !is_believed(&three, &notes.1));
    let note = three.sign(b"three");
    drop((two, three));
    let last = set.open("a:1GB");
    assert!(!is_believed(&last, &notes.0) && !is_believed(&last, &notes.1) && !is_believed(&last, &note));
    Ok(())
}

#[test]
fn a_removal_that_misses_its_drive_ends_the_token() -> io::Result<()> {
    let set = Set::new()?;
    let path = |name: &str| set.0.path().join(name);
    let trust = set.open("a:1GB");
    let note = trust.sign(b"note");
    trust.removing(0, || Ok(()))?;
    assert!(is_believed(&trust, &note));
    std::fs::rename(path("a"), path("away"))?;
    assert!(!is_believed(&trust, &note), "another folder may be there now");
    assert!(trust.removing(0, || Ok(())).is_err());
    std::fs::rename(path("away"), path("a"))?;
    assert!(!is_believed(&trust, &note) && is_believed(&trust, &trust.sign(b"new")));
    drop(trust);
    let trust = set.open("a:1GB");
    assert!(!is_believed(&trust, &note));
    let note = trust.sign(b"note");
    // It is away only while the note is removed.
    let away = || std::fs::rename(path("a"), path("away")).and_then(|()| std::fs::create_dir(path("a")));
    assert!(trust.removing(0, away).is_err() && !is_believed(&trust, &trust.sign(b"")));
    std::fs::remove_dir(path("a"))?;
    std::fs::rename(path("away"), path("a"))?;
    assert!(!is_believed(&trust, &note));
    let note = trust.sign(b"note");
    assert!(trust.removing(0, || Err::<(), _>(io::ErrorKind::ReadOnlyFilesystem.into())).is_err());
    assert!(!is_believed(&trust, &note));
    Ok(())
}

#[test]
fn drives_that_were_left_out_for_a_while_end_the_token() -> io::Result<()> {
    let set = Set::new()?;
    for (first, between, believed) in [
        ("a:1GB,b:1GB", "a:1GB,b:1GB", true),
        ("a:1GB,b:1GB", "a:1GB", false),
        ("a:1GB,b:1GB", "b:1GB", false),
        ("a:1GB,b:1GB", "a:2GB,b:1GB", false),
        ("a:1GB", "a:1GB,b:1GB", false),
    ] {
        let note = set.open(first).sign(b"note");
        drop(set.open(between));
        assert_eq!(is_believed(&set.open(first), &note), believed, "{first} {between}");
    }
    // A drive that fails when the server starts.
    let note = set.open("a:1GB,b:1GB").sign(b"note");
    std::fs::rename(set.0.path().join("b"), set.0.path().join("away"))?;
    std::os::unix::fs::symlink("/proc/none", set.0.path().join("b"))?;
    assert_eq!(set.drives("a:1GB,b:1GB").failed.len(), 1);
    drop(set.open("a:1GB,b:1GB"));
    std::fs::remove_file(set.0.path().join("b"))?;
    std::fs::rename(set.0.path().join("away"), set.0.path().join("b"))?;
    assert!(!is_believed(&set.open("a:1GB,b:1GB"), &note));
    Ok(())
}

#[test]
fn what_is_uncertain_is_known_to_later_servers() -> io::Result<()> {
    let set = Set::new()?;
    let trust = set.open("a:1GB");
    let note = trust.sign(b"note");
    let until = SystemTime::now() + Duration::from_secs(60);
    trust.note_uncertain(until);
    assert!(is_believed(&trust, &note) && is_believed(&trust, &trust.sign(b"later")) && trust.uncertain_until < until);
    drop(trust);
    for _ in 0..2 {
        let next = set.open("a:1GB");
        assert!(!is_believed(&next, &note) && next.uncertain_until > SystemTime::now() + Duration::from_secs(50));
    }
    set.open("a:1GB").note_uncertain(SystemTime::now() - Duration::from_secs(1));
    let next = set.open("a:1GB");
    let note = next.sign(b"note");
    assert!(next.uncertain_until < SystemTime::now());
    drop(next);
    assert!(is_believed(&set.open("a:1GB"), &note));
    Ok(())
}

#[test]
fn what_is_uncertain_outlives_its_mark_and_what_is_missed() -> io::Result<()> {
    let set = Set::new()?;
    let is_uncertain = |trust: &Trust| trust.uncertain_until > SystemTime::now() + Duration::from_secs(50);
    let trust = set.open("a:1GB,b:1GB");
    let until = SystemTime::now() + Duration::from_secs(60);
    trust.note_uncertain(until);
    trust.note_on_drives(until);
    trust.renew();
    let mark = trust.mark.as_ref().unwrap().path().to_owned();
    drop(trust);
    std::fs::remove_file(&mark)?;
    for _ in 0..2 {
        let next = set.open("a:1GB,b:1GB");
        assert!(is_uncertain(&next));
        next.renew();
    }
    // One drive that says it is enough, and so is the mark.
    std::fs::rename(set.0.path().join("a"), set.0.path().join("away"))?;
    assert!(is_uncertain(&set.open("a:1GB,b:1GB")));
    let set = Set::new()?;
    let trust = set.open("a:1GB");
    Trust::without_drives(&set.store("one")).unwrap().note_uncertain(until);
    trust.renew();
    drop(trust);
    assert!(is_uncertain(&set.open("a:1GB")));
    Ok(())
}

#[test]
fn without_its_mark_a_token_ends() -> io::Result<()> {
    let set = Set::new()?;
    let trust = set.open("a:1GB");
    let note = trust.sign(b"note");
    let mark = trust.mark.as_ref().unwrap().path().to_owned();
    let text = std::fs::read_to_string(&mark)?;
    let (token, rest) = text.split_once('\n').unwrap();
    std::fs::write(&mark, format!("{token}\nanother run of the machine\n{}", rest.split_once('\n').unwrap().1))?;
    drop(trust);
    let trust = set.open("a:1GB");
    assert!(!is_believed(&trust, &note));
    let note = trust.sign(b"note");
    std::fs::remove_file(&mark)?;
    drop(trust);
    assert!(!is_believed(&set.open("a:1GB"), &note));
    Ok(())
}

#[test]
fn servers_that_do_not_use_the_drives_end_the_token() -> io::Result<()> {
    let set = Set::new()?;
    for other in ["", "b:1GB"] {
        let begin =
            || if other.is_empty() { Trust::without_drives(&set.store("one")).unwrap() } else { set.open(other) };
        let note = set.open("a:1GB").sign(b"note");
        drop(begin());
        assert!(!is_believed(&set.open("a:1GB"), &note), "`{other}` ran between");
        let trust = set.open("a:1GB");
        let note = trust.sign(b"note");
        let beside = begin();
        assert!(is_believed(&trust, &note), "`{other}` is another writer");
        drop(trust);
        let trust = set.open("a:1GB");
        assert!(!is_believed(&trust, &note), "`{other}` runs beside");
        let note = trust.sign(b"note");
        drop((beside, trust));
        assert!(!is_believed(&set.open("a:1GB"), &note), "`{other}` ran beside");
    }
    Ok(())
}

#[test]
fn drives_that_change_places_and_copies_end_the_token() -> io::Result<()> {
    let set = Set::new()?;
    let path = |name: &str| set.0.path().join(name);
    let swap = || {
        std::fs::rename(path("a"), path("c"))?;
        std::fs::rename(path("b"), path("a"))?;
        std::fs::rename(path("c"), path("b"))
    };
    let note = set.open("a:1GB,b:1GB").sign(b"note");
    swap()?;
    drop(set.open("a:1GB,b:1GB"));
    swap()?;
    assert!(!is_believed(&set.open("a:1GB,b:1GB"), &note));
    let note = set.open("d:1GB").sign(b"note");
    let copied = std::process::Command::new("cp").arg("-a").args([path("d"), path("e")]).status()?;
    assert!(copied.success() && is_believed(&set.open("d:1GB"), &note));
    std::fs::rename(path("d"), path("f"))?;
    std::fs::rename(path("e"), path("d"))?;
    assert!(!is_believed(&set.open("d:1GB"), &note));
    // A file that is put back where it was.
    let trust = set.open("d:1GB");
    let (note, path) = (trust.sign(b"note"), trust.drives[0].as_ref().unwrap().path().to_owned());
    drop(trust);
    let text = std::fs::read(&path)?;
    std::fs::write(&path, text)?;
    assert!(!is_believed(&set.open("d:1GB"), &note));
    Ok(())
}

#[test]
fn a_folder_of_extents_that_is_away_ends_the_token() -> io::Result<()> {
    let set = Set::new()?;
    for part in ["a/stores", "a/stores/*"] {
        let trust = set.open("a:1GB");
        let note = trust.sign(b"note");
        let stores = set.0.path().join("a/stores");
        let part = if part.ends_with('*') { std::fs::read_dir(&stores)?.next().unwrap()?.path() } else { stores };
        let away = set.0.path().join("away");
        std::fs::rename(&part, &away)?;
        assert!(trust.removing(0, || Ok(())).is_err());
        std::fs::rename(&away, &part)?;
        assert!(!is_believed(&trust, &note));
        drop(trust);
        assert!(!is_believed(&set.open("a:1GB"), &note));
    }
    Ok(())
}
