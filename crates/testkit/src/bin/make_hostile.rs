//! `make-hostile FOLDER`: writes the hostile images to FOLDER for the Python tests.
#![allow(unused_crate_dependencies)] // Only the library and the other binaries use the remaining dependencies.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::path::PathBuf::from(std::env::args_os().nth(1).ok_or("usage: make-hostile FOLDER")?);
    std::fs::create_dir_all(&folder)?;
    for (name, bytes) in penstock_testkit::hostile::images()? {
        std::fs::write(folder.join(name), bytes)?;
    }
    Ok(())
}
