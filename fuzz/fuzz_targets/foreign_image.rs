//! Fuzz target: a VMDK or VHDX whose metadata was changed, and requests to it.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| tapline_fuzz::foreign::image(input));
