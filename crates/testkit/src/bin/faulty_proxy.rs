//! `faulty-proxy LISTEN UPSTREAM [FAULTS]`: runs `penstock_testkit::proxy`. Prints the address it listens on, and exits when stdin closes.
#![allow(unused_crate_dependencies)] // Only the library and the other binaries use the remaining dependencies.

use std::io::Read as _;

use penstock_testkit::proxy::{Faults, Proxy};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (listen, upstream, faults) = match &arguments[..] {
        [listen, upstream] => (listen, upstream, ""),
        [listen, upstream, faults] => (listen, upstream, faults.as_str()),
        _ => return Err("usage: faulty-proxy LISTEN UPSTREAM [name=value&…]".into()),
    };
    let proxy = Proxy::start(listen, upstream.parse()?, Faults::parse(faults)?)?;
    println!("{}", proxy.address);
    std::io::stdin().read_to_end(&mut Vec::new())?; // The parent process closes stdin to stop the proxy.
    Ok(())
}
