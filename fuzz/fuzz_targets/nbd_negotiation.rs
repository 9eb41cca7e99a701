//! Fuzz target: the negotiation of an NBD client.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| tapline_fuzz::nbd::negotiation(input));
