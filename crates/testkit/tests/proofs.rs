//! All integration tests of the core, as one binary: `cargo test --release -p penstock-testkit --test proofs [module]`.

mod commits;
mod crashes;
mod damage;
mod explore;
mod fetch;
mod golden;
mod hostile;
mod layouts;
mod records;
mod remote;
mod schedules;
