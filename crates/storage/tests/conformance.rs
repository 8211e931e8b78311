use penstock_storage::{Disk, Io, Local, Memory, conformance};

#[test]
fn memory_conforms() -> penstock_error::Result<()> {
    let store = Memory::named("conformance");
    conformance::check(&store, &store)
}

#[test]
fn local_conforms() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let store = Local::open(&folder.path().join("deep/down"), std::sync::Arc::new(Disk), Io::Auto)?;
    Ok(conformance::check(&store, &store)?)
}
