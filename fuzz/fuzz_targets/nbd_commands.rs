//! Fuzz target: the commands of an NBD client, after a negotiation that went well.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| tapline_fuzz::nbd::commands(input));
