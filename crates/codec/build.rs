//! Compile the C shim against the libjpeg-turbo that `turbojpeg-sys` built.

fn main() {
    println!("cargo:rerun-if-changed=src/image/jpeg_region.c");
    let mut build = cc::Build::new();
    for include in std::env::var("DEP_TURBOJPEG_INCLUDE").unwrap_or_default().split(',').filter(|path| !path.is_empty())
    {
        build.include(include);
    }
    build.file("src/image/jpeg_region.c").flag_if_supported("-Wno-clobbered").compile("penstock_jpeg_region");
}
