//! `transport/tests/fuzz_bodies/vhost_ring.rs` says what is checked.

#![no_main]

#[path = "../../transport/tests/fuzz_bodies/vhost_ring.rs"]
mod body;
#[path = "../../transport/tests/vhost_mock/mod.rs"]
mod vhost_mock;

libfuzzer_sys::fuzz_target!(|data: &[u8]| body::run(data));
