//! `transport/tests/fuzz_bodies/blkif_ring.rs` says what is checked.

#![no_main]

#[path = "../../transport/tests/blkif_mock/mod.rs"]
mod blkif_mock;
#[path = "../../transport/tests/fuzz_bodies/blkif_ring.rs"]
mod body;

libfuzzer_sys::fuzz_target!(|data: &[u8]| body::run(data));
