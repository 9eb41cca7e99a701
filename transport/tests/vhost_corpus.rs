//! Replays the committed corpus of the fuzz targets, with a normal toolchain.
//!
//! A separate program with one test, so that no other test of the process opens file descriptors during it.

#![allow(clippy::cast_possible_truncation, reason = "the test's own numbers are small")]

mod vhost_mock;

#[path = "fuzz_bodies/vhost_message.rs"]
mod vhost_message;
#[path = "fuzz_bodies/vhost_ring.rs"]
mod vhost_ring;

use std::path::Path;

fn replay(target: &str, body: fn(&[u8])) {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let mut inputs: Vec<_> = std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    inputs.sort();
    assert!(!inputs.is_empty(), "{} is empty", directory.display());
    for input in inputs {
        println!("{}", input.display());
        body(&std::fs::read(&input).unwrap());
    }
}

#[test]
fn the_corpus_violates_no_invariant() {
    replay("vhost_message", vhost_message::run);
    replay("vhost_ring", vhost_ring::run);
}
